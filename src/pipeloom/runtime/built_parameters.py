"""The parameters that a pipeline was built with, and errors for layers that train others.

A pipeline keeps references to its parameters: their gradients are summed over replicas, counted in norms and released by
`zero_grad`. A parameter that is added later, or that no layer holds, would silently be left out of all that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.errors import UsageError


class BuiltParameters:
    """The parameters and parts of a rank's layers when its pipeline was built.

    Args:
        modules: layer name -> module.
        summed: the processes over which every gradient is summed, in words; None: it is not.
    """

    def __init__(self, modules: Mapping[str, nn.Module], summed: str | None) -> None:
        self._parts = [
            (
                f"{layer}.{path}" if path else layer,
                part,
                tuple(part._parameters.values()),
                tuple(part._modules.values()),
            )
            for layer, module in modules.items()
            for path, part in module.named_modules()
            if not isinstance(part, torch.jit.ScriptModule)
        ]
        self._summed = summed
        named = [(f"{layer}.{name}", p) for layer, m in modules.items() for name, p in m.named_parameters()]
        self._dtypes = [(name, p, p.dtype) for name, p in named] if summed else []
        self._frozen = [(name, p) for name, p in named if not p.requires_grad] if summed else []

    def require_same(self) -> None:
        """Raise UsageError for a parameter or submodule that was added, replaced or removed since, or has another dtype, and
        for one that was frozen and trains now if gradients are summed.
        """
        for name, part, parameters, children in self._parts:
            if not _same(part._parameters.values(), parameters) or not _same(part._modules.values(), children):
                raise UsageError(
                    f"the parameters of {name!r} have changed since the pipeline was built: some were added, replaced or "
                    "removed; change them before the pipeline is built, or build it again"
                )
        for name, parameter, dtype in self._dtypes:
            if parameter.dtype != dtype:
                raise UsageError(
                    f"parameter {name!r} was {_short(dtype)} when the pipeline was built, and is {_short(parameter.dtype)}; "
                    "convert it before, or build the pipeline again"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name!r} was frozen when the pipeline was built and trains now, so its gradient would not be "
                    f"summed over {self._summed}; build the pipeline again"
                )


def _same(now: Collection[Any], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ForeignLeaves:
    """Tensors whose gradients a stage's graph must not reach: nobody would sum them or send them to their rank.

    Attributes:
        names: parameter in this process that only layers of other ranks hold -> its name; complete at the first forward.
        over: the holders of copies of the stage's parameters, in words ("data-parallel replicas"); None: there are none.
    """

    def __init__(self, names: Mapping[Tensor, str], over: str | None) -> None:
        self.names = names
        self.over = over

    def require_unreached(
        self,
        modules: Sequence[nn.Module],
        roots: Sequence[GradientEdge],
        losses: Sequence[Tensor],
    ) -> None:
        """Raise UsageError if a stage's graph reaches a parameter of another rank's layer, or one that has copies elsewhere and
        that no layer of the stage holds.

        Args:
            modules: the stage's layers.
            roots, losses: where the graph's backward starts.
        """
        if not self.names and self.over is None:
            return
        known = {parameter for module in modules for parameter in module.parameters()}
        for leaf in _leaves([*(root.node for root in roots), *(loss.grad_fn for loss in losses)]):
            if leaf in self.names:
                raise UsageError(
                    f"the loss or a layer uses {self.names[leaf]!r}, a parameter of a layer of another rank, and that rank "
                    "would not get its gradient: make it a parameter of the layer that uses it too (self.weight = "
                    "other.weight), or, if the loss does, of the last layer; it is then tied"
                )
            if self.over is not None and isinstance(leaf, nn.Parameter) and leaf not in known:
                raise UsageError(
                    f"the loss or a layer uses a parameter of shape {list(leaf.shape)} that no layer of its stage holds, so its "
                    f"gradient would not be summed over the {self.over}; make it a parameter of the layer that uses it, or, if "
                    "the loss does, of the last layer"
                )


def _leaves(nodes: Sequence[Any]) -> Iterator[Tensor]:
    """Return the tensors in which a backward pass from these nodes accumulates gradients."""
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        waiting += [after for after, _ in node.next_functions if after is not None]
