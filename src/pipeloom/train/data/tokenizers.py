"""Tokenizers: bytes, a file of the package `tokenizers`, or a directory of `transformers`; and conversations rendered as text."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, did_you_mean, first_line, reason_of, shortened
from pipeloom.foreign import typed
from pipeloom.limits import TOKENIZER_BYTES, expanded, read_file, read_json
from pipeloom.train.data.conversations import (
    ANSWERS,
    REASONING,
    BadDocument,
    Conversation,
    markers,
    with_text_arguments,
)
from pipeloom.train.data.sources import AUTO, BYTES, NONE, require_no_tokens

CHAT_TEMPLATE = "chat_template.jinja"
# Usual names of the token that ends a document, tried where no configuration names it.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class ByteTokenizer:
    """Tokenizer of 256 tokens, the values of a byte; there is nothing to train or to store.

    Attributes (of every tokenizer):
        name: name for people.
        vocab_size: larger than every token.
        bos, eos: the tokens that begin and end a document; None: there is none.
        digest: equal for tokenizers that encode alike.
        folder: directory of `transformers`; None: it is not from one.
    """

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
        """Encode many texts at once."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Return the text; bytes that are not UTF-8, and tokens of 256 and above, become U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens.tolist()).decode(
            errors="replace"
        )


class VocabularyTokenizer:
    """A tokenizer of the package `tokenizers`, which encodes many texts on all cores; attributes as of `ByteTokenizer`.

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
        """Return the tokens of a text: [length], without `bos` and `eos`."""
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


Tokenizer = ByteTokenizer | VocabularyTokenizer


def load_tokenizer(name: str, bos: str = AUTO, eos: str = AUTO) -> Tokenizer:
    """Load the tokenizer `name`: "bytes", a JSON file, or a directory. Raises ConfigError if that fails."""
    if name == BYTES:
        require_no_tokens(bos, eos)
        tokenizer = ByteTokenizer()
        tokenizer.eos = None if eos == NONE else tokenizer.eos
        return tokenizer
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
        raise ConfigError(f'data.tokenizer = "{shortened(name)}": cannot read it: {reason_of(error)}') from None
    except Exception as error:
        raise _no_tokenizer(name, error) from None


def _no_tokenizer(name: str, error: Exception) -> ConfigError:
    """Return the error for files that a tokenizer's package cannot read, whatever it raises."""
    return ConfigError(f'data.tokenizer = "{shortened(name)}": it is not a tokenizer: {shortened(first_line(error))}')


_UNMARKED: dict[str, str | None] = {"bos_token": None, "eos_token": None}


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
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _no_tokenizer(str(path), error) from None


def _specials(folder: Path) -> dict[str, str | None]:
    """Return the special tokens that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return _UNMARKED
    content = read_json(path, TOKENIZER_BYTES, "a tokenizer's configuration")
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object")
    specials = {}
    for key in _UNMARKED:
        value = content.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        specials[key] = typed(str(path), {key: value}, key, str, "text")
    return specials


# -- conversations -----------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Part of a document: a text or a token; `counts`: whether its tokens are targets."""

    content: str | int
    counts: bool


_SIMPLE = (
    "{{ BOS }}{% if tools %}{{ '<|tools|>\\n' + tools | tojson + '\\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|' + message.role + '|>\\n' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}<|call|>"
    "{{ call.function | tojson }}{% endfor %}{{ EOS }}"
    "{% endgeneration %}{% else %}{{ message.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


class SimpleTemplate:
    r"""Template of `<|role|>`, a newline, the content; answers end with the tokenizer's eos, everything else with a newline.

    Calls stand in lines of their own behind an answer's text, as `<|call|>` and JSON, and tools before all messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bos, self._eos = tokenizer.bos, tokenizer.eos
        ends = [(name, end) for name, end in (("bos", self._bos), ("eos", self._eos)) if end is not None]
        self.specials = {f"{name}_token": tokenizer.decode(torch.tensor([end])) for name, end in ends}

    def for_transformers(self) -> str:
        """Return the template in the language of `transformers`, with marks around answers."""
        words = (("BOS", self.specials.get("bos_token", "")), ("EOS", self.specials.get("eos_token", "\n")))
        return reduce(lambda text, word: text.replace(word[0], json.dumps(word[1])), words, _SIMPLE)

    def rows(self, given: Conversation) -> list[list[Piece]]:
        """Return the pieces of each document of a conversation: one, or one for each answer that is learned.

        Raises BadDocument if it cannot be rendered.
        """
        pieces = [] if self._bos is None else [Piece(self._bos, False)]
        if given.tools:
            pieces.append(Piece(f"<|tools|>\n{json.dumps(given.tools, ensure_ascii=False)}\n", False))
        for message, learned in zip(given.messages, given.learned, strict=True):
            if extra := message.keys() & REASONING:
                raise BadDocument(f'data.template = "simple" has no place for {min(extra)}')
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
            text = "\n".join([message["content"]] * bool(message["content"]) + [f"<|call|>{call}" for call in calls])
            pieces.append(Piece(f"<|{message['role']}|>\n", False))
            pieces.append(Piece(text, learned))
            pieces.append(Piece("\n" if self._eos is None or message["role"] != ANSWERS else self._eos, learned))
        return [pieces]

    def prompt(self, text: str) -> list[Piece]:
        """Return the pieces of a user's message, up to where the answer begins."""
        begin = [] if self._bos is None else [Piece(self._bos, False)]
        return [*begin, Piece(f"<|user|>\n{text}\n<|{ANSWERS}|>\n", False)]


_FORMS = 4_096  # of conversations, of which it is known whether the template writes them in full


class TokenizerTemplate:
    """The chat template of a tokenizer's directory, as `transformers` renders it.

    Where the template marks what the assistant generates, that is learned. Elsewhere an answer is the text that the template
    appends to the prompt that asks for it, up to the special token that ends it. Training therefore sees the same pieces as
    generation: the tokens of the prompt, and then those of the answer. Where the template writes earlier answers in another way
    (without their reasoning, for instance), each answer is a document of its own, with those before it as context.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer = transformers_tokenizer(folder)
        self._words = f"the chat template of {shortened(folder.name)}"
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        ends = "|".join(map(re.escape, sorted(special | {*tokenizer.all_special_tokens}, key=len, reverse=True)))
        self._ended = re.compile(f"(.*(?:{ends or '(?!)'}))\\s*", re.DOTALL)
        self._end = re.compile(f"\\s*(?:{ends or '(?!)'})")
        # conversations of a form, with marks for words -> what the template leaves out
        self._left_out: dict[str, str] = {}

    def rows(self, given: Conversation) -> list[list[Piece]]:
        marked, marks = markers(given)
        form = json.dumps([marked.messages, marked.tools])
        if form not in self._left_out:
            if len(self._left_out) == _FORMS:
                self._left_out.clear()
            text, _ = self._render(marked.messages, marked.tools, False)
            left_out = (
                what
                for mark, what in marks.items()
                if not re.search(rf"(?<!\\\")(?<!'){mark}" if "JSON" in what else mark, text)
            )
            self._left_out[form] = next(left_out, "")
        if self._left_out[form]:
            raise BadDocument(f"{self._words} leaves {self._left_out[form]} out")
        messages = given.messages
        text, spans = self._render(messages, given.tools, False)
        if spans:
            return [self._marked(text, spans, given)]
        answers, done, chained = [], "", True
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            prompt, whole = (self._render(messages[: number + at], given.tools, not at)[0] for at in (0, 1))
            if not whole.startswith(prompt):
                same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
                raise BadDocument(
                    f"{self._words} prompts for an answer with {shortened(prompt[same:])!r}, which it does not write before "
                    f'message {number + 1}; use data.template = "simple"'
                )
            chained = chained and prompt.startswith(done)
            done = self._up_to_end(whole, len(prompt))
            answers.append((prompt, done, given.learned[number]))
        if not chained:
            return [
                [Piece(prompt, False), Piece(done[len(prompt) :], True)] for prompt, done, learned in answers if learned
            ]
        pieces, before = [], 0
        for prompt, done, learned in answers:
            pieces += [Piece(prompt[before:], False), Piece(done[len(prompt) :], learned)]
            before = len(done)
        return [pieces]

    def prompt(self, text: str) -> list[Piece]:
        return [Piece(self._render([{"role": "user", "content": text}], None, True)[0], False)]

    def _marked(self, text: str, spans: list[tuple[int, int]], given: Conversation) -> list[Piece]:
        """Return the pieces of a text in which the template marks the answers; the token that ends one is learned with it."""
        learned = [
            each for each, message in zip(given.learned, given.messages, strict=True) if message["role"] == ANSWERS
        ]
        if len(learned) != len(spans) and all(learned):
            learned = [True] * len(spans)
        if len(learned) != len(spans):
            raise BadDocument(
                f"{self._words} marks {len(spans)} answers of {len(learned)}, some of which are not learned"
            )
        pieces, before = [], 0
        for (start, end), counts in zip(spans, learned, strict=True):
            end = len(self._up_to_end(text[:end], start))
            after = None if self._ended.fullmatch(text, start, end) else self._end.match(text, end)
            end = end if after is None else after.end()
            pieces += [Piece(text[before:start], False), Piece(text[start:end], counts)]
            before = end
        return pieces

    def _up_to_end(self, text: str, start: int) -> str:
        """Return the text up to the last special token behind `start`, if nothing but blanks follows that."""
        ended = self._ended.fullmatch(text, start)
        return text if ended is None else text[: ended.end(1)]

    def _render(self, messages: Any, tools: Any, prompts: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where in it the template marks what the assistant generates."""
        utilities: Any = importlib.import_module("transformers.utils.chat_template_utils")
        words = ""
        for form_of in (list, with_text_arguments):  # some templates join arguments as text, others convert them
            try:
                template = self._tokenizer.get_chat_template(tools=tools)
                options = {
                    **self._tokenizer.special_tokens_map,
                    "add_generation_prompt": prompts,
                    "return_assistant_tokens_mask": re.search(r"{%-?\s*generation", template) is not None,
                }
                (text,), spans = utilities.render_jinja_template(
                    [form_of(messages)], tools, chat_template=template, **options
                )
                return text, spans[0] if spans else []
            except Exception as error:
                words = words or first_line(error)
        raise BadDocument(f"{self._words} refuses it: {words}")


Template = SimpleTemplate | TokenizerTemplate


def prompt_tokens(text: str, tokenizer: Tokenizer, template: Template | None) -> list[int]:
    """Return the tokens of a prompt: a user's message under a template for conversations, else the text behind bos."""
    begin = [] if tokenizer.bos is None else [Piece(tokenizer.bos, False)]
    pieces = [*begin, Piece(text, False)] if template is None else template.prompt(text)
    encoded = [tokenizer.encode(each).tolist() if isinstance(each, str) else [each] for each, _ in pieces]
    return [token for tokens in encoded for token in tokens]


def has_template(folder: Path | None) -> bool:
    """Return whether a tokenizer's directory, if it has one, has a chat template."""
    if folder is None or (folder / CHAT_TEMPLATE).is_file():
        return folder is not None
    config = folder / "tokenizer_config.json"
    return config.is_file() and b'"chat_template"' in config.read_bytes()
