"""Tensors without memory in the places of parameters that a part of a model does not hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Stubs:
    """Zeros of the parameters' shapes, one number in memory each, in the places of the parameters called `names`.

    They are plain attributes: no parameter or buffer of the module that anybody would train, save or move.

    Args:
        requires_grad: whether what is computed from them knows so.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], requires_grad: bool = False) -> None:
        self._module, self._requires_grad = module, requires_grad
        self._like = {name: (module.get_parameter(name).shape, module.get_parameter(name).dtype) for name in names}
        self._sources: dict[str, Tensor] = {}
        self._device: torch.device | None = None
        self.place(torch.device("cpu"))

    def place(self, device: torch.device) -> None:
        """Have them on `device`."""
        if device == self._device:
            return
        self._device = device
        for name, (shape, dtype) in self._like.items():
            trains = self._requires_grad and dtype.is_floating_point
            self._sources[name] = torch.zeros((), dtype=dtype, device=device, requires_grad=trains)
            stub = self._sources[name].expand(shape)
            stub._is_hf_initialized = True  # type: ignore[attr-defined]  # so that transformers draws nothing into it
            set_tensor(self._module, name, stub)

    def used_by(self, result: Tensor) -> set[str]:
        """The names of those that `result` has been computed from."""
        names = {id(source): name for name, source in self._sources.items()}
        used: set[str] = set()
        seen: set[object] = set()
        waiting = [result.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if id(variable) in names:
                used.add(names[id(variable)])
            waiting += [before for before, _ in node.next_functions]
        return used


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a plain tensor in the place of the parameter `name` of `module`, which no longer counts it as one."""
    path, _, leaf = name.rpartition(".")
    home = module.get_submodule(path)
    home._parameters.pop(leaf, None)
    home.__dict__[leaf] = value
