"""A folder of arrays that are computed once: each entry is named after the content that it was computed from.

An entry is a directory of raw arrays and `index.json`, which lists their types, lengths and digests. It contains no code, and its
arrays are memory-mapped. The process that prepares a run's data compares the digests, and no other worker does. An entry is
written under a temporary name and then renamed, so that it is either complete or absent, and runs that create the same one at the
same time do not interfere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeloom.errors import ConfigError, UsageError
from pipeloom.limits import CONFIG_BYTES, expanded, open_file, read_json, usable_cores

FORMAT = 3
INDEX = "index.json"
_CHUNK = 4 * 2**20


def folder_of(configured: str) -> Path:
    """Return the cache's folder, created for its owner alone where it is absent.

    Raises ConfigError if it cannot be created, belongs to another user, or can be written to by others.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = expanded(configured) if configured else expanded(base) / "pipeloom"
    key = f'data.cache = "{configured or folder}"'
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{key}: cannot write there: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{key}: it is a file, not a folder")
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise ConfigError(
            f"{key}: other users can write there, and could change the training data; use a folder of your own"
        )
    return folder.absolute()


def digest_of(description: Any) -> str:
    """Return the name of an entry: the first 32 digits of the SHA-256 of its description as JSON."""
    return hashlib.sha256(json.dumps([FORMAT, description], sort_keys=True).encode()).hexdigest()[:32]


def digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file; several are read at a time. Raises ConfigError for a file that cannot be read."""
    with ThreadPoolExecutor(max_workers=min(8, usable_cores())) as pool:
        return list(pool.map(_digest, files))


def _digest(file: Path, kind: str = "") -> str:
    hasher = hashlib.sha256(kind.encode())
    try:
        with open_file(file, "a text") as opened:
            while chunk := opened.read(_CHUNK):
                hasher.update(chunk)
    except UsageError as error:
        raise ConfigError(f"data.source: {error}") from None
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {file}: {error.strerror}") from None
    return hasher.hexdigest()


class Entry:
    """Memory-mapped arrays of an entry of the cache; `facts` holds the other values of its index."""

    def __init__(self, path: Path, compare: bool = False) -> None:
        """Raise ValueError for an entry that is damaged; with `compare`, also where only a digest tells."""
        self.path = path
        try:
            index = read_json(path / INDEX, CONFIG_BYTES, "an index")
            self.facts: dict[str, Any] = index["facts"]
            self._arrays: dict[str, np.ndarray] = {
                name: _mapped(path / f"{name}.raw", np.dtype(kind), count)
                for name, (kind, count, _) in index["arrays"].items()
            }
            for name, (kind, _, digest) in index["arrays"].items() if compare else ():
                if _digest(path / f"{name}.raw", kind) != digest:
                    raise ValueError(f"{name}.raw is not what was written")
        except (OSError, KeyError, TypeError, ValueError, UsageError) as error:
            raise ValueError(f"{path}: {error}") from None

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def get(self, name: str) -> np.ndarray | None:
        return self._arrays.get(name)


class Writer:
    """Writes the arrays of a new entry, piece by piece."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[BinaryIO, np.dtype[Any], Any]] = {}
        self._counts: dict[str, int] = {}
        self._opened = contextlib.ExitStack()
        self.facts: dict[str, Any] = {}

    def add(self, name: str, kind: str, values: Sequence[int] | np.ndarray = ()) -> None:
        """Append `values` to an array with elements of type `kind`, which the first call creates."""
        if name not in self._files:
            raw = self._opened.enter_context((self._folder / f"{name}.raw").open("wb"))
            self._files[name] = raw, np.dtype(kind), hashlib.sha256(np.dtype(kind).str.encode())
        file, dtype, hasher = self._files[name]
        content = np.ascontiguousarray(values, dtype=dtype).data
        file.write(content)
        hasher.update(content)
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def finish(self) -> None:
        self._opened.close()
        arrays = {
            name: [kind.str, self._counts[name], hasher.hexdigest()] for name, (_, kind, hasher) in self._files.items()
        }
        (self._folder / INDEX).write_text(json.dumps({"arrays": arrays, "facts": self.facts}), encoding="utf-8")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._opened.close()


def entry(folder: Path, name: str, write: Callable[[Writer], None]) -> Entry:
    """Return the entry `name`; create it with `write` if it is absent or damaged. Raises ConfigError if it cannot be written."""
    path = folder / name
    if path.is_dir():
        try:
            return Entry(path, compare=True)
        except ValueError:
            _remove(path)
    partial = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.partial"
    writer = Writer(partial)
    try:
        partial.mkdir(mode=0o700)
        write(writer)
        writer.finish()
        try:
            partial.rename(path)
        except OSError:  # another run was first, and its entry is the same
            if not path.is_dir():
                raise
        return Entry(path)
    except OSError as error:
        raise ConfigError(
            f'data.cache = "{folder}": cannot write there: {error.strerror or error}; set data.cache to a folder with room'
        ) from None
    finally:
        writer.close()
        shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a damaged entry; it is renamed first, so that no other run sees it half deleted."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.damaged")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> np.ndarray:
    if kind.hasobject:
        raise ValueError(f"{path.name} is of type {kind}")
    size = path.stat().st_size
    if size != count * kind.itemsize:
        raise ValueError(f"{path.name} has {size} bytes, not {count * kind.itemsize}")
    if not count:
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", shape=(count,))
