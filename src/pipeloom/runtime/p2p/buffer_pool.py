"""Receive buffers: a pool whose size follows from the schedule, instead of one buffer per micro-batch."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from pipeloom.runtime.tensor_spec import TensorSpec


class BufferPool:
    """Buffers by shape and dtype. A buffer is returned after its micro-batch's backward.

    It is reused only if no other tensor shares its storage: a module that keeps its input keeps it intact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = 0
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = defaultdict(list)

    def take(self, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        free = self._free[spec.dtype, spec.shape]
        for at, buffer in enumerate(free):
            if _holders(buffer) == 1:
                return free.pop(at)
        self.made += 1
        return spec.empty(self.device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        # A new tensor on the same storage: a queued weight gradient, for instance, may still hold the old tensor object, and
        # only tensors are counted.
        self._free[buffer.dtype, tuple(buffer.shape)].append(buffer.detach())


def _holders(buffer: Tensor) -> int:
    """Return the number of tensors that share the storage of `buffer`, including itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the storage object asked through
