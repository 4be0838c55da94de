"""Files that others wrote: checkpoints, model folders and adapters, damaged at random.

A case is a seed and a kind of folder: a sound folder is copied, one to three of its files are damaged, checksums are mostly made
right again, and commands that read such a folder run in this process, with their one worker. What is checked:

* the exit code is 0 (the damage does no harm), 2 or 5 (of `train` 4 too: no room), and an error is one sentence without a
  traceback;
* an answer takes less than `SECONDS` of processor time, and the process grows by less than `MEGABYTES`.

A case that fails is printed with what was damaged, and repeated by `--case`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fuzz._answers import Answer, answer_of, inside
from fuzz._loop import run_cases
from fuzz.input import _forget_peak, _megabytes, mutated_text, words

CASES = 1_000
SECONDS, MEGABYTES = 200.0, 700
WORKER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
SMALL = words("--parallel.pp 1 --schedule.microbatches 2 --train.global_batch_size 2 --train.seq_len 16")
TRAIN = ("train", "tiny", *SMALL, "--log.dir", "runs", "--train.steps", "3", "--train.on_nan", "skip")
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=256)
SIZED = [f"--model.{key}={value}" for key, value in {**SIZES, "num_key_value_heads": 2}.items()]
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1.5, -5, 10**9, 10**15, 10**20, 10**400, 2**63, float("inf"), float("nan"), 1e308),
    *("", "x", "F32", "I64", "C64", "float99", "../x", "/dev/zero", "/dev/null/x", "a\0b", "\ud800", "x" * 5_000),
    *([], {}, [[]], [-2, -3], ["F32"], {"x": 1}, [0, 2**62, 2**62], [1e30], list(range(999))),
)
DEEP = 300_000


def nested(random: Random) -> bytes:
    return random.choice((b"[", b'{"a":', b"[[1],")) * DEEP


# -- damage ----------------------------------------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside `value`."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(value: Any, random: Random) -> tuple[Any, str]:
    """Another value at one place, or the place removed, renamed, doubled or exchanged; and what that was."""
    every = list(places(value))
    if not every or random.random() < 0.03:
        other = random.choice(VALUES)
        return other, f"everything -> {other!r:.60}"
    outer, key = random.choice(every)
    before, way = outer[key], random.randrange(8)
    if way == 0:
        del outer[key]
        return value, f"without {key!r:.60}"
    if way == 1 and isinstance(outer, dict):
        name = str(random.choice(VALUES))[:300]
        outer[name] = outer.pop(key)
        return value, f"{key!r:.60} renamed to {name!r:.60}"
    if way == 2:
        box, other = random.choice(every)
        with contextlib.suppress(LookupError):
            outer[key], box[other] = json.loads(json.dumps(box[other])), json.loads(json.dumps(before))
        return value, f"{key!r:.60} exchanged with {other!r:.60}"
    if way == 3 and type(before) in (int, float):
        outer[key] = random.choice((before + 1, before - 1, -before, before * 2, before * 10**9, before / 3))
    else:
        outer[key] = random.choice(VALUES)
    return value, f"{key!r:.60}: {before!r:.40} -> {outer[key]!r:.60}"


def changed_json(data: bytes, random: Random) -> tuple[bytes, str]:
    value, words = changed(json.loads(data), random)
    if random.random() < 0.04:
        return json.dumps(value).encode()[:-1] + b"," + nested(random), f"{words}, and nested"
    return json.dumps(value).encode(), words


def changed_bytes(data: bytes, random: Random) -> tuple[bytes, str]:
    if random.random() < 0.5:
        return mutated_text(data.decode("latin-1"), random).encode("utf-8", "replace"), "text"
    at = random.randrange(len(data) + 1)
    return random.choice(
        (data[:at], data[:at] + bytes([random.randrange(256)]) + data[at + 1 :], b"", nested(random))
    ), "bytes"


def changed_tensors(data: bytes, random: Random) -> tuple[bytes, str]:
    """A safetensors file with another header, length of the header, or values."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    way = random.randrange(6)
    if way == 0:
        other = random.choice((0, 1, length - 1, length + 1, 2**40, 2**64 - 1)) % 2**64
        return other.to_bytes(8, "little") + data[8:], "length"
    if way == 1:
        body = body[: random.randrange(len(body))] if random.random() < 0.5 else body + b"\0" * 4
        words = "cut or extended"
    elif way == 2:
        header, words = changed_bytes(header, random)
    else:
        header, words = changed_json(header, random)
    return len(header).to_bytes(8, "little") + header + body, f"header: {words}"


def damage(folder: Path, random: Random) -> str:
    """Damage one file of `folder`; return what that was."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:  # all were removed before
        return "nothing is left"
    path = random.choice(files)
    way = random.random()
    if way < 0.08:
        path.unlink()
        kind = random.choice(("removed", "a folder", "a pipe", "a link", "a device", "a loop"))
        if kind == "a folder":
            path.mkdir()
        elif kind == "a pipe":
            os.mkfifo(path)
        elif kind != "removed":
            path.symlink_to({"a link": random.choice(files), "a device": Path("/dev/zero"), "a loop": path}[kind])
        return f"{path.name}: {kind}"
    data = path.read_bytes()
    change: Callable[[bytes, Random], tuple[bytes, str]] = changed_bytes
    if way > 0.2 and path.suffix == ".safetensors":
        change = changed_tensors
    elif way > 0.2 and path.suffix == ".json":
        change = changed_json
    with contextlib.suppress(ValueError, RecursionError):  # no JSON any more
        data, words = change(data, random)
        path.write_bytes(data)
        return f"{path.name}: {words}"
    return f"{path.name}: nothing"


def signed(folder: Path) -> None:
    """Make the checksums of a checkpoint right again, as somebody would who means harm."""
    for manifest in filter(Path.is_file, folder.rglob("manifest.json")):
        with contextlib.suppress(Exception):
            content = json.loads(manifest.read_bytes())
            content.pop("sha256", None)
            for name, entry in content["files"].items():
                data = (manifest.parent / name).read_bytes() if (manifest.parent / name).is_file() else b""
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            manifest.write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


# -- sound folders, and commands that read them ----------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make the sound folders that cases are copies of."""
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    families = {
        "llama": transformers.LlamaConfig(**SIZES),
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=64),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, head_dim=16, num_key_value_heads=2
        ),
    }
    torch.manual_seed(0)
    for name, config in families.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name, max_shard_size="40KB" if name == "llama" else "1GB")
    with inside(str(folder)):
        store = ("--checkpoint.dir", str(folder / "checkpoint"), "--checkpoint.every", "2", "--train.steps", "2")
        _sound((*TRAIN, *SIZED, *store))
        (step,) = (folder / "checkpoint").glob("step-*")
        lora = ("--model.source", str(folder / "llama"), "--lora.r", "2", "--data.tokenizer", "bytes")
        _sound((*TRAIN, *lora, "--checkpoint.dir", str(folder / "trained"), "--checkpoint.every", "3"))
        _sound(("export", str(folder / "trained"), str(folder / "adapter")))
    assert step.is_dir()


def _sound(words: tuple[str, ...]) -> None:
    found = answer(words)
    assert found.code == 0, f"{words}: {found.err}\n{found.trace}"


def commands(kind: str, folder: Path) -> list[tuple[str, ...]]:
    """Command lines that read a folder of this kind; they run in a folder that has `out` and `runs` to themselves."""
    path = str(folder)
    generate = ("generate", path, "--prompt", "ab", "--tokens", "1")
    if kind == "checkpoint":
        resume = (*TRAIN, *SIZED, "--checkpoint.resume", path)
        return [resume, generate, ("export", path, "out"), ("export", path, "out", "--format", "dcp")]
    if kind == "trained":
        return [generate, ("export", path, "out"), ("export", path, "out", "--merge")]
    if kind == "adapter":
        return [generate]
    text = ("--data.tokenizer", "bytes")
    source = (*TRAIN, "--model.source", path, *text)
    weights = (*TRAIN, "--model.weights", path, *text)
    return [(*source, "--dry-run"), source, weights, generate, ("import", path, "out")]


KINDS = ("checkpoint", "checkpoint", "llama", "gpt2", "qwen3_moe", "trained", "adapter")


def answer(words: tuple[str, ...]) -> Answer:
    """Run a command line in this process, its one worker too."""

    def work(command: Callable[[], int]) -> int:
        with patch.dict(os.environ, WORKER):
            try:
                return command()
            except SystemExit as end:
                return int(end.code or 0)

    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    with patch("pipeloom.train.workers.worker.leave", sys.exit):
        found = answer_of(words, {"pipeloom.cli.train": work, "pipeloom.cli.hub": work})
    if dist.is_initialized():
        dist.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return found


def complaint(code: int, said: str, seconds: float, megabytes: float, codes: tuple[int, ...] = (0, 2, 5)) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if code not in codes:
        return f"exit code {code}: {said[-300:]}"
    if "Traceback" in said:
        return f"a traceback: {said[-300:]}"
    if code and max(map(len, said.split()), default=0) > 300:
        return f"echo: a word of {max(map(len, said.split()))} characters"
    if code and not said.strip():
        return "no message"
    if seconds > SECONDS:
        return f"slow: {seconds:.1f} s"
    if megabytes > MEGABYTES:
        return f"memory: {megabytes:.0f} MB"
    return None


def _end_of(trace: str) -> str:
    return "\n".join(trace.splitlines()[-12:])


def failure(good: Path, seed: int, codes: Counter[tuple[str, int]], verbose: bool = False) -> str | None:
    """Run the case of this seed; return what is wrong, None where nothing is."""
    random = Random(seed)
    kind = random.choice(KINDS)
    with tempfile.TemporaryDirectory(prefix="pipeloom-fuzz-") as name, inside(name):
        bad = Path(name) / kind
        shutil.copytree(good / kind, bad, symlinks=True)
        damages = [damage(bad, random) for _ in range(random.choice((1, 1, 1, 2, 3)))]
        if random.random() < 0.9:
            signed(bad)
        words = random.choice(commands(kind, bad))
        for attempt in range(2):
            _forget_peak()
            before = _megabytes("VmRSS")
            try:
                found = answer(words)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                trace = _end_of(traceback.format_exc())
                return f"{type(error).__name__} escapes: {str(error)[:200]}; {words[0]}; {damages}\n{trace}"
            megabytes = _megabytes("VmHWM") - before
            no_room = (4,) if words[0] == "train" else ()
            wrong = complaint(found.code, found.err, found.seconds, megabytes, (0, 2, 5, *no_room))
            if attempt or wrong is None or not wrong.startswith(("slow", "memory")):  # a first answer imports packages
                break
    codes[words[0], found.code] += 1
    if verbose:
        print(
            f"{' '.join(words)}\n{damages}\n{found.err}exit code {found.code}, {found.seconds:.2f} s, {megabytes:.0f} MB"
        )
    return None if wrong is None else f"{wrong}; {' '.join(words)}; {damages}\n{_end_of(found.trace)}"


def replay(text: str) -> int:
    """Run the case of a seed; 0 where its answers are sound."""
    with tempfile.TemporaryDirectory(prefix="pipeloom-fuzz-") as name:
        make(Path(name))
        wrong = failure(Path(name), int(text), Counter(), verbose=True)
    print(wrong or "sound")
    return int(wrong is not None)


def main(seed: int, cases: int | None, deadline: float | None) -> int:
    """Run the part (see `tests.fuzz.__main__`)."""
    codes: Counter[tuple[str, int]] = Counter()

    def run(number: int) -> str | None:
        wrong = failure(Path(name), number, codes)
        return wrong and f"{wrong.rstrip()}\n  python -m tests.fuzz files --case {number}"

    with tempfile.TemporaryDirectory(prefix="pipeloom-fuzz-") as name:
        make(Path(name))
        failures = run_cases("files", CASES, (seed, cases, deadline), run)
    for (command, code), number in sorted(codes.items()):
        print(f"{command:<10} exit code {code}: {number}")
    return failures
