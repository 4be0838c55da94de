"""Joining of the parts of each parameter that the processes of a mesh hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.mesh_shape import AXES, Place
from pipeloom.parallel.sharding import ParameterSharding, join


@dataclass(frozen=True)
class RankTensors:
    """Tensors of one process.

    Attributes:
        place: its place on the mesh.
        values: global name -> this process's part of the tensor, or None where it has none.
        layouts: global name -> how the parameter is sharded.
    """

    place: Place
    values: Mapping[str, Tensor | None]
    layouts: Mapping[str, ParameterSharding]


def whole(holdings: Sequence[RankTensors]) -> list[dict[str, Tensor | None]]:
    """Return, for each process, the whole tensors whose first part (or only part) it holds.

    Each copy of a parameter thus occurs exactly once. A whole tensor is None if all of its parts are None, and filled with
    NaN if only some are.
    """
    copies: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], int]] = {}
    for number, holding in enumerate(holdings):
        for name in holding.values:
            shards = [shard.axis for shard in holding.layouts[name].shards]
            elsewhere = tuple(getattr(holding.place, axis) for axis in AXES if axis not in shards)
            part = tuple(getattr(holding.place, axis) for axis in shards)
            copies.setdefault((name, elsewhere), {})[part] = number
    tensors: list[dict[str, Tensor | None]] = [{} for _ in holdings]
    for (name, _), parts in copies.items():
        first = parts[min(parts)]
        sharding = holdings[first].layouts[name]
        tensors[first][name] = _join({part: holdings[number].values[name] for part, number in parts.items()}, sharding)
    return tensors


def _join(parts: Mapping[tuple[int, ...], Tensor | None], sharding: ParameterSharding) -> Tensor | None:
    present = {part: value for part, value in parts.items() if value is not None}
    if not present:
        return None
    if len(present) < len(parts):
        return torch.full(sharding.full_shape(next(iter(present.values())).shape), float("nan"))
    return join(present, sharding)
