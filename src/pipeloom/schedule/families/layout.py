"""Helpers of the families: checks of their sizes, the encoding of actions as integers, and common orders of actions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from pipeloom.errors import UsageError, echo
from pipeloom.limits import MOST_CELLS, MOST_CHUNKS, MOST_RANKS, require_at_most, require_schedule
from pipeloom.schedule.actions import MOST_KINDS, kind_number

Item = TypeVar("Item")


def require_sizes(most: int = MOST_CELLS, **sizes: int) -> None:
    """Raise UsageError that names the first of `sizes` which is not a whole number of at least 1, or which is too large.

    Args:
        most: the largest product of the sizes, where ranks and microbatches are among them.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {echo(value)}; it must be a whole number of at least 1")
    for name, largest in (("ranks", MOST_RANKS), ("chunks", MOST_CHUNKS), ("waves", MOST_CHUNKS)):
        require_at_most(name, sizes.get(name, 1), largest)
    if {"ranks", "microbatches"} <= sizes.keys():
        stages = math.prod(value for name, value in sizes.items() if name != "microbatches")
        require_schedule(sizes["ranks"], sizes["microbatches"], stages, most)


class Coder:
    """Encoder of actions as a Schedule's integers: `coder.f(stage, mb)` and so on."""

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


def warmup_then_alternate(forwards: list[Item], backwards: list[Item], warmup: int) -> Iterator[Item]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        yield forward
        yield backward
    yield from backwards[steady:]


def warmup_then_pairs(code: Coder, forwards: list[int], backwards: list[int], warmup: int) -> Iterator[int]:
    """`warmup` forwards, then pairs of the next forward and the next backward, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    steady = len(forwards) - warmup
    yield from map(code.pair, forwards[warmup:], backwards[:steady])
    yield from backwards[steady:]
