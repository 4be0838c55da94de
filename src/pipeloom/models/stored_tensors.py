"""Tensors of safetensors files, read without mapping: a mapped file that another process cuts short ends this one by SIGBUS."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, shortened
from pipeloom.limits import open_file

_PIECE_BYTES = 16 * 2**20  # of the buffer between a file and a parameter: few calls, and little beside the weights
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type and shape, and where its bytes are."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class StoredTensors:
    """Tensors of one or several files, by name. Raises ConfigError for a file that is no complete safetensors file.

    Attributes:
        dtypes: the types of tensors that are read, by their names in a file.
        bytes_read: of tensors, so far, by this process.
    """

    def __init__(self, files: Sequence[Path], dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        self.bytes_read = 0
        self.entries: dict[str, StoredTensor] = {}
        for file in files:
            self.entries.update(_entries(file, dtypes))

    def read(self, name: str) -> Tensor:
        """A tensor's own bytes, nothing else of its file."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, offset: Sequence[int] | None = None) -> None:
        """Fill a contiguous tensor with the part of `name` that begins at `offset`; None: at its first element.

        Nothing else is read, and what is read passes through a buffer of at most 16 MB, whatever the tensor's size.
        """
        entry = self.entries[name]
        start = tuple(offset) if offset is not None else (0,) * len(entry.shape)
        length, begins = _runs(entry.shape, tuple(target.shape), start)
        flat, width, at = target.view(-1), entry.dtype.itemsize, 0
        most = max(1, _PIECE_BYTES // width)
        buffer = torch.empty(min(most, flat.numel()), dtype=entry.dtype)
        bytes_of_buffer = buffer.view(torch.uint8).numpy().data
        filled = 0
        with entry.file.open("rb", buffering=0) as file:
            for begin in begins:
                done = 0
                while done < length:
                    count = min(length - done, most - filled)
                    part = bytes_of_buffer[filled * width : (filled + count) * width]
                    self._read_exactly(file, entry, (begin + done) * width, part)
                    done, filled = done + count, filled + count
                    if filled == most:
                        flat[at : at + filled].copy_(buffer)
                        at, filled = at + filled, 0
        flat[at : at + filled].copy_(buffer[:filled])

    def _read_exactly(self, file: FileIO, entry: StoredTensor, position: int, part: memoryview) -> None:
        file.seek(entry.start + position)
        done = 0
        while done < len(part):
            count = file.readinto(part[done:])
            if not count:
                raise ConfigError(f"{entry.file} ends within one of its tensors")
            done += count
        self.bytes_read += len(part)


def _runs(shape: tuple[int, ...], part: tuple[int, ...], start: tuple[int, ...]) -> tuple[int, Iterator[int]]:
    """(elements of each run of a part that lie together in the whole, where each run begins), in order."""
    cut = max((dim for dim in range(len(shape)) if part[dim] != shape[dim]), default=-1)
    if cut < 0:
        return prod(shape), iter((0,))
    inner = prod(shape[cut + 1 :])
    steps = [prod(shape[dim + 1 :]) for dim in range(cut)]
    first = start[cut] * inner
    outer = product(*(range(start[dim], start[dim] + part[dim]) for dim in range(cut)))
    begins = (first + sum(at * step for at, step in zip(index, steps, strict=True)) for index in outer)
    return part[cut] * inner, begins


def _entries(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, StoredTensor]:
    """The header of a safetensors file: eight bytes of its length, then JSON.

    The safetensors library checks it: that sizes fit shapes and types, and that the tensors fill the file without overlap.
    """
    try:
        with open_file(file, "a tensor") as data, safe_open(file, "np"):
            length = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(length))
    except (OSError, ValueError, UsageError, SafetensorError) as error:
        reason = shortened(str(error).removeprefix("Error while deserializing header: "))
        raise ConfigError(f"{file} is not a complete safetensors file: {reason}") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, value in header.items():
        if value["dtype"] not in dtypes:
            raise ConfigError(f"{file} has tensors of a type that is not supported: {value['dtype']}")
        start, end = value["data_offsets"]
        entries[name] = StoredTensor(
            file, dtypes[value["dtype"]], tuple(value["shape"]), 8 + length + start, end - start
        )
    return entries
