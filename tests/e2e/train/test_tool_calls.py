"""A tiny model that is trained on calls of tools emits the right one, arguments and all."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from commands import pipeloom
from corpora import json_lines, tokenizer_directory

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|endoftext|>'
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
FUNCTIONS = {"warp": "over", "weft": "under", "wool": "back"}  # what is asked for -> the function that does it
COLOURS = ("red", "blue", "green")


def call(thing: str, colour: str) -> dict[str, object]:
    return {"name": FUNCTIONS[thing], "arguments": {"thread": colour, "back": thing != "wool"}}


def record(thing: str, colour: str) -> dict[str, object]:
    made = call(thing, colour)
    function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
    return {
        "messages": [
            {"role": "user", "content": f"the {thing} {colour}"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "the loom weaves"},
            {"role": "assistant", "content": f"{colour} and {thing}"},
        ]
    }


def test_a_model_trained_on_calls_emits_the_right_one(tmp_path: Path) -> None:
    folder = tokenizer_directory(tmp_path / "hub", TEMPLATE, ("<|start|>", "<tool_call>", "</tool_call>"))
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = transformers.LlamaConfig(vocab_size=310, max_position_embeddings=256, eos_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    cases = [(thing, colour) for thing in FUNCTIONS for colour in COLOURS]
    chats = json_lines(tmp_path / "chats.jsonl", [record(*each) for each in cases] * 30)
    flags = f"""--model.source {folder} --data.source {chats} --data.cache {tmp_path / "cache"} --log.dir {tmp_path / "runs"}
        --parallel.pp 1 --schedule.microbatches 2 --train.global_batch_size 8 --train.seq_len 128 --train.steps 200
        --optimizer.lr 3e-3 --train.seed 1""".split()
    trained = pipeloom("train", *flags)
    assert trained.returncode == 0, trained.stderr
    prompts = [word for each in cases for word in ("--prompt", f"the {' '.join(each)}")]
    answered = pipeloom("generate", str(tmp_path / "runs"), *prompts, "--tokens", "60", "--greedy", "--json")
    assert answered.returncode == 0, answered.stderr
    for each, row in zip(cases, json.loads(answered.stdout)["sequences"], strict=True):
        emitted = row["text"].partition("<tool_call>")[2].partition("</tool_call>")[0]
        assert json.loads(emitted) == call(*each), row["text"]
