"""Bytes of tensors that are alive, counted as they are allocated and freed."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is entered.

    Attributes:
        now: bytes alive that were allocated since it was entered.
        peak: the most of them at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {
            value.untyped_storage()._cdata
            for value in tree_leaves((arguments, keywords))
            if isinstance(value, torch.Tensor)
        }
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not value.is_meta:  # what is on the meta device has no memory
                storage = value.untyped_storage()
                if not storage.resizable():
                    continue  # a view of a mapped file: pages that the kernel can drop
                if storage._cdata not in given and storage._cdata not in self._known and storage.nbytes():
                    self._known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)
