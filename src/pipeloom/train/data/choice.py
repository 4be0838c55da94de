"""Choices that follow from `[data]` before anything is tokenized: the tokenizer's name, and whether one is needed at all."""

from __future__ import annotations

import os

from pipeloom.config import Config
from pipeloom.limits import expanded
from pipeloom.train.data.corpus import STDLIB, name_of
from pipeloom.train.data.sources import find

BYTES, AUTO, NONE = "bytes", "auto", "none"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")  # a tokenizer's directory has one of them


def tokenizer_name(tokenizer: str, model: str) -> str:
    """Return "bytes" or the path that `data.tokenizer` means; "auto" is the model's directory if it has one, else "bytes"."""
    if tokenizer != AUTO:
        return tokenizer
    folder = expanded(model)
    return model if model and any((folder / name).is_file() for name in FILES) else BYTES


def is_plain_text(config: Config) -> bool:
    """Return whether a run trains on the bytes of one source's text files, which every worker reads; nothing is tokenized then.

    Raises ConfigError if the kind of the source is not clear.
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
