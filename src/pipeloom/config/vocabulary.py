"""The vocabulary size in a tokenizer's file; reads its JSON and needs no package."""

from __future__ import annotations

from typing import Any

from pipeloom.errors import UsageError
from pipeloom.limits import TOKENIZER_BYTES, expanded, read_json


def vocabulary_size(tokenizer: str) -> int | None:
    """One more than the largest token id of `tokenizer`, a file or a directory; None where its JSON does not give it.

    Errors in the file are reported when the tokenizer itself is loaded.
    """
    path = expanded(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content: Any = read_json(path, TOKENIZER_BYTES, "a tokenizer")
        words = content["model"]["vocab"]
        numbers = [len(words) - 1] if isinstance(words, list) else list(words.values())
        numbers += [token["id"] for token in content.get("added_tokens") or []]
        return int(max(numbers)) + 1 if numbers else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError):
        return None
