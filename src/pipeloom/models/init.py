"""First weights, drawn by global parameter name and block: the same bits whichever rank draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.sharding import ParameterSharding, shard_of, shardings_of

__all__ = ["Deviations", "InitSpec", "draw", "stable_seed"]

# Elements of a block in fp32, 4 MB. A rank draws every block of which it holds an element and drops the rest of it: small
# blocks keep that little where a weight is cut along its rows. Another number changes the first weights of large matrices.
BLOCK = 2**20


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
    """Distribution of first weights.

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

    A matrix is drawn on the CPU in fp32, in blocks of whole rows (of its last dimension) that follow from its whole shape and
    are seeded by (seed, name, block). Each is cut and converted at once, so that a rank never holds more than its own part and
    one block; layout, dtype and device change the rounding only.
    """
    layouts = shardings_of(module)
    for inner, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if inner.rpartition(".")[2] == "bias" else 1.0)
            continue
        name = f"{layer}.{inner}"
        drawn_as, deviation = drawing.same.get(name, name), drawing.deviations.of(name)
        _fill(parameter, layouts[inner], drawing.index, (drawing.seed, drawn_as), deviation)


def _fill(
    parameter: Tensor, sharding: ParameterSharding, index: Mapping[str, int], source: tuple[int, str], deviation: float
) -> None:
    """Draws the part of a matrix that `parameter` is; `source`: seed and name."""
    *leading, width = sharding.full_shape(parameter.shape)
    row_cuts = ParameterSharding(tuple(shard for shard in sharding.shards if shard.dim < len(leading)))
    column_cut = ParameterSharding(
        tuple(replace(shard, dim=1) for shard in sharding.shards if shard.dim == len(leading))
    )
    numbers = torch.arange(math.prod(leading)).view(leading)
    rows = shard_of(numbers, row_cuts, index).flatten()  # which of the whole matrix's rows are here, ascending
    height, part = max(BLOCK // width, 1), parameter.view(rows.numel(), -1)
    generator, buffer = torch.Generator(), torch.empty(min(height, numbers.numel()), width)
    for block in torch.unique(rows.div(height, rounding_mode="floor")).tolist():
        first = block * height
        generator.manual_seed(stable_seed(*source, block))
        drawn = buffer[: numbers.numel() - first].normal_(0, deviation, generator=generator)
        drawn = shard_of(drawn, column_cut, index)
        start, stop = torch.searchsorted(rows, torch.tensor([first, first + height])).tolist()
        for at, count in _runs(rows[start:stop]):
            inside = int(rows[start + at]) - first
            part[start + at : start + at + count].copy_(drawn[inside : inside + count])


def _runs(rows: Tensor) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive numbers in ascending `rows`: (position, length)."""
    ends = torch.where(rows.diff() != 1)[0].add(1).tolist()
    starts = [0, *ends]
    for start, stop in zip(starts, [*ends, rows.numel()], strict=True):
        yield start, stop - start
