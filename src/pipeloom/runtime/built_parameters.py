"""The parameters that a pipeline was built with, and errors for layers that train or change others.

A pipeline keeps references to its parameters: their gradients are summed over replicas, counted in norms and released by
`zero_grad`. A parameter that is added later, or that no layer holds, would silently be left out of all that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_state import AttributeState


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


class ReplicatedParameters:
    """The parameters of one stage of which other ranks have copies that must stay equal.

    Args:
        modules: layer name -> module.
        over: the holders of the copies, in words ("data-parallel replicas").
    """

    def __init__(self, modules: Mapping[str, nn.Module], over: str) -> None:
        self._over = over
        self._modules = modules
        # Collected now: a tensor that a later forward makes and keeps is not trained.
        self._tensors = {
            id(value): f"{layer}.{path}"
            for layer, module in modules.items()
            for value, path in AttributeState(module).reached()
            if isinstance(value, Tensor) and value.requires_grad
        }

    @cached_property
    def _named(self) -> dict[str, nn.Parameter]:
        # Not before the first forward: tied weights become one parameter only after the stages are built.
        return {
            f"{layer}.{name}": p for layer, module in self._modules.items() for name, p in module.named_parameters()
        }

    @cached_property
    def _known(self) -> set[nn.Parameter]:
        return set(self._named.values())

    def versions(self) -> list[int]:
        """Return the version counter of each parameter."""
        return [0 if parameter.is_inference() else parameter._version for parameter in self._named.values()]

    def require_unchanged(self, versions: list[int]) -> None:
        """Raise UsageError for a parameter that has been written to since it had these `versions`."""
        for name, before, after in zip(self._named, versions, self.versions(), strict=True):
            if before != after:
                raise UsageError(
                    f"a forward changes its weight {name!r} in place, and its copies on the {self._over} would change "
                    "differently; change it between steps, on all of them"
                )

    def require_known(self, roots: Sequence[GradientEdge], losses: Sequence[Tensor]) -> None:
        """Raise UsageError for a parameter that a graph reaches but no layer of the stage holds."""
        for parameter in _leaves(_nodes_of(roots, losses)):
            if isinstance(parameter, nn.Parameter) and parameter not in self._known:
                raise UsageError(
                    f"the loss or a layer uses a parameter of shape {list(parameter.shape)} that no layer of its stage holds, so "
                    f"its gradient would not be summed over the {self._over}; make it a parameter of the layer that uses it, "
                    "or, if the loss does, of the last layer"
                )
            if id(parameter) in self._tensors:
                raise UsageError(
                    f"{self._tensors[id(parameter)]!r} requires a gradient and is no parameter of its layer, so its gradient "
                    f"would not be summed over the {self._over}; make it an nn.Parameter"
                )


def require_of_rank(
    elsewhere: Mapping[nn.Parameter, str], roots: Sequence[GradientEdge], losses: Sequence[Tensor]
) -> None:
    """Raise UsageError for a parameter that a graph reaches and a layer of another rank holds (`elsewhere`, with its name)."""
    for parameter in _leaves(_nodes_of(roots, losses)):
        if isinstance(parameter, nn.Parameter) and parameter in elsewhere:
            raise UsageError(
                f"the loss or a layer uses {elsewhere[parameter]!r}, a parameter of a layer of another rank, and that rank would "
                "not get its gradient: make it a parameter of the layer that uses it too (self.weight = other.weight), or, if "
                "the loss does, of the last layer; it is then tied"
            )


def next_operation() -> int:
    """Return autograd's sequence number of an operation recorded now; later operations have higher ones."""
    marker = torch.zeros(1, requires_grad=True).view(1).grad_fn
    assert marker is not None
    return int(marker._sequence_nr())


def require_own_graph(stage: str, began: int, roots: Sequence[GradientEdge], losses: Sequence[Tensor]) -> None:
    """Raise UsageError if a stage's graph reaches an operation from before the stage's forward.

    In one process that may be a tensor that an earlier layer left for a later one in an attribute or a global variable. Here
    it belongs to another stage, with its own backward, and often to another micro-batch.

    Args:
        began: autograd's sequence number of the forward's first operation.
    """
    for node in _nodes(_nodes_of(roots, losses)):
        after = [getattr(each, "variable", None) for each, _ in node.next_functions if each is not None]
        # For instance autocast's copy of a weight, which all micro-batches share.
        of_a_weight = len(after) == 1 and isinstance(after[0], nn.Parameter)
        if type(node).__name__ != "AccumulateGrad" and not of_a_weight and node._sequence_nr() < began:
            raise UsageError(
                f"a layer of {stage} uses a tensor that was computed before the stage's forward, with its graph ({node.name()}): "
                "a tensor that an earlier layer leaves in an attribute or a variable is of another micro-batch by then; return "
                "it, or pass it on by name (Layer(..., writes=...) and reads=...)"
            )


def _nodes_of(roots: Sequence[GradientEdge], losses: Sequence[Tensor]) -> list[Any]:
    return [*(root.node for root in roots), *(loss.grad_fn for loss in losses)]


def _leaves(nodes: Sequence[Any]) -> Iterator[Tensor]:
    """Return the tensors in which a backward pass from these nodes accumulates gradients."""
    return (node.variable for node in _nodes(nodes) if type(node).__name__ == "AccumulateGrad")


def _nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Return all nodes of the graph below these."""
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [after for after, _ in node.next_functions if after is not None]
