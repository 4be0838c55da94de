"""The number of times a program reads a tensor of a device on the host, counted on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What waits for a device: a number or a list of a tensor, a copy, and results whose size depends on values.
READS = {
    "tolist",
    "item",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
    "cpu",
    "numpy",
    "bincount",
    "nonzero",
    "unique",
}


class HostReads(TorchFunctionMode):
    """Count reads of tensors that come neither from `cpu()` nor from a function without tensors and without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._host: dict[int, Tensor] = {}  # held, so that no other has its id

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, keywords = getattr(func, "__name__", ""), dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor)]
        on_host = all(id(tensor) in self._host for tensor in given) if given else "device" not in keywords
        sized_by_values = name == "repeat_interleave" and len(given) > 1 and "output_size" not in keywords
        masked = name == "__getitem__" and any(tensor.dtype.itemsize == 1 for tensor in given[1:])
        if given and not on_host and (name in READS or sized_by_values or masked):
            self.reads.append(name)
        result = func(*args, **keywords)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._host.pop(id(tensor), None)
                if name == "cpu" or (on_host and name != "to"):
                    self._host[id(tensor)] = tensor
        return result
