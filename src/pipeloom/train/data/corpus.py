"""The corpus: a text to train on, and a held-out text to evaluate on."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeloom.errors import ConfigError, UsageError, shortened
from pipeloom.limits import CORPUS_BYTES, CORPUS_FILES, expanded, read_file

STDLIB = "stdlib"
HELD_OUT_EVERY = 20
_NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Text that was read from files.

    Attributes:
        train, held_out: the two texts.
        files: number of files.
        name: the source, in words.
    """

    train: bytes
    held_out: bytes
    files: int
    name: str


def read_corpus(source: str, every: int = HELD_OUT_EVERY) -> Corpus:
    """Read the text of `source`: `"stdlib"`, a file, or a folder. The result is the same each time, in every process.

    One file in `every` is held out; with fewer files, the last 1/`every` of the text. Raises ConfigError if there is nothing
    to read.
    """
    root = Path(name_of(source))
    files = text_files(root, stdlib=source == STDLIB)
    name = f"Python's standard library ({root})" if source == STDLIB else str(root)
    texts = [text for text in _read(files, source) if text]
    if not texts:
        raise ConfigError(f'data.source = "{shortened(source)}": {shortened(str(root))} holds no text to train on')
    train, held_out = split(texts, every)
    return Corpus(train, held_out, len(texts), name)


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


def text_files(root: Path, stdlib: bool = False) -> list[Path]:
    """Return `root` itself if it is a file, else the files below it that are not hidden, sorted.

    Of the standard library, return the Python sources. Raises ConfigError for a folder with too many files.
    """
    if stdlib:
        return stdlib_files(root)
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


def split(texts: list[bytes], every: int = HELD_OUT_EVERY) -> tuple[bytes, bytes]:
    """Return (train, held out), the texts of each joined by newlines."""
    if len(texts) >= every:
        held_out = texts[every // 2 :: every]
        train = [text for at, text in enumerate(texts) if at % every != every // 2]
        return b"\n".join(train), b"\n".join(held_out)
    whole = b"\n".join(texts)
    cut = len(whole) - len(whole) // every
    return whole[:cut], whole[cut:]


def _read(files: Iterable[Path], source: str) -> list[bytes]:
    """Return the contents of the files that are text: those without a zero byte."""
    option, left = f'data.source = "{shortened(source)}"', CORPUS_BYTES
    contents: list[bytes] = []
    try:
        for path in files:
            if os.path.getsize(path) > left:
                raise ConfigError(
                    f"{option}: it has more than {CORPUS_BYTES / 2**30:g} GiB, which every worker would hold"
                )
            contents.append(read_file(path, left, "a text"))
            left -= len(contents[-1])
    except UsageError as error:
        raise ConfigError(f"{option}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {error.filename}: {error.strerror}") from None
    return [content for content in contents if b"\0" not in content]
