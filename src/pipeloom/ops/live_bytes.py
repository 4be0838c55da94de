"""Bytes of tensors that are alive, counted as they are allocated and freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

# The modes that see every operation, and the tree of its arguments, have no public home.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.ops.checksum import storage_key


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered.

    Args:
        meta: count tensors on the meta device by their sizes; otherwise they have no memory.
        held: tensors from before, which count as long as they live.
        resized: tensors from before whose storages have another size from time to time, which counts.

    Attributes:
        now: bytes alive that were allocated since it was entered, and those of `held`.
        peak: the most of them at once.
    """

    def __init__(
        self, meta: bool = False, held: Iterable[torch.Tensor] = (), resized: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._meta = meta
        self._resized = resized
        self._known: dict[int, int] = dict.fromkeys(map(storage_key, resized), 0)
        for tensor in held:
            self._count(tensor)

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of `tensor` is one of those that are counted."""
        return storage_key(tensor) in self._known

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {storage_key(value) for value in tree_leaves((arguments, keywords)) if isinstance(value, torch.Tensor)}
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_meta == self._meta:
                if not value.untyped_storage().resizable():
                    continue  # a view of a mapped file: pages that the kernel can drop
                if storage_key(value) not in given:
                    self._count(value)
        self.peak = max(self.peak, self.now + sum(each.untyped_storage().nbytes() for each in self._resized))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._known and storage.nbytes():
            self._known[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)
