"""Copies of what a forward saves to host memory and back, by hooks of autograd on saved tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import storage_key, version_of
from pipeloom.ops.host_memory import HostBuffers, copy_bytes
from pipeloom.ops.saved_tensors import SavedTensor, SavedView, is_plain


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage that autograd has saved tensors of.

    Attributes:
        data: its bytes on the device, until they are copied.
        size: how many.
        host: their copy, while there is one.
        saved: the places in it of the tensors saved until it is copied.
        back: set once it is back on the device, or cannot be.
    """

    data: Tensor | None
    size: int
    host: Tensor | None = None
    saved: list[SavedView] = field(default_factory=list)
    back: Event = field(default_factory=Event)

    def let_go(self) -> None:
        """Let go of what has been copied. A tensor that was changed in place before stays, and its backward raises."""
        self.data = None
        for each in [view.saved() for view in self.saved]:
            if each is not None and each.held is not None and version_of(each.held[0]) == each.held[1]:
                each.held = None


class Parts(NamedTuple):
    """The parts of what a forward saves that travel, counted from 1, of `of` equal ones."""

    numbers: frozenset[int]
    of: int


class SavedTensors:
    """The tensors that one forward saves for its backward, which travel to host memory and back.

    A storage travels whole and once, whatever number of saved tensors are views of it. Parts are cut by bytes in the order of
    saving. What is held anyway does not travel: `held` of `begin`, and tensors that are no plain ones of the device.

    Args:
        parts: those that travel.

    Attributes:
        total: bytes saved so far.
    """

    def __init__(self, device: torch.device, buffers: HostBuffers, parts: Parts = Parts(frozenset({1}), 1)) -> None:
        self._device = device
        self._host_buffers = buffers
        self._travel = parts
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

    def begin(self, held: Iterable[Any], expected: int = 0) -> None:
        """Begin the forward.

        Args:
            held: tensors whose storages stay: parameters, buffers and inputs of the stage.
            expected: bytes that an earlier forward has saved; a part is complete, and may be copied, as soon as its share of them
                is saved. 0: all are complete at the end of the forward.
        """
        self._held = {
            storage_key(value) for value in held if isinstance(value, Tensor) and value.layout is torch.strided
        }
        self._expected = expected

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
        """
        self._ready[part].wait()  # O may be issued while the forward that saves the part still runs
        with self._lock:  # from here on, another tensor saved of one of these storages is one of a new storage
            moving = self._parts[part]
            self._known = {key: storage for key, storage in self._known.items() if storage not in moving}
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(self._marks[part])
            for storage in moving:
                assert storage.data is not None
                storage.host = self._host_buffers.take(storage.size)
                copy_bytes(storage.host, storage.data)
                if stream is None:
                    storage.let_go()
        if stream is not None:
            stream.synchronize()  # the allocator would give the memory to computation while the copy still reads it
            for storage in moving:
                storage.let_go()

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
                for view in storage.saved:
                    view.fill(data.untyped_storage())
                storage.host, data = None, torch.empty(0)
                storage.saved.clear()
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
            return
        if self._device.type == "cuda":
            self._computing = torch.cuda.current_stream(self._device)
            self._marks[part] = self._computing.record_event()
        self._ready[part].set()

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Return what the graph holds in place of a saved tensor."""
        saved = SavedTensor(tensor)
        assert saved.held is not None
        alias, _ = saved.held
        key = storage_key(alias) if alias.layout is torch.strided else 0
        stays = key in self._held or not is_plain(alias) or alias.device.type != self._device.type
        if stays or not alias.untyped_storage().nbytes():
            return saved
        with self._lock:
            storage = self._known.get(key)
            if storage is None:
                data = torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
                storage = self._known[key] = _Storage(data, data.nbytes)
                self._close_before(self.total, self._expected)
                self._order.append(storage)
                self.total += storage.size
            storage.saved.append(SavedView.of(saved, alias))
        saved.bring = partial(self._wait_for, storage)
        return saved

    def _wait_for(self, storage: _Storage) -> None:
        """Return once a storage is back on the device."""
        if not self._is_complete:
            raise UsageError(
                "a layer computes gradients in its forward, and what it saves is copied to host memory in parts meanwhile: "
                "copy it whole (O without a part)"
            )
        storage.back.wait()
        if self._error is not None:
            raise self._error
