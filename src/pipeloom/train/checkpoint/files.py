"""Files of a checkpoint: written with their checksum in one pass, durable when a call returns, verified before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import StoredFile

# Bytes hashed and then written at a time: few enough that a piece is still in the processor's cache when it is written.
_PIECE = 2**20
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write contiguous CPU tensors as a safetensors file, and wait until it is on disk.

    The safetensors library would first copy all of them into one buffer, and the file would have to be read again for its
    checksum. Tensors with the largest elements are first, so that every tensor is aligned to the size of its elements.
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
    return _write(path, iter([len(text).to_bytes(8, "little") + text, *(_bytes_of(tensor) for _, tensor in ordered)]))


def write_bytes(path: Path, data: bytes) -> StoredFile:
    """Write a file, and wait until it is on disk."""
    return _write(path, iter([data]))


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk. Errors are ignored: file systems without this call do not need it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def verify(directory: Path, name: str, stored: StoredFile) -> str:
    """Compare a file with its entry in the manifest. Return a message with what was expected and found; "" if they match."""
    path = directory / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return f"{path}: expected a file, found a {'symbolic link' if path.is_symlink() else 'directory or device'}"
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.size:
                return f"{path}: expected {stored.size:,} bytes, found {size:,}"
            actual = hashlib.file_digest(file, "sha256").hexdigest()
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


def _write(path: Path, parts: Iterator[bytes | memoryview]) -> StoredFile:
    hasher, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                hasher.update(piece)
                _write_all(file.fileno(), piece)
            size += len(view)
        os.fsync(file.fileno())
    return StoredFile(size, hasher.hexdigest())


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
