"""Sources of documents: text, JSON lines, Parquet, token files, and directories of Hugging Face `datasets`.

Nothing here imports torch, so that the launcher can check a source quickly.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib
import json
import logging
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeloom.errors import ConfigError, UsageError, echo, first_line, reason_of, shortened
from pipeloom.foreign import unknown_keys
from pipeloom.limits import CORPUS_BYTES, CORPUS_FILES, LINE_BYTES, expanded, open_file, read_file
from pipeloom.train.data.conversations import BESIDE, HARMLESS, PAIRS, REFUSED, BadDocument, conversation

STDLIB = "stdlib"
_NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def require_length(tokens: int, seq_len: int, what: str) -> None:
    """Raise ConfigError if a text of `tokens` tokens is too short for a window of `seq_len` and the token after it."""
    if tokens > seq_len:
        return
    advice = f"use at most {tokens - 1}, or a larger data.source" if tokens > 1 else "use a larger data.source"
    raise ConfigError(f"train.seq_len = {seq_len}: the {what} has {tokens} token{'s' * (tokens != 1)}; {advice}")


def stdlib_files(root: Path) -> list[Path]:
    """Return the Python sources of the standard library, sorted; without installed packages, and without its tests, which some
    systems do not install."""
    files = [(path.relative_to(root), path) for path in root.rglob("*.py")]
    return [path for inner, path in sorted(files) if not _NOT_OURS.intersection(inner.parts)]


def name_of(source: str) -> str:
    """Return the path that an entry of `data.source` means."""
    return sysconfig.get_paths()["stdlib"] if source == STDLIB else str(expanded(source))


def text_files(root: Path) -> list[Path]:
    """Return `root` itself if it is a file, else the files below it that are not hidden, sorted.

    Raises ConfigError for a folder with too many files.
    """
    if not root.is_dir():
        return [root]
    files: list[Path] = []
    for folder, _, names in os.walk(root):
        inside = Path(folder)
        files += (path.relative_to(root) for name in names if (path := inside / name).is_file())
        if len(files) > CORPUS_FILES:
            raise ConfigError(f'data.source = "{shortened(str(root))}": it holds more than {CORPUS_FILES:,} files')
    files.sort()
    return [root / inner for inner in files if not any(part.startswith(".") for part in inner.parts)]


# -- sources -----------------------------------------------------------------------------------------------------------

FileKind = Literal["text", "jsonl", "parquet", "tokens", "dataset"]

_SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "tokens",
    ".bin": "tokens",
}
_WORDS = {"text": "text", "jsonl": "JSON lines", "parquet": "Parquet", "tokens": "tokens", "dataset": "a dataset"}
_SNIFFED = 65_536  # bytes at the start of a text that are examined for JSON
_ARRAY = re.compile(rb"\s*\[\s*\{")  # the beginning of a JSON array of objects
_PART = 2**20  # most characters of a text that are tokenized at once; a longer one is cut after a line
_ROWS = 1_000  # rows of a table that are read at once


@dataclass(frozen=True)
class Source:
    """One entry of `data.source`, found on this machine.

    Attributes:
        name: as configured.
        kind: kind of its files.
        files: its files, in the order in which they are read.
    """

    name: str
    kind: FileKind
    files: tuple[Path, ...]

    @property
    def option(self) -> str:
        """Return the entry as messages name it."""
        return f'data.source = "{shortened(self.name)}"'

    @property
    def words(self) -> str:
        """Return a description for people: what is read, and as which kind."""
        name = name_of(self.name)
        count = f", {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{shortened(name)} ({_WORDS[self.kind]}{count})"


@dataclass(frozen=True)
class Record:
    """A document, or a part of one.

    Attributes:
        place: the file and the line or row, for messages.
        value: a text, or a `Conversation`; the reason as a BadDocument where there is none.
        first, last: whether it begins and ends its document.
    """

    place: str
    value: Any
    first: bool = True
    last: bool = True


def find(name: str, kind: str) -> Source:
    """Find the files of one entry of `data.source`. Raises ConfigError if there are none, or if their kind is not clear.

    Args:
        name: "stdlib", a file, a folder, a directory of `datasets`, or a pattern such as "texts/**/*.txt".
        kind: a FileKind, or "auto": the one that the names of the files indicate.
    """
    option = f'data.source = "{shortened(name)}"'
    if name == STDLIB:
        return Source(name, "text", tuple(stdlib_files(Path(name_of(name)))))
    path = expanded(name)
    if path.is_dir() and kind == "auto" and _is_dataset(path):
        return Source(name, "dataset", tuple(text_files(path)))
    files = text_files(path) if os.path.lexists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [file for file in files if not file.is_dir()]
    if not files:
        raise ConfigError(f"{option}: it holds no files")
    if kind != "auto":
        by_name = kind not in ("text", "dataset") and len(files) > 1
        fitting = [file for file in files if kind_of(file) == kind] if by_name else files
        if not fitting:
            raise ConfigError(
                f'{option}: none of its {len(files)} files is {_WORDS[kind]} (data.format = "{kind}") by its name'
            )
        return Source(name, kind, tuple(fitting))  # type: ignore[arg-type]
    kinds = {kind_of(file) for file in files}
    if kinds == {"text", "tokens"}:  # binary files among texts, such as pictures, which are skipped when read
        kinds = {"text"}
    if len(kinds) > 1:
        several = " and ".join(f"{sum(kind_of(file) == each for file in files)} of {each}" for each in sorted(kinds))
        raise ConfigError(f"{option}: it holds files of several kinds, {several}; set data.format to the one to read")
    if kinds == {"text"} and all(file.suffix.lower() == ".json" and _ARRAY.match(_head(file)) for file in files):
        kinds = {"jsonl"}
    if kinds == {"text"}:
        _refuse_records(files, option)
    return Source(name, kinds.pop(), tuple(files))


def kind_of(file: Path) -> FileKind:
    """Return the kind of a file, judged by its name."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"]:
        del suffixes[-1]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


def _is_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _refuse_records(files: Sequence[Path], option: str) -> None:
    """Raise ConfigError for tables and JSON lines, whose commas and braces are hardly meant as text.

    Tables are text among other files, as in a folder of source code.
    """
    if {file.suffix.lower() for file in files} <= {".csv", ".tsv"}:
        raise ConfigError(
            f'{option}: its files are tables; set data.format = "dataset" to train on a column (data.field), or "text" to train '
            "on them as they are"
        )
    for file in files:
        head = _head(file)
        lines = [line for line in head.split(b"\n") if line.strip()][:3]
        if len(head) == _SNIFFED and len(lines) < 3:
            del lines[-1:]
        if lines and all(map(_is_object, lines)) and (len(lines) > 1 or file.suffix.lower() == ".json"):
            raise ConfigError(
                f'{option}: {shortened(str(file))} is JSON lines; set data.format = "jsonl" to train on a field of each '
                '(data.field), or "text" to train on it as it is'
            )


def _head(file: Path) -> bytes:
    """Return the first bytes of a text; none of a file that cannot be read, which is refused where it is read in full."""
    try:
        with open_file(file, "a text") as opened:
            return opened.read(_SNIFFED + len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)[:_SNIFFED]
    except UsageError as error:  # a pipe or a device
        raise ConfigError(f"data.source: {error}") from None
    except OSError:
        return b""


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


# -- reading -----------------------------------------------------------------------------------------------------------------


def records(fields: Fields) -> Iterator[Record]:
    """Yield the documents of a source, in order. Raises ConfigError for files that cannot be read at all."""
    source = fields.source
    try:
        for file in source.files[:1] if source.kind == "dataset" else source.files:
            yield from _READERS[source.kind](file, source, fields)
    except ConfigError:
        raise
    except UsageError as error:
        raise ConfigError(f"{source.option}: {error}") from None
    except (OSError, EOFError) as error:
        path = getattr(error, "filename", None) or source.name
        raise ConfigError(f"{source.option}: cannot read {path}: {reason_of(error)}") from None


class Fields:
    """Extracts what to train on from the records of a source.

    Args:
        field: field of records to train on; empty: "messages", "conversations", "text", or a question and its answer (`PAIRS`),
            whichever the first record has.

    Attributes:
        names: the fields to train on, once they are fields.
        unknown: keys of the records that are neither used nor harmless.
    """

    def __init__(self, source: Source, field: str) -> None:
        self.source = source
        self.names: tuple[str, ...] = (field,) if field else ()
        self.unknown: set[str] = set()

    def choose(self, names: Any) -> None:
        """Choose from the names in the first record, unless a field is set. Raises ConfigError if it is not clear which."""
        if self.names:
            return
        for candidates in (("messages",), ("conversations",), ("text",), *PAIRS):
            if {candidates[0], candidates[-1]} <= {*names}:
                self.names = tuple(
                    filter(None, candidates)
                )  # of which a later record may have those that this one lacks
                return
        option = self.source.option
        for key in REFUSED.keys() & names:
            raise ConfigError(f"{option}: its records have {key}, and {REFUSED[key]}")
        known = ", ".join(shortened(str(name), 40) for name in list(names)[:20])
        raise ConfigError(
            f'{option}: its first record has none of "text", "messages", "conversations", "prompt" with "completion", and '
            f'"instruction" with "output" (it has {known or "no fields"}); name the field to train on with data.field'
        )

    def choose_column(self, names: Sequence[str], where: str) -> None:
        """Choose the field from a table's columns. Raises ConfigError if the table, which messages call `where`, lacks it."""
        self.choose(names)
        if self.names[0] not in names:
            raise ConfigError(
                f'{self.source.option}: {where} has no column "{shortened(self.names[0])}"; it has {", ".join(names[:20])}'
            )

    def of(self, place: str, record: Any) -> Record:
        """Return what to train on of a record, which may be a line of JSON."""
        try:
            return Record(place, self._value(_parsed(record) if isinstance(record, bytes) else record))
        except BadDocument as error:
            return Record(place, error)

    def _value(self, record: Any) -> Any:
        if not isinstance(record, dict):
            raise BadDocument(f"it is {echo(record)}, not an object")
        self.choose(record)
        name, value = self.names[0], record.get(self.names[0])
        if name not in record:
            raise BadDocument(f'it has no field "{shortened(name)}"')
        messages = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        beside = BESIDE if messages or len(self.names) > 1 else ()
        self.unknown.update(unknown_keys(record, {*self.names, *beside, *HARMLESS}))
        if beside:
            return conversation(record, self.names)
        if not isinstance(value, str):
            raise BadDocument(f'field "{shortened(name)}" is {echo(value)}, not a string or a list of messages')
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadDocument(f'field "{name}" holds half of a surrogate pair, which is not text') from None
        return value


def _json_lines(file: Path, source: Source, fields: Fields) -> Iterator[Record]:
    """Yield the records of a file with an object on each line, or of one array of objects."""
    if file.suffix.lower() != ".gz" and _ARRAY.match(_head(file)):
        try:
            rows = _parsed(read_file(file, CORPUS_BYTES, "a text").removeprefix(codecs.BOM_UTF8))
            yield from (fields.of(f"{file}, record {at}", record) for at, record in enumerate(rows, 1))
        except BadDocument as error:
            yield Record(str(file), error)
        return
    number = 0
    with open_file(file, "a text") as raw:
        opened: Any = gzip.GzipFile(fileobj=raw) if file.suffix.lower() == ".gz" else raw
        while line := opened.readline(LINE_BYTES + 1):
            number += 1
            place = f"{file}, line {number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = opened.readline(LINE_BYTES)
                yield Record(place, BadDocument(f"it has more than {LINE_BYTES:,} bytes"))
            elif line.strip():
                yield fields.of(place, line)


def _parsed(line: bytes) -> Any:
    """Return the value of a text of JSON. Raises BadDocument if it cannot be parsed."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadDocument(f"it is not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise BadDocument("it is nested too deeply") from None
    except ValueError as error:
        if b"\0" in line:
            raise BadDocument("it is not JSON: it holds zero bytes") from None
        where = f"{getattr(error, 'msg', error)} (column {getattr(error, 'colno', '?')})"
        raise BadDocument(f"it is not JSON: {where}") from None


def _text(file: Path, source: Source, fields: Fields) -> Iterator[Record]:
    content = read_file(file, CORPUS_BYTES, "a text")
    if b"\0" in content or not content:
        return  # a binary file
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Record(f"{file}, line {line}", BadDocument("it is not UTF-8"))
        return
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > _PART:
            end = text.rfind("\n", start, start + _PART) + 1 or start + _PART
            end = end if end > start else start + _PART
        yield Record(str(file), text[start:end], start == 0, end == len(text))
        start = end


def _dataset(file: Path, source: Source, fields: Fields) -> Iterator[Record]:
    """Yield the documents of a Parquet file, or of all files that `datasets` reads, a thousand rows at a time.

    A directory written by `Dataset.save_to_disk` is memory-mapped; everything else is streamed.
    """
    option, number = source.option, 0
    try:
        datasets: Any = importlib.import_module("datasets")
        datasets.logging.set_verbosity(logging.CRITICAL)  # its errors are raised too, and reported below
    except ImportError:
        raise ConfigError(
            f'{option}: reading {_WORDS[source.kind]} needs the package datasets: pip install -e ".[data]"'
        ) from None
    place, where = (str(file), str(file)) if source.kind == "parquet" else (name_of(source.name), "it")
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as scratch:  # for locks, which streaming leaves in its cache
        try:
            dataset = _opened_dataset(datasets, source, file, scratch)
            if isinstance(dataset, dict):
                if "train" not in dataset:
                    raise ConfigError(f'{option}: it has no split "train", only {", ".join(dataset)}')
                dataset = dataset["train"]
            columns = dataset.column_names or list(next(iter(dataset), {}))
            fields.choose_column(columns, where)
            names = [name for name in dict.fromkeys((*fields.names, *BESIDE, *REFUSED)) if name in columns]
            fields.unknown |= {*columns} - {*names, *HARMLESS}
            for batch in dataset.select_columns(names).iter(batch_size=_ROWS):
                for values in zip(*(batch[name] for name in names), strict=True):
                    number += 1
                    yield fields.of(f"{place}, row {number}", dict(zip(names, values, strict=True)))
        except ConfigError:
            raise
        except Exception as error:
            after = f" after row {number}" if number else ""
            words = shortened(first_line(error))
            raise ConfigError(f"{option}: datasets cannot read {where}{after}: {words}") from None


def _opened_dataset(datasets: Any, source: Source, file: Path, scratch: str) -> Any:
    """Return a dataset, or a dictionary of its splits; no script of a directory is run, and nothing is downloaded."""
    path = expanded(source.name).absolute()
    if source.kind == "parquet":
        return datasets.load_dataset("parquet", data_files=str(file.absolute()), streaming=True, cache_dir=scratch)
    if path.is_dir() and _is_dataset(path):
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), streaming=True, cache_dir=scratch)
    files = [str(file.absolute()) for file in source.files]
    return datasets.load_dataset(str(Path(files[0]).parent), data_files=files, streaming=True, cache_dir=scratch)


_READERS: dict[str, Callable[[Path, Source, Fields], Iterator[Record]]] = {
    "text": _text,
    "jsonl": _json_lines,
    "parquet": _dataset,
    "dataset": _dataset,
}


BYTES, AUTO, NONE = "bytes", "auto", "none"
# -- choices that need no torch ----------------------------------------------------------------------------------------

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")  # a tokenizer's directory has one of them


def require_no_tokens(bos: str, eos: str) -> None:
    """Raise ConfigError for special tokens of the tokenizer "bytes", which has none."""
    for key, value in (("bos", bos), ("eos", eos)):
        if value not in (AUTO, NONE):
            raise ConfigError(f'data.{key} = "{shortened(value)}": bytes have no such token; nearest: "none"')


def tokenizer_name(tokenizer: str, model: str) -> str:
    """Return "bytes" or the path that `data.tokenizer` means; "auto" is the model's directory if it has one, else "bytes"."""
    if tokenizer != AUTO:
        return tokenizer
    folder = expanded(model)
    return model if model and any((folder / name).is_file() for name in FILES) else BYTES
