"""What the families share: sizes that are refused in the same words, and integer programs of looped placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import KINDS, KindName

Item = TypeVar("Item")


def require_sizes(**sizes: int) -> None:
    """Raises UsageError that names the first of `sizes` which is not a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")


def loop_placement(ranks: int, chunks: int) -> list[int]:
    """Stage c * p + r on rank r."""
    return [stage % ranks for stage in range(ranks * chunks)]


class Coder:
    """Writes actions as a Schedule's integers: `coder.f(stage, mb)` and so on."""

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

    def of(self, kind: KindName, stage: int, microbatch: int) -> int:
        return KINDS.index(kind) * self.stride + stage * self.microbatches + microbatch

    def pair(self, forward: int, backward: int) -> int:
        """One overlapped block of `forward` (from `f`) and `backward` (from `b` or `i`)."""
        return (forward + 1) * 4 * self.stride + backward


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


def v_placement(ranks: int) -> list[int]:
    """Stage s on rank s, and stage 2p-1-s on the same rank."""
    return [*range(ranks), *reversed(range(ranks))]
