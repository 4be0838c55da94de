"""The mesh as arithmetic: the position of each rank on the axes pp, dp x cp (= edp · ep) and tp.

`config` computes layouts with it, and `parallel.mesh` creates process groups from it, so it lies below both, and needs neither
torch nor a configuration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.errors import ArgumentError, UsageError, echo
from pipeloom.limits import MOST_WORKERS, require_divides, require_types

AXES = ("pp", "edp", "ep", "tp")
ORDER = "tp-ep-dp-pp"  # Megatron-LM's spelling: the axis whose index changes from one rank to the next comes first
_PARTS = {"pp": ("pp",), "dp": ("edp", "ep"), "edp": ("edp",), "ep": ("ep",), "tp": ("tp",)}


def uneven_parts(count: int, ranks: int) -> tuple[int, ...]:
    """Return parts of count // ranks, the last with the remainder; of fewer than `ranks`, the first ranks have one each."""
    base = count // ranks
    return (1,) * count + (0,) * (ranks - count) if not base else (*(base,) * (ranks - 1), count - base * (ranks - 1))


class Place(NamedTuple):
    """Position of a rank: its index on each axis. dp and cp number the ranks of edp and ep together, cp fastest.

    `pp_tp` is its index among the ranks of one replica, in rank order.
    """

    pp: int
    dp: int
    tp: int
    ep: int
    edp: int
    cp: int = 0
    pp_tp: int = 0


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the axes, and the order in which ranks are numbered along them.

    The dp · cp ranks at one place of pp and tp hold the same weights: cp ranks next to each other share the tokens of the same
    sequences. Experts are spread over `ep` of these replicas; the dp · cp/ep ranks that hold the same experts form the axis
    `edp`. The ranks of an ep group lie on `ep_nodes` machines, each machine's ranks next to each other.

    `order` names tp, ep, dp (without ep: the axis edp) and pp, joined by hyphens, the one whose index changes fastest first.
    With the default, rank = ((pp · dp · cp/ep + edp) · ep + ep_index) · tp + tp_index.

    Raises ArgumentError for a size below 1, an ep that does not divide dp · cp, ep_nodes that do not divide ep, or an order
    that does not name each axis once.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    ep_nodes: int = 1
    order: str = ORDER
    cp: int = 1

    def __post_init__(self) -> None:
        require_types(MeshShape, vars(self))
        object.__setattr__(self, "order", parse_order(self.order))
        for axis in ("pp", "dp", "tp", "ep", "ep_nodes", "cp"):
            if getattr(self, axis) < 1:
                raise ArgumentError(axis, f"={getattr(self, axis)} is below 1; nearest: 1")
        if self.world > MOST_WORKERS:
            axes = f"={self.pp} x dp {self.dp} x tp {self.tp}" + (f" x cp {self.cp}" if self.cp > 1 else "")
            words = f"{axes} are {self.world:,} workers; a run has at most {MOST_WORKERS:,}"
            raise ArgumentError("pp", words)
        whole = f"dp {self.dp}" + (f" x cp {self.cp}" if self.cp > 1 else "")
        require_divides("ep", self.ep, self.replicas, whole)
        require_divides("ep_nodes", self.ep_nodes, self.ep, f"ep {self.ep}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same weights, dp · cp: gradients are summed over them."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.replicas // self.ep

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of pp, edp, ep and tp."""
        return self.pp, self.edp, self.ep, self.tp

    @property
    def outermost_first(self) -> tuple[tuple[str, int], ...]:
        """The axes pp, edp, ep and tp with their sizes, the one whose index changes slowest first."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        axes = ["edp" if name == "dp" else name for name in reversed(self.order.split("-"))]
        return tuple((axis, sizes[axis]) for axis in axes)

    def place(self, rank: int) -> Place:
        """Return the position of `rank`. Raises UsageError for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in a mesh of {self.world} ranks")
        at, replica, inside, stride = {}, 0, 0, self.world
        for axis, size in self.outermost_first:
            stride //= size
            at[axis] = rank // stride % size
            if axis in _PARTS["dp"]:
                replica = replica * size + at[axis]
            else:
                inside = inside * size + at[axis]
        dp, cp = divmod(replica, self.cp)
        return Place(at["pp"], dp, at["tp"], at["ep"], at["edp"], cp, inside)

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along `axes`; each group in rank order, groups by their first rank.

        Args:
            axes: one of pp, dp (all replicas, dp · cp), edp, ep, tp, or several joined by an underscore ("dp_tp": the ranks of
                one pipeline rank).
        """
        inside = {part for axis in axes.split("_") for part in _parts(axis)}
        offsets, starts = [0], [0]
        stride = self.world
        for axis, size in self.outermost_first:
            stride //= size
            line = offsets if axis in inside else starts
            line[:] = [at + index * stride for at in line for index in range(size)]
        return tuple(tuple(start + offset for offset in offsets) for start in starts)

    def group_of(self, rank: int, axes: str) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`."""
        self.place(rank)
        return next(group for group in self.groups(axes) if rank in group)

    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that share the tokens of the same sequences, in order, one tuple for each place elsewhere."""
        return tuple(group[at : at + self.cp] for group in self.groups("dp") for at in range(0, self.replicas, self.cp))

    def node_groups(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return, for all ep groups, (the ranks on each machine, the ranks at the same place on each machine)."""
        length = self.ep // self.ep_nodes
        groups = self.groups("ep")
        inside = tuple(group[at : at + length] for group in groups for at in range(0, self.ep, length))
        return inside, tuple(group[place::length] for group in groups for place in range(length))

    def __str__(self) -> str:
        named = [f"{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(self, axis) > 1]
        return " · ".join(named) or "one rank"


def mirrored_pieces(length: int, index: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return the two ranges of the tokens of a sequence of `length` that context-parallel rank `index` of `count` holds.

    Of 2 · count equal pieces they are those numbered `index` from the start and from the end. Raises UsageError if 2 · count does
    not divide `length`.
    """
    size, rest = divmod(length, 2 * count)
    if rest:
        raise UsageError(f"context parallelism: 2 x cp = {2 * count} must divide the {length} tokens of a sequence")
    mirrored = 2 * count - 1 - index
    return (index * size, (index + 1) * size), (mirrored * size, (mirrored + 1) * size)


def parse_order(text: str) -> str:
    """Return an order of the axes as `MeshShape` holds it; commas and spaces may replace hyphens.

    Raises ArgumentError, with the nearest order, where the text does not name tp, ep, dp and pp once each.
    """
    names = ORDER.split("-")
    given = [word for word in re.split(r"[-,\s]+", text.lower()) if word]
    if sorted(given) == sorted(names):
        return "-".join(given)
    close = [match for word in given[: len(names)] for match in difflib.get_close_matches(word, names, 1, 0.4)]
    near = "-".join(dict.fromkeys((*close, *names)))
    raise ArgumentError(
        "order", f"={echo(text)} must name {', '.join(names[:-1])} and {names[-1]} once each; nearest: {near}"
    )


def _parts(axis: str) -> Sequence[str]:
    if axis not in _PARTS:
        raise UsageError(f"there is no mesh axis {axis!r:.200}; known: {', '.join(_PARTS)}")
    return _PARTS[axis]
