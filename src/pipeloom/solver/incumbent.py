"""State of a search: the moves and seconds that remain, the best schedule so far, the lower bounds, the progress callback."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Schedule
from pipeloom.schedule.costs import TIME_TOLERANCE, Sends
from pipeloom.solver.exact import RELATIVE_ROUNDING
from pipeloom.solver.instance import Instance, Sequences

# Division of a search's moves and time.
# Nodes evaluated if neither moves nor seconds are given: about ten seconds, also with pairs, whose moves take longer.
DEFAULT_WORK, DEFAULT_WORK_WITH_PAIRS = 8_000_000, 3_000_000
# Seconds after which such a search ends at the latest, on slow or busy machines.
DEFAULT_SECONDS = 30.0
# The shortest search: the clock must see that it takes time.
LEAST_SECONDS = 1e-3
# The fewest moves where no limit is given, so that large instances get some too.
FEWEST_MOVES = 100
# Seconds of a proof without a time limit.
PROOF_SECONDS = 120.0
# The share of the time for warm starts and tabu search if a proof follows: a good incumbent shortens the proof.
SEARCH_SHARE_BEFORE_PROOF = 0.25


class Budget:
    """The remaining budget of a search: moves, seconds, or both."""

    def __init__(
        self, size: int, time_limit: float | None, iterations: int | None, prove: bool, pairs: bool = False
    ) -> None:
        self.begin = time.monotonic()
        self.proof_end = self.begin + (time_limit if time_limit is not None else PROOF_SECONDS) if prove else 0.0
        share = SEARCH_SHARE_BEFORE_PROOF if prove else 1.0  # of the time, for the starts and the local search
        work = share * (DEFAULT_WORK_WITH_PAIRS if pairs else DEFAULT_WORK)
        default_moves = 10**9 if time_limit is not None else max(FEWEST_MOVES, int(work) // size)
        self.allowed = iterations if iterations is not None else default_moves
        if time_limit is None:
            time_limit = math.inf if iterations is not None else DEFAULT_SECONDS / share
        self.deadline = self.begin + max(LEAST_SECONDS, share * time_limit)
        self.used = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def spent(self) -> float:
        """The share of the time that is spent; 0 without a limit."""
        return self.seconds / (self.deadline - self.begin)

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    @property
    def over(self) -> bool:
        return self.used >= self.allowed or not self.in_time


@dataclass(frozen=True)
class Progress:
    """Progress of a search: the best value, the lower bound, seconds since its start, moves made."""

    value: float
    lower_bound: float
    seconds: float
    iterations: int


@dataclass(frozen=True)
class Solution:
    """A schedule within the memory limit.

    Attributes:
        value: its makespan or largest span.
        origin: name of the family or rule that constructed it.
        instance: its instance: placement, costs and order of micro-batches.
        schedule: the schedule.
        sequences: the sequences from which the schedule was created; None for a family's unchanged schedule.
    """

    value: float
    origin: str
    instance: Instance
    schedule: Schedule
    sequences: Sequences | None = None


class Incumbent:
    """The best solution of a search, and the lower bounds.

    Attributes:
        best: the best solution so far; None before the first.
        bounds: instance -> lower bound on the value of its schedules.
    """

    def __init__(
        self,
        bounds: dict[Instance, float],
        budget: Budget,
        progress: Callable[[Progress], None] | None,
        sends: Sends = "free",
    ) -> None:
        self._sends = sends
        self.bounds, self._budget, self._progress = bounds, budget, progress
        self.best: Solution | None = None

    @property
    def bound(self) -> float:
        """Lower bound on the value of all schedules on the placements searched."""
        return min(self.bounds.values())

    @property
    def value(self) -> float:
        """The best value; infinite before the first solution."""
        return float("inf") if self.best is None else self.best.value

    @property
    def proved(self) -> bool:
        """Return whether the best solution is proved optimal, within the tolerances."""
        return self.best is not None and self.value <= self.bound + max(TIME_TOLERANCE, RELATIVE_ROUNDING * self.value)

    def can_improve(self, instance: Instance) -> bool:
        """Return whether the instance's bound allows a better solution."""
        return self.bounds[instance] < self.value - TIME_TOLERANCE

    def improves(self, value: float) -> bool:
        """Return whether a schedule of this value would be better."""
        return value < self.value - TIME_TOLERANCE

    def offer_fitting(self, instance: Instance, schedule: Schedule, origin: str) -> None:
        """Simulate a schedule, and offer it if it fits the memory."""
        timeline = instance.simulated(schedule)
        if max(timeline.peak_memory) <= instance.memory_limit + TIME_TOLERANCE:
            self.offer(timeline.value(instance.objective), origin, instance, schedule)

    def _held(self, instance: Instance, schedule: Schedule) -> float:
        """Return the value of a schedule whose senders wait; infinite where it deadlocks."""
        try:
            return instance.simulated(schedule, self._sends).value(instance.objective)
        except ScheduleError:
            return math.inf

    def offer(
        self, value: float, origin: str, instance: Instance, solution: Schedule | Sequences, replace: bool = False
    ) -> bool:
        """Accept a schedule, or sequences of the instance, if better (with `replace`, also if equal); return whether accepted.

        Where senders wait, `value` is without it, and so the least that the schedule can take: its own is simulated.
        """
        if self._sends != "free" and value < self.value + TIME_TOLERANCE:
            solution = solution if isinstance(solution, Schedule) else instance.schedule_of(solution)
            value = self._held(instance, solution)
        if value < self.bounds[instance] * (1 - RELATIVE_ROUNDING) - TIME_TOLERANCE:
            warnings.warn(
                f"the lower bound {self.bounds[instance]:g} exceeds the value {value:g} of a schedule, so it is ignored: please "
                f"report {instance}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.bounds[instance] = 0.0
        if not (self.improves(value) or (replace and value <= self.value + TIME_TOLERANCE)):
            return False
        if isinstance(solution, Schedule):
            self.best = Solution(value, origin, instance, solution)
        else:
            sequences = [list(sequence) for sequence in solution]
            self.best = Solution(value, origin, instance, instance.schedule_of(sequences), sequences)
        self.report()
        return True

    def report(self) -> None:
        if self._progress is not None and self.best is not None:
            self._progress(Progress(self.value, self.bound, self._budget.seconds, self._budget.used))
