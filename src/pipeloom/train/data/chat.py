"""Conversations rendered as text: the pieces that the model learns to write, and those that it only reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipeloom.errors import shortened
from pipeloom.train.data.tokenizers import Tokenizer, transformers_tokenizer

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

    def _render(self, messages: list[dict[str, str]], prompts: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts)
        except Exception as error:
            words = next(iter(str(error).splitlines()), type(error).__name__)
            raise BadConversation(f"the tokenizer's chat template refuses it: {words}") from None
        return text


def has_template(folder: Path) -> bool:
    """Return whether a tokenizer's directory has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and b'"chat_template"' in config.read_bytes()
