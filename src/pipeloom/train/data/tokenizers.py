"""Tokenizers: bytes, a file of the package `tokenizers`, or a directory of `transformers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, did_you_mean, shortened
from pipeloom.limits import TOKENIZER_BYTES, expanded, read_file
from pipeloom.train.data.choice import AUTO, BYTES, NONE

# What vocabularies call the token that ends a document, where no configuration says so.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """Text to numbers and back.

    Attributes:
        name: for people.
        vocab_size: larger than every number.
        bos, eos: the tokens that begin and end a document; None: there is none.
        digest: equal for tokenizers that give the same numbers.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    digest: str

    def encode(self, text: str) -> Tensor:
        """[length], without the tokens that begin and end a document."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode`, for many texts at once, on all cores."""

    def decode(self, tokens: Tensor) -> str: ...


class ByteTokenizer:
    """256 tokens, nothing to learn and nothing to store."""

    name = "bytes"
    vocab_size = 256
    bos: int | None = None
    eos: int | None = 10  # a line end
    digest = "bytes"

    def encode(self, text: bytes | str) -> Tensor:
        """[length] uint8, which is a token's smallest form; batches are int64."""
        data = text.encode() if isinstance(text, str) else text
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """The text; bytes that are no UTF-8, and tokens of 256 and above, become U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens.tolist()).decode(
            errors="replace"
        )


class VocabularyTokenizer:
    """A tokenizer of the package `tokenizers`, which works on all cores.

    Args:
        inner: a `tokenizers.Tokenizer`.
        bos, eos: as words of the configuration: "auto", "none", or a token's text.
        known: what the tokenizer's own configuration calls its special tokens.
    """

    def __init__(self, inner: Any, name: str, bos: str, eos: str, known: dict[str, str | None]) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name = name
        self._numbers: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._numbers.values(), default=-1) + 1
        self.eos = self._special("data.eos", eos, known["eos_token"])
        self.bos = self._special("data.bos", bos, known["bos_token"])
        if bos == AUTO and self.bos is not None and self._inner.encode("a").ids[:1] != [self.bos]:
            self.bos = None  # the tokenizer has one, and does not begin with it
        self.digest = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self._inner.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.uint32) for each in encoded]

    def decode(self, tokens: Tensor) -> str:
        text: str = self._inner.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def _special(self, key: str, wanted: str, own: str | None) -> int | None:
        """The number of the token that a key asks for. Raises ConfigError for one that the vocabulary has not."""
        if wanted == NONE:
            return None
        if wanted == AUTO:
            usual = [word for word in _USUAL_ENDS if word in self._numbers] if key == "data.eos" else []
            word = own if own is not None else usual[0] if len(usual) == 1 else None
            return None if word is None else self._numbers.get(word)
        if wanted not in self._numbers:
            near = did_you_mean(wanted, [word for word in self._numbers if len(word) < 40 and word[:1] in "<["])
            raise ConfigError(f'{key} = "{shortened(wanted)}": the tokenizer {self.name} has no such token{near}')
        return self._numbers[wanted]


def load_tokenizer(name: str, bos: str = AUTO, eos: str = AUTO) -> Tokenizer:
    """The tokenizer `name`: "bytes", a JSON file, or a directory. Raises ConfigError, in one sentence."""
    if name == BYTES:
        return _bytes(bos, eos)
    path = expanded(name)
    try:
        if path.is_dir():
            known = _specials(path)
            file = path / "tokenizer.json"
            inner = _from_file(file) if file.is_file() else _from_transformers(path)
            return VocabularyTokenizer(inner, str(path), bos, eos, known)
        return VocabularyTokenizer(_from_file(path), str(path), bos, eos, _UNMARKED)
    except ConfigError:
        raise
    except (OSError, UsageError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f'data.tokenizer = "{shortened(name)}": cannot read it: {reason}') from None
    except Exception as error:
        words = shortened(next(iter(str(error).splitlines()), type(error).__name__))
        raise ConfigError(f'data.tokenizer = "{shortened(name)}": it is not a tokenizer: {words}') from None


_UNMARKED: dict[str, str | None] = {"bos_token": None, "eos_token": None}


def _bytes(bos: str, eos: str) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    for key, value in (("bos", bos), ("eos", eos)):
        if value not in (AUTO, NONE):
            raise ConfigError(f'data.{key} = "{shortened(value)}": bytes have no such token; nearest: "none"')
    if eos == NONE:
        tokenizer.eos = None
    return tokenizer


def _from_file(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ConfigError(
            f'data.tokenizer = "{shortened(str(path))}": it needs the package tokenizers: pip install "pipeloom[data]"'
        ) from None
    return Inner.from_str(read_file(path, TOKENIZER_BYTES, "a tokenizer").decode())


def _from_transformers(path: Path) -> Any:
    """The fast tokenizer that `transformers` makes of other files than tokenizer.json."""
    tokenizer = transformers_tokenizer(path)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ConfigError(
            f'data.tokenizer = "{shortened(str(path))}": {type(tokenizer).__name__} has no fast form; save one with a '
            "tokenizer.json"
        )
    return inner


def transformers_tokenizer(path: Path) -> Any:
    """The tokenizer of a directory as `transformers` has it; nothing is fetched, and no code of the directory runs."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f'data.tokenizer = "{shortened(str(path))}": its chat template, or a tokenizer without tokenizer.json, needs '
            'transformers: pip install "pipeloom[hf]"'
        ) from None
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _specials(folder: Path) -> dict[str, str | None]:
    """The special tokens that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return _UNMARKED
    content = json.loads(read_file(path, TOKENIZER_BYTES, "a tokenizer's configuration"))
    found: dict[str, str | None] = {}
    for key in _UNMARKED:
        value = content.get(key) if isinstance(content, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        found[key] = value if isinstance(value, str) else None
    return found
