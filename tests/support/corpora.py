"""Small corpora in every form, and a tokenizer that knows their words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeloom.config import Config, load
from pipeloom.train.data.prepare import Data, opened, prepare

WORDS = (
    "the",
    "loom",
    "weaves",
    "thread",
    "over",
    "and",
    "back",
    "under",
    "red",
    "blue",
    "green",
    "wool",
    "warp",
    "weft",
)


def documents(count: int = 120, most: int = 40, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, most))) + f" {at}." for at in range(count)]


def json_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tokenizer_file(path: Path, size: int = 300, specials: Sequence[str] = ("<|endoftext|>", "<s>")) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*specials], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(documents(), trainer)
    made.save(str(path))
    return path


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tokenizer_directory(path: Path, template: str = TEMPLATE, more: Sequence[str] = ()) -> Path:
    """A tokenizer of 300 tokens with a chat template, as `transformers` saves it."""
    path.mkdir(exist_ok=True)
    tokenizer_file(path / "tokenizer.json", specials=("<|endoftext|>", "<s>", *more))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": template}))
    return path


def config(folder: Path, **keys: Any) -> Config:
    """Tiny, with a cache in `folder`; keys are of [data], or with their section as train__seq_len."""
    named = {key.replace("__", ".") if "__" in key else f"data.{key}": value for key, value in keys.items()}
    usual = {"data.cache": str(folder / "cache"), "train.seq_len": 64, "train.global_batch_size": 4}
    return load("tiny", {**usual, **named})


def data(folder: Path, **keys: Any) -> Data:
    found = config(folder, **keys)
    return opened(found, prepare(found))
