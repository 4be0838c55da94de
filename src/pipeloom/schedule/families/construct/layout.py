"""Helpers of the families: registration, checks of sizes, the encoding of actions as integers, common orders of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, starmap
from typing import NamedTuple, TypeVar

from pipeloom.errors import UsageError
from pipeloom.limits import (
    MOST_CELLS,
    MOST_CHUNKS,
    MOST_RANKS,
    of_annotated_types,
    require_at_most,
    require_schedule,
    require_whole,
)
from pipeloom.schedule.actions import MOST_KINDS, KindName, kind_number
from pipeloom.schedule.model import Schedule

Item = TypeVar("Item")
Family = Callable[..., Schedule]
FamilyFunction = TypeVar("FamilyFunction", bound=Family)
Planned = tuple[KindName, int, int]  # kind, stage, micro-batch


class RegisteredFamily(NamedTuple):
    """A family as `family` registers it; the attributes are those of the decorator."""

    function: Family
    aliases: tuple[str, ...]
    placement: str
    baseline: bool
    order: int


REGISTRY: dict[str, RegisteredFamily] = {}
"""Families by name, in the order in which their modules were imported; `families/__init__.py` sorts them."""


def family(
    name: str, *aliases: str, placement: str = "", baseline: bool = False, order: int = 1000
) -> Callable[[FamilyFunction], FamilyFunction]:
    """Register the decorated function `(ranks, microbatches, ...) -> Schedule` as the family called `name`.

    Args:
        aliases: its other names, in lower case without spaces, hyphens and underscores.
        placement: the placement that a family of one route is made for, from which searches then start; "" for two routes.
        baseline: whether searched schedules are compared with it.
        order: its place in lists such as that of `compare all`; of baselines, the order of preference.
    """

    def register(function: FamilyFunction) -> FamilyFunction:
        checked = of_annotated_types(function)
        REGISTRY[name] = RegisteredFamily(checked, aliases, placement, baseline, order)
        return checked

    return register


def require_sizes(most: int = MOST_CELLS, **sizes: int) -> None:
    """Raise UsageError that names the first of `sizes` which is not a whole number of at least 1, or which is too large.

    Args:
        most: the largest product of the sizes, where ranks and microbatches are among them.
    """
    for name, value in sizes.items():
        require_whole(name, value)
    for name, largest in (("ranks", MOST_RANKS), ("chunks", MOST_CHUNKS), ("waves", MOST_CHUNKS)):
        require_at_most(name, sizes.get(name, 1), largest)
    if {"ranks", "microbatches"} <= sizes.keys():
        stages = math.prod(value for name, value in sizes.items() if name != "microbatches")
        require_schedule(sizes["ranks"], sizes["microbatches"], stages, most)


def require_even(name: str, ranks: int) -> None:
    """Raise UsageError for an odd number of ranks of the family called `name`, with the nearest even ones."""
    if ranks % 2:
        nearest = "2" if ranks == 1 else f"{ranks - 1} or {ranks + 1}"
        raise UsageError(f"{name} needs an even number of ranks, not {ranks}; nearest: {nearest}")


class Coder:
    """Encoder of actions as a Schedule's integers: `Coder.f(stage, mb)` and so on."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self.stages = stages
        self.microbatches = microbatches
        self.stride = stages * microbatches

    def f(self, stage: int, microbatch: int) -> int:
        return stage * self.microbatches + microbatch

    def b(self, stage: int, microbatch: int) -> int:
        return self.stride + stage * self.microbatches + microbatch

    def i(self, stage: int, microbatch: int) -> int:
        return 2 * self.stride + stage * self.microbatches + microbatch

    def w(self, stage: int, microbatch: int) -> int:
        return 3 * self.stride + stage * self.microbatches + microbatch

    def of(self, kind: str, stage: int, microbatch: int) -> int:
        return kind_number(kind) * self.stride + stage * self.microbatches + microbatch

    def pair(self, forward: int, backward: int) -> int:
        """One overlapped block of `forward` (from `f`) and `backward` (from `b` or `i`)."""
        return (forward + 1) * MOST_KINDS * self.stride + backward


def encoded(programs: Sequence[Sequence[Planned]], stages: int, microbatches: int) -> list[list[int]]:
    """Return programs, rank -> its (kind, stage, micro-batch), as a Schedule's integers."""
    code = Coder(stages, microbatches)
    return [[code.of(*action) for action in program] for program in programs]


def warmup_then_alternate(
    forwards: list[Item], backwards: list[Item], warmup: int, pair: Callable[[Item, Item], Item] | None = None
) -> Iterator[Item]:
    """`warmup` forwards, then one forward and one backward in turn, or in a pair, then the backwards that are left."""
    later = forwards[warmup:]
    steady = zip(later, backwards, strict=False)
    in_turn = chain.from_iterable(steady) if pair is None else starmap(pair, steady)
    return chain(forwards[:warmup], in_turn, backwards[len(later) :])
