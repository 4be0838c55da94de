"""A trial of two schedules in training."""

from __future__ import annotations

from statistics import median

from pipeloom.schedule import Schedule, Timeline


class ABTrial:
    """A trial of two schedules in alternating steps, because a simulation leaves out effects on caches and cores."""

    def __init__(self, schedules: tuple[Schedule, Schedule], count: int, objective: str) -> None:
        self.schedules = schedules
        self._count, self._objective = count, objective
        self._values: list[float] = []

    @property
    def next(self) -> Schedule | None:
        """Return the schedule of the next step; None once each has run `count` steps."""
        steps = len(self._values)
        return self.schedules[steps % 2] if steps < 2 * self._count else None

    def note(self, step: Timeline) -> None:
        """Record the measured step of `next`."""
        self._values.append(step.value(self._objective))

    def medians(self) -> tuple[float, float]:
        """Return the median of each schedule's steps, without the first, which allocates buffers, unless it is the only one."""
        first, second = (self._values[at::2] for at in (0, 1))
        return median(first[1:] or first), median(second[1:] or second)
