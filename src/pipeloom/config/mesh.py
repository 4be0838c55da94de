"""The mesh as arithmetic: which rank sits where on the axes pp, dp (= edp · ep) and tp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.errors import ConfigError, UsageError

AXES = ("pp", "edp", "ep", "tp")  # outermost first
_PARTS = {"pp": ("pp",), "dp": ("edp", "ep"), "edp": ("edp",), "ep": ("ep",), "tp": ("tp",)}


class Place(NamedTuple):
    """Where a rank sits: its index on each axis; dp = edp · (size of ep) + ep."""

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

    Raises ConfigError for a size below 1, an ep that does not divide dp, or ep_nodes that do not divide ep.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    ep_nodes: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp", "ep", "ep_nodes"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"parallel.{axis} must be at least 1, not {getattr(self, axis)}")
        if self.dp % self.ep:
            raise ConfigError(
                f"parallel.ep {self.ep} does not divide parallel.dp {self.dp}; "
                f"{_nearest('ep', self.ep, _divisors(self.dp))}"
            )
        if self.ep % self.ep_nodes:
            raise ConfigError(
                f"parallel.ep_nodes {self.ep_nodes} does not divide parallel.ep {self.ep}; "
                f"{_nearest('ep_nodes', self.ep_nodes, _divisors(self.ep))}"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts."""
        return self.dp // self.ep

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of pp, edp, ep, tp."""
        return self.pp, self.edp, self.ep, self.tp

    def place(self, rank: int) -> Place:
        """Where `rank` sits. Raises UsageError for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in a mesh of {self.world} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, ep = divmod(rest, self.ep)
        pp, edp = divmod(rest, self.edp)
        return Place(pp, edp * self.ep + ep, tp, ep, edp)

    def rank_at(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank that sits there. Raises UsageError for an index outside the mesh."""
        for axis, index, size in (("pp", pp, self.pp), ("dp", dp, self.dp), ("tp", tp, self.tp)):
            if not 0 <= index < size:
                raise UsageError(f"index {index} is outside axis {axis} of size {size}")
        return (pp * self.dp + dp) * self.tp + tp

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


def complete(world: int, pp: int, dp: int, tp: int, ep: int = 1) -> MeshShape:
    """The mesh of `world` ranks; one of pp, dp and tp may be -1: what is left.

    Raises ConfigError when the sizes do not multiply to `world`, or cannot.
    """
    given = {"pp": pp, "dp": dp, "tp": tp}
    open_axes = [axis for axis, size in given.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"parallel.{' and parallel.'.join(open_axes)} are both -1; only one axis can be what is left")
    known = math.prod(size for size in given.values() if size != -1)
    product = " · ".join(f"{axis} {size}" for axis, size in given.items() if size != -1)
    if not open_axes:
        shape = MeshShape(pp, dp, tp, ep)
        if shape.world != world:
            raise ConfigError(f"{product} needs {shape.world} ranks, and there are {world}{_advice(given, world)}")
        return shape
    if known < 1 or world % known:
        raise ConfigError(
            f"parallel.{open_axes[0]} -1: {product} = {known} does not divide {world} ranks{_advice(given, world)}"
        )
    return MeshShape(**{**given, open_axes[0]: world // known, "ep": ep})


def _parts(axis: str) -> Sequence[str]:
    if axis not in _PARTS:
        raise UsageError(f"there is no mesh axis {axis!r}; known: {', '.join(_PARTS)}")
    return _PARTS[axis]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest(axis: str, wanted: int, allowed: Sequence[int]) -> str:
    near = sorted(sorted(allowed, key=lambda value: (abs(value - wanted), value))[:2])
    return f"the nearest {'values' if len(near) > 1 else 'value'} of {axis}: {', '.join(map(str, near))}"


def _advice(given: dict[str, int], world: int) -> str:
    """The nearest size of one axis, dp first, with which the others as given fit the world."""
    fixed = {axis: size for axis, size in given.items() if size > 0}
    for axis in ("dp", "pp", "tp"):
        others = math.prod(size for other, size in fixed.items() if other != axis)
        if axis in fixed and world % others == 0:
            allowed = [world // others] if len(fixed) == len(given) else _divisors(world // others)
            return f"; {_nearest(axis, fixed[axis], allowed)}"
    return ""
