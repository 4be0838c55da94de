"""`search`: the best schedule that it can find for these sizes, costs and memory, and how far from optimal it can be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.errors import CapacityError, UsageError, did_you_mean
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.bounds import memory_bound, work_bound
from pipeloom.schedule.families.layout import require_sizes
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.local_search import Trail
from pipeloom.solver.placements import placements_of
from pipeloom.solver.problem import EPS, Objective, Problem, Words
from pipeloom.solver.seeds import SLOW, family_schedules, grown, words_of

POOL = 4
WORK = 8_000_000
OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True)
class Progress:
    """Where a search stands: the best value, the lower bound, seconds since its start, moves made."""

    value: float
    lower_bound: float
    seconds: float
    iterations: int


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What `search` found.

    Attributes:
        schedule: checked, ready to be drawn, exported and run.
        timeline: its simulation with the costs given.
        objective: `"makespan"` or `"span"`.
        lower_bound: a value of the objective that no schedule on the placements searched can beat.
        proved: whether nothing can be better: the bound is reached, or a solver has shown it.
        origin: the family or rule that the best schedule grew from.
        iterations: moves of the local search.
        seconds: that the search took.
        interrupted: whether Ctrl-C ended it.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    lower_bound: float
    proved: bool
    origin: str
    iterations: int
    seconds: float
    interrupted: bool = False

    @property
    def value(self) -> float:
        """The makespan or the largest span, as the objective says."""
        return value_of(self.timeline, self.objective)

    @property
    def gap(self) -> float:
        """value / lower bound - 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    def __repr__(self) -> str:
        return f"SearchResult({self.objective} {self.value:g}, bound {self.lower_bound:g}, {self.schedule!r})"


def value_of(timeline: Timeline, objective: Objective) -> float:
    return round(timeline.makespan if objective == "makespan" else max(timeline.spans), 9)


def search(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | None = None,
    *,
    placement: str | Sequence[int] | None = None,
    chunks: int | None = None,
    objective: Objective = "makespan",
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The schedule with the least makespan (or largest span) found, within `memory` on every rank.

    Never worse than the best one-route family that fits with the same number of chunks or a divisor of it. Families and list
    scheduling give the starts; tabu search along critical paths improves them. Ctrl-C ends it with the best so far.

    Args:
        costs: of a stage; default 1, 1, 1, 0.
        memory: the largest peak memory of a rank, in units of `Costs.activation` (1: stage-micro-batches); None: no limit.
        placement: `"linear"`, `"loop"`, `"vee"`, or the rank of every stage; None: all three for the given chunks.
        chunks: stages a rank; default 1, or the placement's.
        objective: `"makespan"`: a step that ends in a barrier; `"span"`: steps without one.
        time_limit: seconds.
        iterations: moves of the local search. With neither: a number that takes about ten seconds. Without a time limit
            the result depends on the arguments alone.
        seed: of the random choices.
        progress: called now and then.

    Raises:
        UsageError: sizes, placement, objective or limits that make no sense.
        CapacityError: the memory does not hold one micro-batch, or no start fits it.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    chosen = costs if costs is not None else Costs()
    if objective not in OBJECTIVES:
        raise UsageError(f"objective is {objective!r}{did_you_mean(str(objective), OBJECTIVES)}")
    room = math.inf if memory is None else _limit("memory", memory)
    problems = [
        Problem(place, microbatches, chosen, room, objective) for place in placements_of(ranks, chunks, placement)
    ]
    for problem in problems:
        require_room(problem)
    budget = _Budget(problems, time_limit, iterations)
    return _Run(problems, budget, Random(seed), progress).result()


def require_room(problem: Problem) -> None:
    """Raises CapacityError where not even one micro-batch at a time fits, UsageError for costs of another size."""
    activation = problem.costs.per_stage("activation", problem.stages)
    problem.costs.check_links(problem.ranks)
    for rank in range(problem.ranks):
        least = sum(a for a, home in zip(activation, problem.placement, strict=True) if home == rank)
        if least > problem.room + EPS:
            raise CapacityError(
                f"memory is {problem.room:g}; one micro-batch in all stages of rank {rank} takes {least:g}"
            )


def _limit(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be a number above 0")
    return value


class _Budget:
    """What the search may still spend: moves, seconds, or both."""

    def __init__(self, problems: Sequence[Problem], time_limit: float | None, iterations: int | None) -> None:
        self.begin = time.monotonic()
        self.deadline = math.inf if time_limit is None else self.begin + _limit("time-limit", time_limit)
        if iterations is not None and (isinstance(iterations, bool) or iterations < 0):
            raise UsageError(f"iterations is {iterations!r}; it must be a whole number of at least 0")
        size = problems[0].nodes
        self.timed = iterations is None and time_limit is not None
        self.allowed = iterations if iterations is not None else 10**9 if self.timed else max(100, WORK // size)
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
class _Start:
    value: float
    problem: Problem
    words: Words
    origin: str
    trail: Trail | None = None


class _Run:
    """One search: the best schedule so far, and the starts that are still being improved."""

    def __init__(
        self,
        problems: Sequence[Problem],
        budget: _Budget,
        random: Random,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problems, self.budget, self.random, self.progress = problems, budget, random, progress
        self.objective = problems[0].objective
        self.bounds = {problem: bound_of(problem) for problem in problems}
        self.bound = min(self.bounds.values())
        self.best: tuple[float, str, Schedule, Costs] | None = None
        self.interrupted = False

    def result(self) -> SearchResult:
        try:
            starts = self._starts()
            self._improve(starts)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        if self.best is None:
            problem = self.problems[0]
            raise CapacityError(
                f"memory is {problem.room:g}; no schedule was found that fits it: give more memory or fewer chunks"
            )
        value, origin, schedule, costs = self.best
        return SearchResult(
            schedule=schedule,
            timeline=simulate(schedule, costs),
            objective=self.objective,
            lower_bound=min(self.bound, value),
            proved=value <= self.bound + EPS * max(1.0, value),
            origin=origin,
            iterations=self.budget.used,
            seconds=self.budget.seconds,
            interrupted=self.interrupted,
        )

    def _take(self, value: float, origin: str, schedule: Schedule, problem: Problem) -> None:
        if self.best is None or value < self.best[0] - EPS:
            self.best = value, origin, schedule, problem.costs
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(Progress(self.best[0], self.bound, self.budget.seconds, self.budget.used))

    def _starts(self) -> list[_Start]:
        """Words that fit, the best first; the best schedule of all is noted."""
        starts: list[_Start] = []
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

    def _family_starts(self, problem: Problem) -> Iterator[_Start]:
        for schedule in family_schedules(problem.placement, problem.microbatches, problem.costs, problem.room):
            timeline = simulate(schedule, problem.costs)
            if max(timeline.peak_memory) <= problem.room + EPS:
                self._take(value_of(timeline, self.objective), schedule.name, schedule, problem)
                if problem.nodes <= SLOW:
                    starts: list[_Start] = []
                    self._start(starts, problem, words_of(problem, schedule), schedule.name)
                    yield from starts
            if self._late() and problem is not self.problems[-1]:
                return

    def _start(self, starts: list[_Start], problem: Problem, words: Words, origin: str) -> None:
        found = evaluate(problem, words)
        if found is None or not problem.fits(words):
            return
        starts.append(_Start(found.value, problem, words, origin))
        if self.best is None or found.value < self.best[0] - EPS:
            self._take(found.value, origin, problem.schedule_of(words), problem)

    def _improve(self, starts: list[_Start]) -> None:
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

    def _turn(self, start: _Start, moves: int) -> None:
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


def _best_of(starts: list[_Start]) -> list[_Start]:
    """Sorted by value; of equal ones on one placement, the first only."""
    kept: dict[tuple[float, tuple[int, ...]], _Start] = {}
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
