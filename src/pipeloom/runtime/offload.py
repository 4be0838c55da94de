"""Copies of what a forward saves to host memory and back, by hooks of autograd on saved tensors."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import version_of


class HostBuffers:
    """Buffers in host memory, kept for later copies: together at most as many bytes as have been in use at once.

    Beside a GPU they are pinned; on the CPU they are mapped pages apart from torch's allocator: a copy moves bytes there too.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._free: deque[Tensor] = deque()
        self._free_bytes = self._used = self._peak = 0
        self._lock = Lock()  # copies out and copies back run in threads

    def take(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes."""
        with self._lock:
            self._used += size
            self._peak = max(self._peak, self._used)
            for buffer in self._free:
                if buffer.nbytes == size:
                    self._remove(buffer)
                    return buffer
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer whose contents are not needed any more."""
        with self._lock:
            self._used -= buffer.nbytes
            self._free.append(buffer)
            self._free_bytes += buffer.nbytes
            while self._used + self._free_bytes > self._peak:
                self._remove(self._free[0])

    def _remove(self, buffer: Tensor) -> None:
        at = next(at for at, each in enumerate(self._free) if each is buffer)
        del self._free[at]
        self._free_bytes -= buffer.nbytes


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage that autograd has saved tensors of.

    Attributes:
        data: its bytes on the device, while they are there.
        host: their copy, while there is one.
        saved: the tensors saved until it is copied, with their versions.
    """

    data: Tensor | None
    host: Tensor | None = None
    saved: list[tuple[Tensor, int]] = field(default_factory=list)


class _Saved(NamedTuple):
    """A saved tensor as a view of its storage."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """The tensors that one forward saves for its backward, which travel to host memory and back.

    A storage travels whole and once, whatever number of saved tensors are views of it. What is held anyway does not travel:
    `held`, and tensors that are no plain ones of the device.

    Args:
        held: tensors whose storages stay: parameters, buffers and inputs of the stage.
    """

    def __init__(self, held: Iterable[Any], device: torch.device, buffers: HostBuffers) -> None:
        self._held = {
            value.untyped_storage()._cdata
            for value in held
            if isinstance(value, Tensor) and value.layout is torch.strided
        }
        self._device = device
        self._buffers = buffers
        self._storages: dict[int, _Storage] = {}
        self._ready: torch.cuda.Event | None = None
        self._computing: torch.cuda.Stream | None = None

    def saving(self) -> AbstractContextManager[Any]:
        """Return the context of computations whose saved tensors these are."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def complete(self) -> None:
        """Note that the forward has been issued: its kernels end before a copy begins."""
        if self._device.type == "cuda":
            self._computing = torch.cuda.current_stream(self._device)
            self._ready = self._computing.record_event()

    def to_host(self, stream: torch.cuda.Stream | None) -> None:
        """Copy every storage to host memory and let go of it. Raises UsageError if a saved tensor was changed in place.

        Args:
            stream: of the copies; None on the CPU.
        """
        for storage in self._storages.values():
            if any(version_of(tensor) != version for tensor, version in storage.saved):
                raise UsageError(
                    "a tensor that the backward needs was changed in place after the forward that saved it: let the layer "
                    "work on a clone"
                )
            storage.saved.clear()
        with torch.cuda.stream(stream):
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            for storage in self._storages.values():
                assert storage.data is not None
                storage.host = self._buffers.take(storage.data.nbytes)
                storage.host.copy_(storage.data, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        for storage in self._storages.values():
            storage.data = None

    def to_device(self, stream: torch.cuda.Stream | None) -> None:
        """Copy every storage back; from then on only the graph holds it, and each is freed as the backward has used it."""
        storages, self._storages = list(self._storages.values()), {}
        with torch.cuda.stream(stream):
            for storage in storages:
                assert storage.host is not None
                storage.data = torch.empty(storage.host.nbytes, dtype=torch.uint8, device=self._device)
                storage.data.copy_(storage.host, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        for storage in storages:
            assert storage.host is not None
            if storage.data is not None and self._computing is not None:
                storage.data.record_stream(self._computing)
            self._buffers.give_back(storage.host)
            storage.host = None

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        alias = tensor.detach()  # an output of the saving node would hold its graph
        plain = type(alias) is Tensor and alias.layout is torch.strided and alias.device.type == self._device.type
        if not plain or alias.is_conj() or alias.is_neg() or not alias.untyped_storage().nbytes():
            return alias
        key = alias.untyped_storage()._cdata
        if key in self._held:
            return alias
        storage = self._storages.get(key)
        if storage is None:
            data = torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
            storage = self._storages[key] = _Storage(data)
        storage.saved.append((alias, version_of(alias)))
        return _Saved(storage, alias.dtype, int(alias.storage_offset()), alias.size(), alias.stride())


def _unpack(saved: _Saved | Tensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    storage, dtype, offset, size, stride = saved
    assert storage.data is not None
    return torch.empty(0, dtype=dtype, device=storage.data.device).set_(
        storage.data.untyped_storage(), offset, size, stride
    )
