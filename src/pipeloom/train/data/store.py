"""Documents as tokens: one long array, the start of each document, and which tokens are targets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeloom.config.sections import DataSection
from pipeloom.errors import ConfigError, UsageError, reason_of, shortened
from pipeloom.limits import open_file
from pipeloom.train.data import cache
from pipeloom.train.data.conversations import BadDocument, Conversation
from pipeloom.train.data.sources import Fields, Record, Source, records
from pipeloom.train.data.tokenizers import (
    CHAT_TEMPLATE,
    Piece,
    SimpleTemplate,
    Template,
    Tokenizer,
    TokenizerTemplate,
    has_template,
)
from pipeloom.train.workers.context import fingerprint

_BATCH_CHARACTERS = 4 * 2**20  # characters that are tokenized at once, on all cores
_BATCH_DOCUMENTS = 4_096
_SHOWN_LINES = 3  # number of the documents left out that are named
_LLM_C_MAGIC = 20240520  # first of the 256 int32 in the header of llm.c's token files


class Joined:
    """Several arrays read as one, without a copy of them in memory."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays, self.dtype = arrays, np.result_type(*arrays)
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return a copy of the elements `span.start` to `span.stop`."""
        start, stop, parts = span.start, min(span.stop, len(self)), []
        for at in range(int(np.searchsorted(self._ends, start, side="right")), len(self._arrays)):
            before = int(self._ends[at]) - len(self._arrays[at])
            parts.append(self._arrays[at][max(0, start - before) : max(0, stop - before)])
            if stop <= self._ends[at]:
                break
        return np.concatenate(parts)


Tokens = np.ndarray | Joined


@dataclass(frozen=True)
class Store:
    """Tokens of a source.

    Attributes:
        tokens: tokens of all documents, one after the other: [tokens].
        starts: start of each document, and the end of the last: [documents + 1].
        counts: for each token whether it is a target: [tokens]; None: all are.
        digest: equal for equal tokens.
        words: description for people.
        chat: whether documents are conversations.
    """

    tokens: Tokens
    starts: np.ndarray
    counts: np.ndarray | None
    digest: str
    words: str
    chat: bool = False


def tokenized(source: Source, tokenizer: Tokenizer, data: DataSection, folder: Path) -> cache.Entry:
    """Return the cache's entry of a source's tokens, created if absent.

    Raises ConfigError, with file and line, for documents that cannot be read.
    """
    description = {
        "files": [[source.kind, digest] for digest in cache.digests(source.files)],
        "names": [file.name for file in source.files] if source.kind == "dataset" else [],
        "tokenizer": [tokenizer.digest, tokenizer.bos, tokenizer.eos],
        "field": data.field,
        "skips": data.on_error == "skip",
        "answers only": data.loss_on == "answers",
        "template": _template_words(tokenizer, data),
    }
    return cache.entry(folder, cache.digest_of(description), _Tokenization(source, tokenizer, data).write)


def opened(entry: cache.Entry, source: Source) -> Store:
    """Open an entry of the cache as a store. Raises ConfigError if it holds no tokens."""
    facts = entry.facts
    first = "; ".join(facts["first left out"])
    if not len(entry["tokens"]):
        why = f" (bad ones left out: {facts['left out']:,}; {first})" if facts["left out"] else ""
        raise ConfigError(f"{source.option}: it holds no text to train on{why}")
    bad = f"{facts['left out']:,} bad one{'s' * (facts['left out'] > 1)}"
    left_out = f", {bad} left out ({first})" if facts["left out"] else ""
    field = f', field "{facts["field"]}"' if facts["field"] else ""
    if facts["chat"]:
        disliked = f", {facts['disliked']:,} more without one" if facts["disliked"] else ""
        left_out += f", {facts['conversations']:,} conversations with {facts['answers']:,} answers to learn{disliked}"
    unknown = f"; keys that are not used: {', '.join(facts['unknown'][:20])}" if facts["unknown"] else ""
    words = f"{source.words}{field}: {len(entry['starts']) - 1:,} documents{left_out}, {len(entry['tokens']):,} tokens{unknown}"
    counts = entry.get("counts")
    return Store(entry["tokens"], entry["starts"], counts, entry.path.name, words, facts["chat"])


def _template_words(tokenizer: Tokenizer, data: DataSection) -> str:
    """Return a text that differs where conversations are rendered differently, for the cache's key."""
    folder, names = tokenizer.folder, (CHAT_TEMPLATE, "tokenizer_config.json")
    files = [] if folder is None else [folder / name for name in names]
    content = b"|".join(file.read_bytes() for file in files if file.is_file())
    return f"{data.template} {hashlib.sha256(content).hexdigest()}"


def template_of(tokenizer: Tokenizer, data: DataSection) -> Template:
    """Return the template for conversations. Raises ConfigError if the tokenizer's is configured, and it has none."""
    folder = tokenizer.folder if has_template(tokenizer.folder) else None
    if data.template == "tokenizer" and folder is None:
        raise ConfigError(f'data.template = "tokenizer": {tokenizer.name} has no chat template; nearest: "simple"')
    return SimpleTemplate(tokenizer) if folder is None or data.template == "simple" else TokenizerTemplate(folder)


class _Tokenization:
    """Writes the tokens of a source to an entry of the cache."""

    def __init__(self, source: Source, tokenizer: Tokenizer, data: DataSection) -> None:
        self._source, self._tokenizer, self._data = source, tokenizer, data
        self._fields = Fields(source, data.field)
        self._chat: bool | None = None
        self._template: Template | None = None
        self._bad = self._conversations = self._disliked = 0
        self._shown: list[str] = []
        self._end = 0

    def write(self, writer: cache.Writer) -> None:
        size = self._tokenizer.vocab_size
        self._type = "<u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4"
        writer.add("tokens", self._type)  # also where all documents are left out
        writer.add("starts", "<i8", [0])
        batch: list[tuple[list[Piece], bool]] = []
        characters = answers = 0
        for pieces, last in self._documents():
            batch.append((pieces, last))
            answers += sum(piece.counts and isinstance(piece.content, str) for piece in pieces)
            characters += sum(len(piece.content) for piece in pieces if isinstance(piece.content, str))
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                self._flush(batch, writer)
                batch, characters = [], 0
        self._flush(batch, writer)
        field = "" if self._source.kind == "text" else '", "'.join(self._fields.names)
        writer.facts |= {"left out": self._bad, "first left out": self._shown, "field": field, "chat": bool(self._chat)}
        writer.facts |= {"answers": answers, "conversations": self._conversations, "disliked": self._disliked}
        writer.facts["unknown"] = [shortened(key, 40) for key in sorted(self._fields.unknown)]

    def _documents(self) -> Iterator[tuple[list[Piece], bool]]:
        """Yield the pieces of each document, or of a part of one, and whether the document ends with them."""
        for record in records(self._fields):
            try:
                rows = self._rows(record)
            except BadDocument as error:
                self._refuse(record.place, str(error))
                continue
            for pieces in rows:
                if pieces:  # an empty text is no document
                    yield pieces, record.last

    def _rows(self, record: Record) -> list[list[Piece]]:
        """Return the pieces of each document of a record. Raises BadDocument if there is something wrong with it."""
        if isinstance(record.value, BadDocument):
            raise record.value
        kinds = ("a text", "texts"), ("a conversation", "conversations")
        chat = isinstance(record.value, Conversation)
        self._chat = chat if self._chat is None else self._chat
        if chat != self._chat:
            raise BadDocument(f"it is {kinds[chat][0]}, and those before are {kinds[self._chat][1]}")
        if not chat:
            return [self._plain(record)]
        if not any(record.value.learned):
            self._disliked += 1
            return []
        self._template = self._template or template_of(self._tokenizer, self._data)
        rows = self._template.rows(record.value)
        self._conversations += 1
        return rows if self._data.loss_on == "answers" else rows[-1:]  # the last one holds all messages

    def _plain(self, record: Record) -> list[Piece]:
        if not record.value:
            return []
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        pieces = [Piece(bos, False)] if bos is not None and record.first else []
        pieces.append(Piece(record.value, True))
        return [*pieces, Piece(eos, True)] if eos is not None and record.last else pieces

    def _refuse(self, place: str, why: str) -> None:
        if self._data.on_error != "skip":
            raise ConfigError(f'data.source: {place}: {why}; data.on_error = "skip" leaves such documents out')
        self._bad += 1
        if len(self._shown) < _SHOWN_LINES:
            self._shown.append(shortened(f"{place}: {why}"))

    def _flush(self, batch: Sequence[tuple[list[Piece], bool]], writer: cache.Writer) -> None:
        texts = [piece.content for pieces, _ in batch for piece in pieces if isinstance(piece.content, str)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        tokens: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        ends: list[int] = []
        for pieces, last in batch:
            for content, counted in pieces:
                piece_tokens = next(encoded) if isinstance(content, str) else np.array([content])
                tokens.append(piece_tokens)
                counts.append(np.full(len(piece_tokens), counted or self._data.loss_on != "answers", dtype=bool))
                self._end += len(piece_tokens)
            if last:
                ends.append(self._end)
        if not tokens:
            return
        writer.add("tokens", self._type, np.concatenate(tokens))
        writer.add("starts", "<i8", ends)
        if self._chat:
            writer.add("counts", "|b1", np.concatenate(counts))


# -- token files -----------------------------------------------------------------------------------------------------------


def token_files(source: Source, vocabulary: int, kind: str, eos: int | None) -> Store:
    """Open files of token numbers, which are memory-mapped.

    A document ends after each `eos`, if there is one, and at the end of each file.

    Args:
        vocabulary: the model's number of tokens; every token must be from 0 to below it.
        kind: element type of .bin files: "uint16", "uint32", or "auto": the smaller one that holds the vocabulary.

    Raises:
        ConfigError: a file that cannot be read, tokens outside the vocabulary, or no tokens at all.
    """
    arrays = [_mapped(file, vocabulary, kind, source) for file in source.files]
    for file, array in zip(source.files, arrays, strict=True):
        largest = int(array.max(initial=0))
        smallest = int(array.min(initial=0)) if array.dtype.kind == "i" else 0
        if smallest < 0 or largest >= vocabulary:
            wrong = smallest if smallest < 0 else largest
            raise ConfigError(
                f"{source.option}: {file} holds the token {wrong:,}, and the model has "
                f"{vocabulary:,} tokens (model.vocab_size); numbers are read as {array.dtype} (data.token_type)"
            )
    tokens = arrays[0] if len(arrays) == 1 else Joined(arrays)
    if not len(tokens):
        raise ConfigError(f"{source.option}: it holds no tokens")
    begins = np.cumsum([0, *map(len, arrays)])
    starts = np.unique(begins)
    if eos is not None:
        ends = [np.flatnonzero(array == eos) + 1 + begin for array, begin in zip(arrays, begins, strict=False)]
        starts = np.union1d(starts, np.concatenate(ends))
    digest = " ".join(fingerprint(array.data) for array in arrays)
    words = f"{source.words}: {len(starts) - 1:,} documents, {len(tokens):,} tokens of {tokens.dtype}"
    return Store(tokens, starts, None, hashlib.sha256(digest.encode()).hexdigest()[:32], words)


def _mapped(file: Path, vocabulary: int, kind: str, source: Source) -> Any:
    option = source.option
    try:
        with open_file(file, "a file of tokens") as raw:
            head = raw.read(1024)
            size = raw.seek(0, 2)
        if head.startswith(b"\x93NUMPY"):
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "ui":
                raise ConfigError(
                    f"{option}: {file} is of {array.dtype} with {array.ndim} dimensions; tokens are one row of integers"
                )
            return array
        start, number = 0, np.dtype("<u2" if kind == "uint16" or (kind == "auto" and vocabulary <= 2**16) else "<u4")
        if len(head) == 1024 and int.from_bytes(head[:4], "little") == _LLM_C_MAGIC:
            start = 1024
            promised = int.from_bytes(head[8:12], "little")
            if (size - start) // number.itemsize != promised:
                raise ConfigError(
                    f"{option}: {file} holds {(size - start) // number.itemsize:,} tokens, and its header promises "
                    f"{promised:,}: it was cut short, or its tokens are not {number} (data.token_type)"
                )
        if (size - start) % number.itemsize:
            raise ConfigError(
                f"{option}: {file} has {size:,} bytes, which is not a whole number of {number} (data.token_type)"
            )
        if size == start:
            return np.empty(0, dtype=number)
        return np.memmap(file, dtype=number, mode="r", offset=start)
    except ConfigError:
        raise
    except (OSError, UsageError, ValueError, EOFError) as error:
        raise ConfigError(f"{option}: cannot read {file}: {reason_of(error)}") from None
