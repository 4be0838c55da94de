"""Choices in `[data]`, as far as its text alone decides them: the tokenizer's name, and whether anything is tokenized at all."""

from __future__ import annotations

import os

from pipeloom.config import Config
from pipeloom.limits import expanded
from pipeloom.train.data.corpus import STDLIB, name_of
from pipeloom.train.data.sources import find

BYTES, AUTO, NONE = "bytes", "auto", "none"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")  # one of which a tokenizer's directory has


def tokenizer_name(tokenizer: str, model: str) -> str:
    """Return what `data.tokenizer` means: "bytes", or a path; "auto" is that of the model's directory where it has one."""
    if tokenizer != AUTO:
        return tokenizer
    folder = expanded(model)
    return model if model and any((folder / name).is_file() for name in FILES) else BYTES


def is_plain_text(config: Config) -> bool:
    """Return whether a run trains on the bytes of one source's text files, which every worker reads; nothing is tokenized then.

    Raises ConfigError where the kind of the source is not clear.
    """
    data = config.data
    tokenizer = tokenizer_name(data.tokenizer, config.model.source or config.model.weights)
    whole = data.documents in ("pack", "sort")
    if tokenizer != BYTES or len(data.source) > 1 or data.validation or whole or data.eos == "none":
        return False
    if data.format not in ("auto", "text") or not (
        data.source[0] == STDLIB or os.path.lexists(name_of(data.source[0]))
    ):
        return False
    return data.source[0] == STDLIB or find(data.source[0], data.format).kind == "text"
