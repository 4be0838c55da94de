"""A layer of a model as a factory with a name: what models return, and what a pipeline builds on the rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class LossTerm:
    """A loss that a layer adds to the model's own, on whatever stage it is.

    Attributes:
        loss: `loss(value, targets)` of the layer's value and a micro-batch's targets: a mean over the targets, 0-dim.
        weight: factor of the term in the step's loss.
    """

    loss: Callable[[Any, Any], Tensor]
    weight: float = 1.0


@dataclass(frozen=True)
class Layer:
    """A layer that is built only on the rank that holds it.

    A layer that declares `writes` or `losses` returns them in a dict after its output for the next layer:
    `return x, {"skip": y}`, or the dict alone, and then the next layer gets None.

    Attributes:
        name: global name; parameters are called `name.parameter`.
        build: constructs the module.
        reads: tensors that earlier layers write, by name, which the forward takes as keyword arguments: names, or
            {keyword: name}. The latest earlier layer that writes a name is meant.
        writes: tensors for later layers: names, or {key in the dict: name}.
        losses: {key in the dict: LossTerm}; keys are unique in the whole model.
    """

    name: str
    build: Callable[[], nn.Module]
    reads: Sequence[str] | Mapping[str, str] = field(default=(), hash=False)
    writes: Sequence[str] | Mapping[str, str] = field(default=(), hash=False)
    losses: Mapping[str, LossTerm] = field(default_factory=dict, hash=False)

    def __call__(self) -> nn.Module:
        return self.build()
