"""Tokenizers: bytes, a file of the package `tokenizers`, or a directory of `transformers`; and conversations rendered as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, did_you_mean, shortened
from pipeloom.limits import TOKENIZER_BYTES, expanded, read_file, read_json
from pipeloom.train.data.sources import AUTO, BYTES, NONE

# Usual names of the token that ends a document, tried where no configuration names it.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """Text to numbers and back.

    Attributes:
        name: name for people.
        vocab_size: larger than every token.
        bos, eos: the tokens that begin and end a document; None: there is none.
        digest: equal for tokenizers that encode alike.
        folder: directory of `transformers`; None: it is not from one.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    digest: str
    folder: Path | None

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text: [length], without `bos` and `eos`."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once, on all cores."""

    def decode(self, tokens: Tensor) -> str: ...


class ByteTokenizer:
    """Tokenizer of 256 tokens, the values of a byte; there is nothing to train or to store."""

    name = "bytes"
    vocab_size = 256
    bos: int | None = None
    eos: int | None = 10  # a line end
    digest = "bytes"
    folder: Path | None = None

    def encode(self, text: bytes | str) -> Tensor:
        """Return the bytes of a text: [length] uint8, the smallest type that holds them; batches are int64."""
        data = text.encode() if isinstance(text, str) else text
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Return the text; bytes that are not UTF-8, and tokens of 256 and above, become U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens.tolist()).decode(
            errors="replace"
        )


class VocabularyTokenizer:
    """A tokenizer of the package `tokenizers`, which encodes on all cores.

    Args:
        inner: a `tokenizers.Tokenizer`.
        bos, eos: as in the configuration: "auto", "none", or a token's text.
        known: "bos_token" and "eos_token" as the tokenizer's own configuration names them; None: it does not.
    """

    def __init__(self, inner: Any, name: str, bos: str, eos: str, known: dict[str, str | None]) -> None:
        self.folder = Path(name) if Path(name).is_dir() else None
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name = name
        self._numbers: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._numbers.values(), default=-1) + 1
        self.eos = self._special("data.eos", eos, known["eos_token"])
        self.bos = self._special("data.bos", bos, known["bos_token"])
        if bos == AUTO and self.bos is not None and self._inner.encode("a").ids[:1] != [self.bos]:
            self.bos = None  # the vocabulary has one, but the tokenizer does not put it before texts
        self.digest = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self._inner.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.uint32) for each in encoded]

    def decode(self, tokens: Tensor) -> str:
        text: str = self._inner.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def _special(self, key: str, wanted: str, from_file: str | None) -> int | None:
        """Return the number of the token that a key selects. Raises ConfigError if the vocabulary does not have it."""
        if wanted == NONE:
            return None
        if wanted == AUTO:
            common_ends = [word for word in _USUAL_ENDS if word in self._numbers] if key == "data.eos" else []
            word = from_file if from_file is not None else common_ends[0] if len(common_ends) == 1 else None
            return None if word is None else self._numbers.get(word)
        if wanted not in self._numbers:
            near = did_you_mean(wanted, [word for word in self._numbers if len(word) < 40 and word[:1] in "<["])
            raise ConfigError(f'{key} = "{shortened(wanted)}": the tokenizer {self.name} has no such token{near}')
        return self._numbers[wanted]


def load_tokenizer(name: str, bos: str = AUTO, eos: str = AUTO) -> Tokenizer:
    """Load the tokenizer `name`: "bytes", a JSON file, or a directory. Raises ConfigError if that fails."""
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
            f'data.tokenizer = "{shortened(str(path))}": it needs the package tokenizers: pip install -e ".[data]"'
        ) from None
    return Inner.from_str(read_file(path, TOKENIZER_BYTES, "a tokenizer").decode())


def _from_transformers(path: Path) -> Any:
    """Return the fast tokenizer that `transformers` builds from files other than tokenizer.json."""
    tokenizer = transformers_tokenizer(path)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ConfigError(
            f'data.tokenizer = "{shortened(str(path))}": {type(tokenizer).__name__} has no fast form; save one with a '
            "tokenizer.json"
        )
    return inner


def transformers_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a directory with `transformers`; nothing is downloaded, and no code of the directory is run."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f'data.tokenizer = "{shortened(str(path))}": its chat template, or a tokenizer without tokenizer.json, needs '
            'transformers: pip install -e ".[hf]"'
        ) from None
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _specials(folder: Path) -> dict[str, str | None]:
    """Return the special tokens that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return _UNMARKED
    content = read_json(path, TOKENIZER_BYTES, "a tokenizer's configuration")
    specials: dict[str, str | None] = {}
    for key in _UNMARKED:
        value = content.get(key) if isinstance(content, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        specials[key] = value if isinstance(value, str) else None
    return specials


# -- conversations -----------------------------------------------------------------------------------------------------

ANSWERS = "assistant"


class Piece(NamedTuple):
    """Part of a document: a text or a token; `counts`: whether its tokens are targets."""

    content: str | int
    counts: bool


class BadConversation(ValueError):
    """A conversation that cannot be rendered as text, with the reason."""


class Template(Protocol):
    """Renders conversations as pieces. `name` is part of the cache's key."""

    name: str

    def pieces(self, messages: Sequence[Any]) -> list[Piece]:
        """Return the pieces of one conversation. Raises BadConversation if it cannot be rendered."""

    def prompt(self, text: str) -> list[Piece]:
        """Return the pieces of a user's message, up to where the answer begins."""


def checked(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Return the messages as dictionaries of role and content.

    Raises BadConversation for a message of another form, and if there is no answer.
    """
    conversation = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadConversation(f'message {number} is not {{"role": text, "content": text}}')
        try:
            (message["role"] + message["content"]).encode()
        except UnicodeEncodeError:
            raise BadConversation(f"message {number} holds half of a surrogate pair, which is not text") from None
        conversation.append({"role": message["role"], "content": message["content"]})
    if not any(message["role"] == ANSWERS for message in conversation):
        raise BadConversation(f'no message has the role "{ANSWERS}", so there is nothing to learn')
    return conversation


class SimpleTemplate:
    r"""Template of `<|role|>`, a newline, the content; answers end with the tokenizer's eos, everything else with a newline."""

    name = "simple"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bos, self._eos = tokenizer.bos, tokenizer.eos

    def pieces(self, messages: Sequence[Any]) -> list[Piece]:
        pieces = [] if self._bos is None else [Piece(self._bos, False)]
        for message in checked(messages):
            answer = message["role"] == ANSWERS
            pieces.append(Piece(f"<|{message['role']}|>\n", False))
            pieces.append(Piece(message["content"], answer))
            pieces.append(Piece("\n" if self._eos is None or not answer else self._eos, answer))
        return pieces

    def prompt(self, text: str) -> list[Piece]:
        begin = [] if self._bos is None else [Piece(self._bos, False)]
        return [*begin, Piece(f"<|user|>\n{text}\n<|{ANSWERS}|>\n", False)]


class TokenizerTemplate:
    """The chat template of a tokenizer's directory, as `transformers` renders it.

    An answer is the text that the template appends to the prompt that asks for it. Training therefore sees the same pieces as
    generation: the tokens of the prompt, and then those of the answer with the token that ends it.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers_tokenizer(folder)
        self.name = f"template {self._tokenizer.chat_template}"

    def pieces(self, messages: Sequence[Any]) -> list[Piece]:
        given = checked(messages)
        pieces, done = [], ""
        for number, message in enumerate(given):
            if message["role"] != ANSWERS:
                continue
            prompt, whole = self._render(given[:number], True), self._render(given[: number + 1], False)
            plain = self._render(given[:number], False)
            if plain.startswith(done) and whole.startswith(plain) and not whole.startswith(prompt):
                raise BadConversation(
                    f"the tokenizer's chat template prompts for an answer with {shortened(prompt.removeprefix(plain))!r}, which "
                    f'it does not write before message {number + 1}; use data.template = "simple"'
                )
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise BadConversation(
                    f"the tokenizer's chat template writes message {number + 1} differently when others follow it; "
                    'use data.template = "simple"'
                )
            pieces += [Piece(prompt[len(done) :], False), Piece(whole[len(prompt) :], True)]
            done = whole
        return pieces

    def prompt(self, text: str) -> list[Piece]:
        return [Piece(self._render([{"role": "user", "content": text}], True), False)]

    def _render(self, messages: list[dict[str, str]], prompts: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts)
        except Exception as error:
            words = next(iter(str(error).splitlines()), type(error).__name__)
            raise BadConversation(f"the tokenizer's chat template refuses it: {words}") from None
        return text


def prompt_tokens(text: str, tokenizer: Tokenizer, template: Template | None) -> list[int]:
    """Return the tokens of a prompt: a user's message under a template for conversations, else the text behind bos."""
    begin = [] if tokenizer.bos is None else [Piece(tokenizer.bos, False)]
    pieces = [*begin, Piece(text, False)] if template is None else template.prompt(text)
    encoded = [tokenizer.encode(each).tolist() if isinstance(each, str) else [each] for each, _ in pieces]
    return [token for tokens in encoded for token in tokens]


def has_template(folder: Path | None) -> bool:
    """Return whether a tokenizer's directory, if it has one, has a chat template."""
    if folder is None or (folder / "chat_template.jinja").is_file():
        return folder is not None
    config = folder / "tokenizer_config.json"
    return config.is_file() and b'"chat_template"' in config.read_bytes()
