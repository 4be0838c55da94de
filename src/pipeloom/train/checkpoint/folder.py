"""Folders of checkpoints: one directory per step, complete when its manifest is there; durable files, and locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError, ConfigError, UsageError, reason_of
from pipeloom.limits import CONFIG_BYTES, expanded, read_file, runs_in
from pipeloom.train.checkpoint.manifest import DTYPES_BY_NAME, MANIFEST, StoredFile

# Bytes hashed and then written at a time: few enough that a piece is still in the processor's cache when it is written.
_PIECE = 2**20
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


# -- files -------------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meanwhile: Callable[[], None] | None = None) -> StoredFile:
    """Write contiguous CPU tensors as a safetensors file, and wait until it is on disk.

    The safetensors library would first copy all of them into one buffer, and the file would have to be read again for its
    checksum. Tensors with the largest elements are first, so that every tensor is aligned to the size of its elements.

    Args:
        meanwhile: called while the file system writes.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    parts += (_bytes_of(tensor) for _, tensor in ordered)
    return _write(path, parts, meanwhile)


def write_bytes(path: Path, data: bytes) -> StoredFile:
    """Write a file, and wait until it is on disk."""
    return _write(path, [data])


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk. Errors are ignored: file systems without this call do not need it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def verify(directory: Path, name: str, stored: StoredFile, whole: bool = True) -> str:
    """Compare a file with its entry in the manifest. Return a message with what was expected and found; "" if they match.

    Args:
        whole: compare the checksum too, not only the size.
    """
    path = directory / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return f"{path}: expected a file, found a {'symbolic link' if path.is_symlink() else 'directory or device'}"
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.size:
                return f"{path}: expected {stored.size:,} bytes, found {size:,}"
            actual = hashlib.file_digest(file, "sha256").hexdigest() if whole else stored.sha256
    except FileNotFoundError:
        return f"{path}: expected {stored.size:,} bytes, found no file"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}"
    if actual != stored.sha256:
        return f"{path}: expected SHA-256 {stored.sha256}, found {actual}: it is damaged"
    return ""


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise CheckpointError("a tensor to be written is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _write(path: Path, parts: Iterable[bytes | memoryview], meanwhile: Callable[[], None] | None = None) -> StoredFile:
    hasher, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                hasher.update(piece)
                while piece:
                    piece = piece[os.write(file.fileno(), piece) :]
            size += len(view)
        if meanwhile is None:
            os.fsync(file.fileno())
        else:
            with ThreadPoolExecutor(1, "pipeloom-fsync") as thread:
                synced = thread.submit(os.fsync, file.fileno())
                meanwhile()
            synced.result()
    return StoredFile(size, hasher.hexdigest())


# -- folders -----------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"step-(\d{6,15})")
_REPLACED = re.compile(r"\.(step-\d+)\.replaced")
_LEFTOVER = re.compile(r"\.step-\d+\.(partial|replaced|deleted)")


def step_path(folder: Path, step: int) -> Path:
    """Return the directory of a checkpoint, such as `FOLDER/step-000010`."""
    return folder / f"step-{step:06d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the directory in which a checkpoint is written: hidden, so that it is not taken for a complete one."""
    return folder / f".step-{step:06d}.partial"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every complete checkpoint in `folder`, newest first; [] if there is no such folder.

    A save that replaces a checkpoint renames the old one before the new one. If the process ended between the two, the old
    checkpoint counts.
    """
    checkpoints = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            replaced = _REPLACED.fullmatch(path.name)
            match = _STEP.fullmatch(path.name if replaced is None else replaced[1])
            hidden = replaced is not None and (folder / replaced[1]).exists()
            if match is not None and not hidden and (path / MANIFEST).is_file():
                checkpoints.append((int(match[1]), path))
    return sorted(checkpoints, reverse=True)


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the newest complete one in a folder.

    In the folder of a run that saved elsewhere it is the newest one in the `checkpoint.dir` of its `config.toml`; in a folder of
    runs, that of the newest run that has one.

    Raises CheckpointError if there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    elsewhere = _folder_in_config(path)
    for _, newest in complete(path) or (complete(elsewhere) if elsewhere is not None else []):
        return newest
    for run in runs_in(path):
        with contextlib.suppress(CheckpointError):
            return newest_checkpoint(run)
    raise CheckpointError(
        f"{path} holds no complete checkpoint"
        + (f", nor does {elsewhere}, the checkpoint.dir of that run" if elsewhere is not None else "")
    )


def _folder_in_config(run: Path) -> Path | None:
    """Return the `checkpoint.dir` of a run; None: it has none, or `run` is not the folder of a run."""
    try:
        text = read_file(run / "config.toml", CONFIG_BYTES, "a configuration").decode()
        folder = tomllib.loads(text)["checkpoint"]["dir"]
        return expanded(folder).absolute() if folder else None
    except (OSError, UsageError, ValueError, KeyError, TypeError, AttributeError):
        return None


def require_new(path: Path) -> None:
    """Raise ConfigError unless there is nothing at `path`, or an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty; give a new directory")


def make_directory(path: Path) -> None:
    """Make a directory for an export, with those above it, unless it exists. Raises ConfigError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {reason_of(error)}") from None


def remove_leftovers(folder: Path) -> None:
    """Restore old checkpoints whose replacement was interrupted, and remove what an interrupted save or deletion left."""
    for path in list(folder.iterdir()):
        match = _REPLACED.fullmatch(path.name)
        if match is not None and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        elif _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name: atomically, unless it replaces a checkpoint of that name."""
    sync_directory(partial)
    old = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def superseded(checkpoints: Sequence[tuple[int, Path]], keep: int, keep_every: int) -> list[Path]:
    """Return the directories to delete from `checkpoints` (newest first).

    The `keep` newest stay (0: all of them), and those whose step is a multiple of `keep_every` (0: no others).
    """
    if keep == 0:
        return []
    return [path for step, path in checkpoints[keep:] if not keep_every or step % keep_every]


def prune(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Delete superseded checkpoints; each is renamed first, so that one deleted in part is not taken for complete.

    Args:
        step: step of the checkpoint just written. Later ones are neither deleted nor counted: a run that continues from an
            earlier step has skipped them, because they are damaged.
    """
    until = [(number, path) for number, path in complete(folder) if number <= step]
    for path in superseded(until, keep, keep_every):
        hidden = path.with_name(f".{path.name}.deleted")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden)


# -- locks -------------------------------------------------------------------------------------------------------------

LOCK_FILE = "run.lock"  # in a folder of checkpoints: locked by the run that saves there
LOCK_SECONDS = 10.0  # to wait for another holder: a process that was killed may take a moment to exit
_POLL_SECONDS = 0.1


def locked(descriptor: int) -> bool:
    """Lock an open file exclusively until its descriptor is closed. Return False if another process holds it for LOCK_SECONDS.

    A file system without locks counts as locked: nothing keeps two runs apart there but a folder for each.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return True
        else:
            return True


class RunClaim:
    """The claim of one run to the folder of its checkpoints; the first rank's worker makes it, and keeps it to the run's end."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._file: int | None = None

    def lock(self, folder: Path, key: str) -> None:
        """Lock the folder, created if it does not exist, unless this claim has locked it already.

        Args:
            key: the key of the configuration that names the folder, with its value.

        Raises:
            ConfigError: another run holds it for LOCK_SECONDS, or the folder cannot be written.
        """
        if self._folder == folder:
            return
        self.close()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{key}: cannot write there: {error.strerror or error}") from None
        if not locked(self._file):
            self.close()
            raise ConfigError(
                f"{key}: {folder} is the folder of a run that is still active; end that run first, or give each run its own "
                "checkpoint.dir"
            )
        self._folder = folder

    def close(self) -> None:
        """Unlock the folder."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._folder = None
