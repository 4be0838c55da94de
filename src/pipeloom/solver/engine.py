"""One search: what it may spend, its starts, and the turns that they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.bounds import memory_bound, work_bound
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.local_search import Trail
from pipeloom.solver.problem import EPS, Objective, Problem, Words
from pipeloom.solver.prove import ROUNDING, certify
from pipeloom.solver.seeds import SLOW, family_schedules, grown, words_of

POOL = 4
WORK = 8_000_000
PROOF_SECONDS = 120.0


@dataclass(frozen=True)
class Progress:
    """Where a search stands: the best value, the lower bound, seconds since its start, moves made."""

    value: float
    lower_bound: float
    seconds: float
    iterations: int


def value_of(timeline: Timeline, objective: Objective) -> float:
    """The makespan or the largest span."""
    return round(timeline.makespan if objective == "makespan" else max(timeline.spans), 9)


class Budget:
    """What the search may still spend: moves, seconds, or both."""

    def __init__(self, size: int, time_limit: float | None, iterations: int | None, prove: bool) -> None:
        self.begin = time.monotonic()
        self.proof_end = self.begin + (time_limit if time_limit is not None else PROOF_SECONDS) if prove else 0.0
        share = 0.25 if prove else 1.0  # of the time, for the starts and the local search
        self.deadline = math.inf if time_limit is None else self.begin + share * time_limit
        self.timed = iterations is None and time_limit is not None
        usual = 10**9 if self.timed else max(100, int(share * WORK) // size)
        self.allowed = iterations if iterations is not None else usual
        self.used = 0
        self.slice_end = math.inf

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def over(self) -> bool:
        return self.used >= self.allowed or time.monotonic() >= self.deadline

    def slice(self, starts: int) -> int:
        """The moves of one start's next turn; where only time counts, its end is set instead."""
        if self.timed:
            self.slice_end = time.monotonic() + max(0.05, (self.deadline - self.begin) / (4 * POOL))
            return 10**9
        return min(self.allowed - self.used, max(1, self.allowed // (4 * POOL)))

    def in_time(self) -> bool:
        now = time.monotonic()
        return now < self.deadline and now < self.slice_end


@dataclass
class Start:
    value: float
    problem: Problem
    words: Words
    origin: str
    trail: Trail | None = None


class Run:
    """One search: the best schedule so far, and the starts that are still being improved."""

    def __init__(
        self,
        problems: Sequence[Problem],
        budget: Budget,
        random: Random,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problems, self.budget, self.random, self.progress = problems, budget, random, progress
        self.objective = problems[0].objective
        self.bounds = {problem: bound_of(problem) for problem in problems}
        self.bound = min(self.bounds.values())
        self.best: tuple[float, str, Schedule, Costs] | None = None
        self.interrupted = False

    def go(self) -> None:
        """Runs to the end of the budget, the bound, or an interrupt that comes after a first answer.

        Raises CapacityError if no start fits the memory.
        """
        try:
            self._improve(self._starts())
            if self.budget.proof_end:
                self._prove()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        if self.best is None:
            raise CapacityError(
                f"memory is {self.problems[0].room:g}; no schedule was found that fits it: give more memory or fewer chunks"
            )

    @property
    def proved(self) -> bool:
        return self.best is not None and self.best[0] <= self.bound + max(EPS, ROUNDING * self.best[0])

    def _take(self, value: float, origin: str, schedule: Schedule, problem: Problem) -> None:
        if self.best is None or value < self.best[0] - EPS:
            self.best = value, origin, schedule, problem.costs
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(Progress(self.best[0], self.bound, self.budget.seconds, self.budget.used))

    def _starts(self) -> list[Start]:
        """Words that fit, the best first; the best schedule of all is noted."""
        starts: list[Start] = []
        for problem in self.problems:
            starts += self._family_starts(problem)
        for problem in self.problems:
            if problem.nodes > SLOW or self._late():
                continue
            for seed in grown(problem):
                self._start(starts, problem, seed.words, seed.origin)
                if self._late():
                    break
        return _best_of(starts)

    def _late(self) -> bool:
        """Whether the starts should come to an end: a quarter of the time is spent, and there is one."""
        budget = self.budget
        return self.best is not None and budget.seconds > 0.25 * (budget.deadline - budget.begin)

    def _family_starts(self, problem: Problem) -> Iterator[Start]:
        for schedule in family_schedules(problem.placement, problem.microbatches, problem.costs, problem.room):
            timeline = simulate(schedule, problem.costs)
            if max(timeline.peak_memory) <= problem.room + EPS:
                self._take(value_of(timeline, self.objective), schedule.name, schedule, problem)
                if problem.nodes <= SLOW:
                    starts: list[Start] = []
                    self._start(starts, problem, words_of(problem, schedule), schedule.name)
                    yield from starts
            if self._late() and problem is not self.problems[-1]:
                return

    def _start(self, starts: list[Start], problem: Problem, words: Words, origin: str) -> None:
        found = evaluate(problem, words)
        if found is None or not problem.fits(words):
            return
        starts.append(Start(found.value, problem, words, origin))
        if self.best is None or found.value < self.best[0] - EPS:
            self._take(found.value, origin, problem.schedule_of(words), problem)

    def _improve(self, starts: list[Start]) -> None:
        """The starts take turns; after every round the worst is left, until the budget is spent or the bound reached."""
        pool = starts[:POOL]
        budget = self.budget
        while pool and not budget.over:
            for start in pool:
                if budget.over or (self.best is not None and self.best[0] <= self.bounds[start.problem] + EPS):
                    continue
                self._turn(start, budget.slice(len(pool)))
            pool.sort(key=lambda start: start.value)
            del pool[max(1, len(pool) - 1) :]
            if self.best is not None and self.best[0] <= self.bound + EPS:
                return
            pool = [start for start in pool if self.best is None or self.bounds[start.problem] < self.best[0] - EPS]

    def _turn(self, start: Start, moves: int) -> None:
        budget, before = self.budget, self.budget.used

        def carry_on(words: Words, value: float, done: int) -> bool:
            budget.used = before + done
            if self.best is not None and value < self.best[0] - EPS:
                self._take(value, start.origin, start.problem.schedule_of(words), start.problem)
            else:
                self._tell()
            return budget.in_time()

        if start.trail is None:
            start.trail = Trail(start.problem, start.words, self.random)
        start.trail.walk(moves, self.bounds[start.problem], carry_on)
        start.value = start.trail.value

    def _prove(self) -> None:
        """Raises the bound of every placement, and takes what the solver finds on the way."""
        assert self.best is not None
        for problem in sorted(self.problems, key=lambda problem: problem.placement != self.best[2].placement):  # type: ignore[index]
            value, _, schedule, _ = self.best
            left = self.budget.proof_end - time.monotonic()
            if self.bounds[problem] >= value - EPS or left <= 0 or problem.nodes > SLOW:
                continue
            same = problem.placement == schedule.placement and not schedule.has_pairs
            found = certify(problem, value, left, words_of(problem, schedule) if same else None)
            self.bounds[problem] = max(self.bounds[problem], found.bound)
            if found.words is not None:
                self._take(found.value, "constraint programming", problem.schedule_of(found.words), problem)
            self.bound = min(self.bounds.values())
            self._tell()


def _best_of(starts: list[Start]) -> list[Start]:
    """Sorted by value; of equal ones on one placement, the first only."""
    kept: dict[tuple[float, tuple[int, ...]], Start] = {}
    for start in starts:
        kept.setdefault((round(start.value, 9), start.problem.placement), start)
    return sorted(kept.values(), key=lambda start: start.value)


def bound_of(problem: Problem) -> float:
    """The largest of the bounds that hold for the problem."""
    sizes = (problem.placement, problem.microbatches)
    return max(
        work_bound(*sizes, problem.costs, problem.objective),
        memory_bound(*sizes, problem.costs, problem.room, problem.objective),
    )
