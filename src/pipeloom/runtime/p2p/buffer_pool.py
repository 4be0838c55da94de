"""Receive buffers: a pool whose size follows from the schedule, instead of one buffer a micro-batch."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from pipeloom.runtime.tensor_spec import TensorSpec


class BufferPool:
    """Buffers by shape and dtype. A buffer comes back when its micro-batch's backward is done.

    It is used again only if nothing else holds its storage: a module that keeps its input keeps it intact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = 0
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = defaultdict(list)

    def take(self, spec: TensorSpec) -> Tensor:
        """An uninitialized tensor of this shape and dtype."""
        free = self._free[spec.dtype, spec.shape]
        for at, buffer in enumerate(free):
            if _holders(buffer) == 1:
                return free.pop(at)
        self.made += 1
        return spec.empty(self.device)

    def give(self, buffer: Tensor) -> None:
        """Hands a buffer back."""
        # A new tensor on the same storage: a weight gradient that waits, say, may still hold the old one itself, and only
        # tensors are counted.
        self._free[buffer.dtype, tuple(buffer.shape)].append(buffer.detach())


def _holders(buffer: Tensor) -> int:
    """Return how many tensors share the storage of `buffer`, itself counted."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the storage object asked through
