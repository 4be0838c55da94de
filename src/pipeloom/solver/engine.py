"""One search: what it may spend, its starts, and the turns that they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from pipeloom.schedule import Schedule, Timeline, simulate
from pipeloom.schedule.bounds import memory_bound, work_bound
from pipeloom.solver.budget import POOL, Budget
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.extended import extended
from pipeloom.solver.local_search import Trail
from pipeloom.solver.periods import Periods, packed_starts
from pipeloom.solver.problem import EPS, Objective, Problem, Words
from pipeloom.solver.prove import ROUNDING, certify
from pipeloom.solver.quest import Progress, Quest
from pipeloom.solver.seeds import SLOW, by_rounds, family_schedules, few_of, grown, words_of

PERIODIC, FULL = 0.5, 4.0
ROUNDS = 4
HOPELESS = 1.03
FEW, STARTS, LARGE_STARTS = 8, 0.3, 0.5
SEEDS = 6
PERIODIC_ORIGIN = "one period"


def value_of(timeline: Timeline, objective: Objective) -> float:
    """The makespan or the largest span."""
    return round(timeline.value(objective), 9)


@dataclass
class Start:
    value: float
    problem: Problem
    words: Words
    origin: str
    trail: Trail | None = None


class Run(Quest):
    """One search: the best schedule so far, and the starts that are still being improved."""

    rounding = ROUNDING

    def __init__(
        self,
        problems: Sequence[Problem],
        budget: Budget,
        random: Random,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        super().__init__(problems, budget, random, progress)
        self.seeds: dict[Problem, list[tuple[float, Problem, Words]]] = {}

    def _bound_of(self, problem: Problem) -> float:
        return bound_of(problem)

    def _search(self) -> None:
        self._improve(self._starts())
        if self.budget.proof_end:
            self._prove()

    def _starts(self) -> list[Start]:
        """Words that fit, the best first; the best schedule of all is noted."""
        starts: list[Start] = []
        groups: dict[tuple[int, ...], list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.placement, []).append(problem)
        for group in groups.values():
            self._family_starts(starts, group)
        for group in groups.values():
            if self.proved:
                return []
            if group[0].nodes <= SLOW:
                self._grown_starts(starts, group)
            else:
                self._extended(group[0])
        if not self.proved:
            self._periodic(starts)
        return _best_of(starts)

    def _family_starts(self, starts: list[Start], group: list[Problem]) -> None:
        """The families as they are, and their words with the micro-batches in every order that is asked for."""
        first = group[0]
        for schedule in self._families(first):
            timeline = simulate(schedule, first.costs, overlap_p2p=first.overlap_p2p)
            if max(timeline.peak_memory) <= first.room + EPS:
                self._take(value_of(timeline, self.objective), schedule.name, schedule, first)
            if first.nodes <= SLOW:
                words = words_of(first, schedule)
                for problem in group:
                    self._start(starts, problem, words, schedule.name)

    def _families(self, problem: Problem) -> Iterator[Schedule]:
        sizes = problem.placement, problem.microbatches
        yield from family_schedules(*sizes, problem.costs, problem.room)
        if problem.costs.uneven:  # those that are made for a limit count on micro-batches that are alike
            yield from family_schedules(*sizes, problem.even.costs, problem.room)

    def _grown_starts(self, starts: list[Start], group: list[Problem]) -> None:
        for count, seed in enumerate(chain(by_rounds(group[0]), grown(group[0]))):
            if count >= FEW and self._late():
                return
            for problem in group:
                self._start(starts, problem, seed.words, seed.origin)

    def _extended(self, problem: Problem) -> None:
        """For large sizes: a schedule of some of the micro-batches, and a stretch of it repeated for the others."""
        if self.best is None:
            for start in packed_starts(problem):
                self._start([], problem, start.unrolled(problem), PERIODIC_ORIGIN)
                break
        if self._late(LARGE_STARTS):
            return
        best = math.inf
        for small, words, origin in few_of(problem):
            found = evaluate(small, words)
            if found is not None and small.fits(words) and found.value < best * small.microbatches:
                best = found.value / small.microbatches
                self.seeds.setdefault(problem, []).append((found.value, small, words))
                longer = extended(small, words, problem)
                if longer is not None:
                    self._start([], problem, longer, f"{origin} of {small.microbatches} micro-batches, repeated")
            if self._late(LARGE_STARTS) or self.proved:
                return

    def _periodic(self, starts: list[Start]) -> None:
        """Searches one period of every placement; after each round the worst placement is left."""
        budget, first = self.budget, self.problems[0]
        # what a period gains, it gains m / p times; a pipeline that hardly fills depends on its ends
        budget.grant(min(PERIODIC, PERIODIC * first.microbatches / (FULL * first.ranks)))
        searches = [
            Periods(problem, self.random, self._seeds(problem))
            for problem in self.problems
            if self.best is None or self.bounds[problem] < self.best[0] - EPS
        ]
        running = searches
        for turn in range(ROUNDS):
            for at, search in enumerate(running):
                if budget.over:
                    break
                share = 1 / ((ROUNDS - turn) * len(running) - at)
                before = search.work
                search.run(self._noting(search, budget.periodic_slice(search, share)))
                budget.periodic -= search.work - before
            running = sorted(running, key=lambda search: search.value)[: max(1, len(running) - 1)]
            running = [search for search in running if self._hopeful(search, turn)]
        starts += [
            Start(search.value, search.problem, search.best, PERIODIC_ORIGIN)
            for search in searches
            if search.best is not None and search.problem.nodes <= SLOW
        ]

    def _seeds(self, problem: Problem) -> list[tuple[Problem, Words]]:
        """The best words on the placement whose periods could be repeated; of equal values the first."""
        kept: dict[float, tuple[Problem, Words]] = {}
        for value, small, words in sorted(self.seeds.get(problem, []), key=lambda seed: seed[0]):
            kept.setdefault(round(value, 9), (small, words))
        return list(kept.values())[:SEEDS]

    def _noting(self, search: Periods, carry_on: Callable[[], bool]) -> Callable[[], bool]:
        """`carry_on`, which on the way takes what is found, so that an interrupt keeps it."""

        def noted() -> bool:
            if search.best is not None and (self.best is None or search.value < self.best[0] - EPS):
                self._take(search.value, PERIODIC_ORIGIN, search.problem.schedule_of(search.best), search.problem)
            self._tell()
            return carry_on()

        return noted

    def _hopeful(self, search: Periods, turn: int) -> bool:
        """Whether more of it could be better than what there is."""
        best = math.inf if self.best is None else self.best[0]
        return self.bounds[search.problem] < best - EPS and (not turn or search.value < HOPELESS * best)

    def _late(self, share: float = STARTS) -> bool:
        """Whether the starts should come to an end: this share of the time is spent, and there is one."""
        budget = self.budget
        return self.best is not None and budget.seconds > share * (budget.deadline - budget.begin)

    def _start(self, starts: list[Start], problem: Problem, words: Words, origin: str) -> None:
        found = evaluate(problem, words)
        if found is None or not problem.fits(words):
            return
        starts.append(Start(found.value, problem, words, origin))
        if problem.nodes <= SLOW:
            self.seeds.setdefault(problem, []).append((found.value, problem, words))
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
    """Sorted by value; of equal ones of one problem, the first only."""
    kept: dict[tuple[float, tuple[int, ...], tuple[int, ...]], Start] = {}
    for start in starts:
        kept.setdefault((round(start.value, 9), start.problem.placement, start.problem.order), start)
    return sorted(kept.values(), key=lambda start: start.value)


def bound_of(problem: Problem) -> float:
    """The largest of the bounds that hold for the problem."""
    sizes = (problem.placement, problem.microbatches)
    return max(
        work_bound(*sizes, problem.costs, problem.objective),
        memory_bound(*sizes, problem.costs, problem.room, problem.objective),
    )
