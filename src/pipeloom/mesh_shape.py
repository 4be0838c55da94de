"""The mesh as arithmetic: which rank sits where on the axes pp, dp (= edp · ep) and tp.

`config` computes layouts with it and `parallel.mesh` makes process groups of it, so that it is below both, and needs neither
torch nor a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.errors import ArgumentError, UsageError, divisors, nearest
from pipeloom.limits import MOST_WORKERS

AXES = ("pp", "edp", "ep", "tp")  # outermost first
_PARTS = {"pp": ("pp",), "dp": ("edp", "ep"), "edp": ("edp",), "ep": ("ep",), "tp": ("tp",)}


class Place(NamedTuple):
    """Position of a rank: its index on each axis; dp = edp · (size of ep) + ep."""

    pp: int
    dp: int
    tp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the axes. Rank = ((pp · dp/ep + edp) · ep + ep_index) · tp + tp_index: tp fastest, pp outermost.

    Experts are spread over `ep` of the dp ranks; the dp/ep ranks that hold the same experts form the axis `edp`. The ranks
    of an ep group stand on `ep_nodes` machines, each machine's ranks next to each other.

    Raises ArgumentError for a size below 1, an ep that does not divide dp, or ep_nodes that do not divide ep.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    ep_nodes: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp", "ep", "ep_nodes"):
            if getattr(self, axis) < 1:
                raise ArgumentError(axis, f"={getattr(self, axis)} is below 1; nearest: 1")
        if self.world > MOST_WORKERS:
            words = f"={self.pp} x dp {self.dp} x tp {self.tp} are {self.world:,} workers; a run has at most {MOST_WORKERS:,}"
            raise ArgumentError("pp", words)
        if self.dp % self.ep:
            raise ArgumentError("ep", f"={self.ep} does not divide dp {self.dp}; {nearest(self.ep, divisors(self.dp))}")
        if self.ep % self.ep_nodes:
            near = nearest(self.ep_nodes, divisors(self.ep))
            raise ArgumentError("ep_nodes", f"={self.ep_nodes} does not divide ep {self.ep}; {near}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def edp(self) -> int:
        """Return how many ranks hold the same experts."""
        return self.dp // self.ep

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of pp, edp, ep, tp."""
        return self.pp, self.edp, self.ep, self.tp

    def place(self, rank: int) -> Place:
        """Return where `rank` sits. Raises UsageError for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in a mesh of {self.world} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, ep = divmod(rest, self.ep)
        pp, edp = divmod(rest, self.edp)
        return Place(pp, edp * self.ep + ep, tp, ep, edp)

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along `axes`; each group in rank order, groups by their first rank.

        Args:
            axes: one of pp, dp, edp, ep, tp, or several joined by an underscore (`dp_tp`: the ranks of one pipeline rank).
        """
        inside = {part for axis in axes.split("_") for part in _parts(axis)}
        offsets, starts = [0], [0]
        stride = self.world
        for axis, size in zip(AXES, self.sizes, strict=True):
            stride //= size
            line = offsets if axis in inside else starts
            line[:] = [at + index * stride for at in line for index in range(size)]
        return tuple(tuple(start + offset for offset in offsets) for start in starts)

    def group_of(self, rank: int, axes: str) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`."""
        self.place(rank)
        inside = {part for axis in axes.split("_") for part in _parts(axis)}
        offsets, start, stride = [0], 0, self.world
        for axis, size in zip(AXES, self.sizes, strict=True):
            stride //= size
            if axis in inside:
                offsets = [at + index * stride for at in offsets for index in range(size)]
            else:
                start += rank // stride % size * stride
        return tuple(start + offset for offset in offsets)

    def node_groups(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Of the ep groups: (the ranks of each machine, the ranks at the same place in each machine)."""
        length = self.ep // self.ep_nodes
        groups = self.groups("ep")
        inside = tuple(group[at : at + length] for group in groups for at in range(0, self.ep, length))
        return inside, tuple(group[place::length] for group in groups for place in range(length))

    def __str__(self) -> str:
        named = [f"{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "tp", "ep") if getattr(self, axis) > 1]
        return " · ".join(named) or "one rank"


def _parts(axis: str) -> Sequence[str]:
    if axis not in _PARTS:
        raise UsageError(f"there is no mesh axis {axis!r:.200}; known: {', '.join(_PARTS)}")
    return _PARTS[axis]
