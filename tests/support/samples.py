"""Schedules that the runtime's tests run: a seeded sample of families, ranks, chunks and micro-batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeloom import Schedule, schedules
from pipeloom.errors import UsageError

Maker = Callable[[int, int, int], Schedule]

FAMILIES: dict[str, Maker] = {
    "gpipe": lambda p, m, v: schedules.gpipe(p, m),
    "1f1b": lambda p, m, v: schedules.one_f_one_b(p, m),
    "balanced": lambda p, m, v: schedules.interleaved(p, m, v),
    "tail": lambda p, m, v: schedules.interleaved(p, m, v, rounds="tail"),
    "head": lambda p, m, v: schedules.interleaved(p, m, v, rounds="head"),
    "group": lambda p, m, v: schedules.interleaved(p, m, v, group_size=(p + m + 1) // 2),
    "bfs": lambda p, m, v: schedules.looped_bfs(p, m, v),
}


@dataclass(frozen=True)
class Case:
    """A schedule, the layers of each of its stages, and the rows of each micro-batch."""

    schedule: Schedule
    stages: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def layers(self) -> int:
        return sum(self.stages)

    @property
    def rows(self) -> int:
        return sum(self.sizes)


def sample(family: str, count: int, seed: int) -> Iterator[tuple[str, Case]]:
    """(id, case) of `count` draws; stages of 1 to 3 layers, micro-batches of 1 to 4 rows, both uneven."""
    draw = random.Random(f"{family} {seed}")
    seen: set[tuple[int, int, int]] = set()
    while len(seen) < count:
        p, v, m = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 13)
        if family in ("gpipe", "1f1b"):
            v = 1
        try:
            schedule = FAMILIES[family](p, m, v)
        except UsageError:  # group sizes need m >= p
            continue
        if (p, v, m) in seen:
            continue
        seen.add((p, v, m))
        stages = tuple(draw.randint(1, 3) for _ in range(schedule.stages))
        sizes = tuple(draw.randint(1, 4) for _ in range(m))
        yield f"{family}-p{p}-v{v}-m{m}", Case(schedule, stages, sizes)
