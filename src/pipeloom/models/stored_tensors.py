"""Tensors of safetensors files, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, shortened
from pipeloom.limits import open_file

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
    """Tensors of one or several files, which are mapped into memory: pages are read when their values are copied.

    Attributes:
        entries: name -> what is stored.
        bytes_read: of tensors, so far, by this process.

    Args:
        dtypes: the types of tensors that are read, by their names in a file.

    Raises ConfigError for a file that is not a complete safetensors file, or holds another type.
    """

    def __init__(self, files: Sequence[Path], dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        self.bytes_read = 0
        self.entries: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            self._open[file], entries = _opened(file, dtypes)
            self.entries.update(entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor's values in memory of their own."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, offset: Sequence[int] | None = None) -> None:
        """Fill `target` with the part of `name` that begins at `offset`; None: at its first element."""
        entry = self.entries[name]
        # An access to a mapped file that has been cut short since it was opened would end the process by SIGBUS.
        if entry.file.stat().st_size < entry.start + entry.size:
            raise ConfigError(f"{entry.file} ends within one of its tensors")
        begin = offset if offset is not None else [0] * len(entry.shape)
        part = tuple(slice(first, first + count) for first, count in zip(begin, target.shape, strict=True))
        target.copy_(self._open[entry.file].get_tensor(name)[part])
        self.bytes_read += target.numel() * entry.dtype.itemsize


def _opened(file: Path, dtypes: Mapping[str, torch.dtype]) -> tuple[Any, dict[str, StoredTensor]]:
    """Return a file as the safetensors library opens it, and its tensors by name.

    The library checks that sizes fit shapes and types, and that the tensors fill the file without overlap.
    """
    try:
        with open_file(file, "a tensor") as data:
            opened = safe_open(file, "pt")
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
    return opened, entries
