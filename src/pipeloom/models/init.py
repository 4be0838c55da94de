"""First weights, drawn by global parameter name: the same bits whichever rank draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.sharding import shard_of, shardings_of

__all__ = ["Deviations", "InitSpec", "draw", "stable_seed"]


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of matrices: `usual`, and others by the last part of their owner's name (`o_proj`)."""

    usual: float
    special: Mapping[str, float]

    def of(self, name: str) -> float:
        """That of the parameter with this global name."""
        return self.special.get(name.split(".")[-2], self.usual)


@dataclass(frozen=True)
class InitSpec:
    """How first weights are drawn.

    Attributes:
        seed: of all of them.
        deviations: their sizes.
        same: global name -> the name under which it is drawn, for weights that start as copies of another.
        index: axis -> this rank's index, for weights of which it holds a part.
    """

    seed: int
    deviations: Deviations
    same: Mapping[str, str]
    index: Mapping[str, int]


@torch.no_grad()
def draw(module: nn.Module, layer: str, drawing: InitSpec) -> None:
    """Fills the parameters of `module`, which is called `layer`: matrices normal, biases 0, other vectors (norms) 1.

    Drawn whole on the CPU in fp32, then cut and converted: layout, dtype and device change the rounding only.
    """
    layouts = shardings_of(module)
    for inner, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if inner.rpartition(".")[2] == "bias" else 1.0)
            continue
        name, sharding = f"{layer}.{inner}", layouts[inner]
        seed = stable_seed(drawing.seed, drawing.same.get(name, name))
        whole = torch.randn(sharding.full_shape(parameter.shape), generator=torch.Generator().manual_seed(seed))
        parameter.copy_(shard_of(whole, sharding, drawing.index) * drawing.deviations.of(name))
