"""Copies of tensors in host memory, in buffers that later copies use again."""

from __future__ import annotations

import ctypes
import mmap
from threading import Lock

import torch
from torch import Tensor


class HostBuffers:
    """Buffers in host memory, kept for later copies: together at most as many bytes as have been in use at once.

    Beside a GPU they are pinned; on the CPU they are mapped pages apart from torch's allocator: a copy moves bytes there too.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._free: list[Tensor] = []
        self._free_bytes = self._used = self._peak = 0
        self._lock = Lock()  # copies out and copies back run in threads

    def take(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes."""
        with self._lock:
            self._used += size
            self._peak = max(self._peak, self._used)
            for at, buffer in enumerate(self._free):
                if buffer.nbytes == size:
                    self._free_bytes -= size
                    return self._free.pop(at)
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
                self._free_bytes -= self._free.pop(0).nbytes


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy bytes; between a GPU and pinned memory without waiting.

    On the CPU by the C library, which for storages of megabytes takes 0.75 to 0.85 of the time of torch's copy kernel.
    """
    if target.device.type == source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source, non_blocking=True)


class HostCopy:
    """A tensor in host memory. Copies are made on the current stream of its device.

    Args:
        tensor: contiguous, or copied to be so.

    Attributes:
        shape: of the tensor.
    """

    def __init__(self, tensor: Tensor, buffers: HostBuffers) -> None:
        self.shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._pool = buffers
        self._buffer = buffers.take(max(1, tensor.nbytes))  # no memory of 0 bytes can be mapped
        self._bytes = self._buffer[: tensor.nbytes]
        copy_bytes(self._bytes, _bytes_of(tensor))
        self._last: torch.cuda.Event | None = None  # of the reads and sums that computation has launched

    def read(self) -> Tensor:
        """Return a copy on the device."""
        tensor = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        copy_bytes(_bytes_of(tensor), self._bytes)
        self._note()
        return tensor

    def move_back(self, computing: torch.cuda.Stream | None) -> Tensor:
        """Return a copy on the device for the stream `computing`, and let other copies use the memory once it has been made."""
        tensor = self.read()
        self.free()
        if computing is not None:
            tensor.record_stream(computing)
        return tensor

    def add(self, other: Tensor) -> None:
        """Add a tensor of the device to it."""
        if self._device.type == "cpu":
            self._bytes.view(self._dtype).view(self.shape).add_(other)
            return
        copy_bytes(self._bytes, _bytes_of(self.read().add_(other)))
        self._note()

    def free(self) -> None:
        """Let other copies use the memory, once what has been launched has ended."""
        if self._last is not None:
            self._last.synchronize()
        self._pool.give_back(self._buffer)

    def _note(self) -> None:
        if self._device.type == "cuda":
            self._last = torch.cuda.current_stream(self._device).record_event()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
