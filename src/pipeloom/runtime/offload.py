"""Copies of what a forward saves to host memory and back, by hooks of autograd on saved tensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import storage_key, version_of
from pipeloom.ops.host_memory import HostBuffers, copy_bytes


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage that autograd has saved tensors of.

    Attributes:
        data: its bytes on the device, while they are there.
        size: how many.
        host: their copy, while there is one.
        saved: the tensors saved until it is copied, with their versions.
        back: set once it is back on the device, or cannot be.
    """

    data: Tensor | None
    size: int
    host: Tensor | None = None
    saved: list[tuple[Tensor, int]] = field(default_factory=list)
    back: Event = field(default_factory=Event)


class _Saved(NamedTuple):
    """A saved tensor as a view of its storage."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Parts(NamedTuple):
    """The parts of what a forward saves that travel, counted from 1, of `of` equal ones."""

    numbers: frozenset[int]
    of: int


class SavedTensors:
    """The tensors that one forward saves for its backward, which travel to host memory and back.

    A storage travels whole and once, whatever number of saved tensors are views of it. Parts are cut by bytes in the order of
    saving. What is held anyway does not travel: `held`, and tensors that are no plain ones of the device.

    Args:
        held: tensors whose storages stay: parameters, buffers and inputs of the stage.
        parts: those that travel.
        expected: bytes that an earlier forward has saved; a part is complete, and may be copied, as soon as its share of them is
            saved. 0: all are complete at the end of the forward.

    Attributes:
        total: bytes saved so far.
    """

    def __init__(
        self,
        held: Iterable[Any],
        device: torch.device,
        buffers: HostBuffers,
        parts: Parts = Parts(frozenset({1}), 1),
        expected: int = 0,
    ) -> None:
        self._held = {
            storage_key(value) for value in held if isinstance(value, Tensor) and value.layout is torch.strided
        }
        self._device = device
        self._host_buffers = buffers
        self._travel = parts
        self._expected = expected
        self._order: list[_Storage] = []  # those of no complete part
        self._parts: dict[int, list[_Storage]] = {}
        self._ready = {part: Event() for part in parts.numbers}
        self._marks: dict[int, torch.cuda.Event] = {}
        self._computing: torch.cuda.Stream | None = None
        self._known: dict[int, _Storage] = {}
        self._lock = Lock()  # a part is copied while later ones are saved
        self._error: BaseException | None = None
        self._is_complete = False
        self.total = 0

    def saving(self) -> AbstractContextManager[Any]:
        """Return the context of computations whose saved tensors these are."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def complete(self) -> None:
        """Cut what is left into parts: the forward has been issued, and saves nothing more."""
        left, self._order = self._order, []
        saved = self.total - sum(storage.size for storage in left)
        for storage in left:
            self._close_before(saved, self.total)
            self._order.append(storage)
            saved += storage.size
        while len(self._parts) < self._travel.of:
            self._close()
        self._is_complete = True
        self._known.clear()

    def to_host(self, part: int, stream: torch.cuda.Stream | None) -> None:
        """Copy a part to host memory and let go of it, once it is complete.

        Args:
            stream: of the copies; None on the CPU.

        Raises UsageError if a saved tensor was changed in place.
        """
        self._ready[part].wait()
        with self._lock:  # from here on, another tensor saved of one of these storages is one of a new storage
            moving = self._parts[part]
            self._known = {key: storage for key, storage in self._known.items() if storage not in moving}
        for storage in moving:
            if any(version_of(tensor) != version for tensor, version in storage.saved):
                raise UsageError(
                    "a tensor that the backward needs was changed in place after the forward that saved it: let the layer "
                    "work on a clone"
                )
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(self._marks[part])
            for storage in moving:
                assert storage.data is not None
                storage.host = self._host_buffers.take(storage.size)
                copy_bytes(storage.host, storage.data)
                if stream is None:
                    storage.data = None
                    storage.saved.clear()
        if stream is not None:
            stream.synchronize()
            for storage in moving:
                storage.data = None
                storage.saved.clear()

    def to_device(self, part: int, stream: torch.cuda.Stream | None) -> None:
        """Copy a part back; from then on only the graph holds it, and each storage is freed as the backward has used it."""
        storages, self._parts[part] = self._parts[part], []
        with torch.cuda.stream(stream):
            for storage in reversed(storages):  # the backward needs the last ones first
                assert storage.host is not None
                data = torch.empty(storage.size, dtype=torch.uint8, device=self._device)
                copy_bytes(data, storage.host)
                if stream is not None and self._computing is not None:
                    stream.synchronize()
                    data.record_stream(self._computing)
                self._host_buffers.give_back(storage.host)
                storage.data, storage.host, data = data, None, torch.empty(0)
                storage.back.set()

    def fail(self, error: BaseException) -> None:
        """Let a backward that waits for a copy back raise `error`."""
        self._error = error
        for storages in self._parts.values():
            for storage in storages:
                storage.back.set()

    def _close_before(self, saved: int, total: int) -> None:
        """Close the parts, but the last, that are complete when `saved` of `total` bytes are saved."""
        while len(self._parts) + 1 < self._travel.of and saved * self._travel.of >= (len(self._parts) + 1) * total > 0:
            self._close()

    def _close(self) -> None:
        """Note that the next part is complete. One that stays is not held here."""
        part, storages, self._order = len(self._parts) + 1, self._order, []
        self._parts[part] = storages if part in self._travel.numbers else []
        if part not in self._travel.numbers:
            for storage in storages:
                storage.saved.clear()
            return
        if self._device.type == "cuda":
            self._computing = torch.cuda.current_stream(self._device)
            self._marks[part] = self._computing.record_event()
        self._ready[part].set()

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        """Return what the graph holds in place of a saved tensor."""
        alias = tensor.detach()  # an output of the saving node would hold its graph
        plain = type(alias) is Tensor and alias.layout is torch.strided and alias.device.type == self._device.type
        if not plain or alias.is_conj() or alias.is_neg() or not alias.untyped_storage().nbytes():
            return alias
        key = storage_key(alias)
        if key in self._held:
            return alias
        with self._lock:
            storage = self._known.get(key)
            if storage is None:
                data = torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
                storage = self._known[key] = _Storage(data, data.nbytes)
                self._close_before(self.total, self._expected)
                self._order.append(storage)
                self.total += storage.size
            storage.saved.append((alias, version_of(alias)))
        return _Saved(storage, alias.dtype, int(alias.storage_offset()), alias.size(), alias.stride())

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        """Return the tensor, once it is on the device."""
        if isinstance(saved, Tensor):
            return saved
        storage, dtype, offset, size, stride = saved
        if storage.data is None:
            if not self._is_complete:
                raise UsageError(
                    "a layer computes gradients in its forward, and what it saves is copied to host memory in parts meanwhile: "
                    "copy it whole (O without a part)"
                )
            storage.back.wait()
        if storage.data is None:
            raise self._error if self._error is not None else UsageError("a copy from host memory is missing")
        return torch.empty(0, dtype=dtype, device=storage.data.device).set_(
            storage.data.untyped_storage(), offset, size, stride
        )
