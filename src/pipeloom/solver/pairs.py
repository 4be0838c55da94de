"""The search over pairs: which forward runs with which backward as one overlapped block, and where.

Starts are all that the other search starts from, with pairs formed on the way and weight gradients placed anew; a tabu search
moves, makes and takes apart blocks. `PairRun` stands where `engine.Run` stands in a search without pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeloom.errors import PipeloomError
from pipeloom.schedule import Schedule, simulate
from pipeloom.schedule.families import build
from pipeloom.solver.budget import POOL
from pipeloom.solver.engine import Run, value_of
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.pair_blocks import Blocks, Rows, times_of
from pipeloom.solver.pair_bound import pair_bound, pairs_gain
from pipeloom.solver.pair_fuse import fused
from pipeloom.solver.pair_seeds import FIRST, OTHERS, Habit, starts_of
from pipeloom.solver.pair_walk import PairTrail
from pipeloom.solver.problem import EPS, Problem
from pipeloom.solver.quest import Quest
from pipeloom.solver.seeds import SLOW, family_schedules, grown

GROWN = 3
PAIRED = ("1f1b-overlap", "interleaved-overlap", "dualpipev")
BEST = 3


@dataclass
class PairStart:
    """Rows to improve: their value, where they come from, and the walk that they are on."""

    value: float
    blocks: Blocks
    rows: Rows
    origin: str
    trail: PairTrail | None = None


class PairRun(Quest):
    """One search over pairs: the best schedule so far, and the starts that are still being improved.

    Attributes:
        rows: what the best schedule was written from; None where it is a family as it is.
    """

    rows: tuple[Blocks, Rows] | None = None

    def _bound_of(self, problem: Problem) -> float:
        return pair_bound(problem)

    def go(self) -> None:
        """As every search; where no pair gains, the one without pairs does the work."""
        if not any(map(pairs_gain, self.problems)):
            self._without_pairs()
            return
        super().go()
        self._fuse()

    def _search(self) -> None:
        self._improve(self._starts())

    def _fuse(self) -> None:
        """Writes the best with fewer actions, where that costs nothing."""
        if self.best is not None and self.rows is not None:
            value, origin, _, costs = self.best
            blocks, rows = self.rows
            self.best = value, origin, blocks.schedule_of(fused(blocks, rows)), costs

    def _without_pairs(self) -> None:
        run = Run(self.problems, self.budget, self.random, self.progress)
        run.go()
        self.best, self.bound, self.interrupted = run.best, run.bound, run.interrupted

    def _take(self, value: float, origin: str, schedule: Schedule, problem: Problem) -> None:
        if self.best is None or value < self.best[0] - EPS:
            self.rows = None
        super()._take(value, origin, schedule, problem)

    def _take_rows(self, value: float, origin: str, blocks: Blocks, rows: Rows) -> None:
        if self.best is None or value < self.best[0] - EPS:
            self._take(value, origin, blocks.schedule_of(rows), blocks.problem)
            self.rows = blocks, rows

    def _late(self) -> bool:
        """Whether the starts should come to an end: a third of the time is spent, and there is one."""
        budget = self.budget
        return self.best is not None and budget.seconds > (budget.deadline - budget.begin) / 3

    def _starts(self) -> list[PairStart]:
        """Rows that fit, the best first, of equal ones on one placement the first only; the best schedule of all is noted."""
        kept: dict[tuple[float, tuple[int, ...]], PairStart] = {}
        seeds: list[tuple[float, int, Blocks, Schedule]] = []
        for problem in sorted(self.problems, key=lambda problem: self.bounds[problem]):
            if not self._open(problem):
                break
            blocks = Blocks(problem)
            for schedule in self._schedules(problem):
                value = math.inf
                for start in self._variants(blocks, schedule, FIRST, (0.5,)):
                    kept.setdefault((round(start.value, 9), problem.placement), start)
                    value = min(value, start.value)
                seeds.append((value, len(seeds), blocks, schedule))
                if self._late() or self.proved:
                    break
        for _, _, blocks, schedule in sorted(seeds, key=lambda seed: seed[:2])[:BEST]:
            if self._late() or self.proved:
                break
            for start in self._variants(blocks, schedule, OTHERS, (0.0, 1.0)):
                kept.setdefault((round(start.value, 9), blocks.problem.placement), start)
        return sorted(kept.values(), key=lambda start: start.value)

    def _schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Every one-route family on the placement, those that do not fit the memory too, and the best of list scheduling."""
        for schedule in _families(problem):
            timeline = simulate(schedule, problem.costs)
            if max(timeline.peak_memory) <= problem.room + EPS:
                self._take(value_of(timeline, self.objective), schedule.name, schedule, problem)
            yield schedule
        if problem.nodes > SLOW or not self._open(problem):
            return
        found = []
        for at, seed in enumerate(grown(problem)):
            value = evaluate(problem, seed.words)
            if value is not None:
                found.append((value.value, at, problem.schedule_of(seed.words, seed.origin)))
            if self._late():
                break
        for _, _, schedule in sorted(found, key=lambda one: one[:2])[:GROWN]:
            yield schedule

    def _variants(
        self, blocks: Blocks, schedule: Schedule, habits: Sequence[Habit], lates: Sequence[float]
    ) -> Iterator[PairStart]:
        rows = blocks.rows_of(schedule)
        for made in (
            (rows, *starts_of(blocks, rows, habits, lates))
            if habits is FIRST
            else starts_of(blocks, rows, habits, lates)
        ):
            found = times_of(blocks, made)
            if found is not None and blocks.fits(made):
                self._take_rows(found.value, schedule.name, blocks, made)
                yield PairStart(found.value, blocks, made, schedule.name)

    def _improve(self, starts: list[PairStart]) -> None:
        """The starts take turns; after every round the worst is left, until the budget is spent or the bound reached."""
        pool = [start for start in starts if start.blocks.problem.nodes <= SLOW][:POOL]
        budget = self.budget
        while pool and not budget.over and not self.proved:
            for start in pool:
                if not budget.over:
                    self._turn(start, budget.slice(len(pool)))
            pool.sort(key=lambda start: start.value)
            del pool[max(1, len(pool) - 1) :]
            pool = [start for start in pool if self._open(start.blocks.problem)]

    def _open(self, problem: Problem) -> bool:
        """Whether the placement could still give something better."""
        return self.best is None or self.bounds[problem] < self.best[0] - EPS

    def _turn(self, start: PairStart, moves: int) -> None:
        budget, before, problem = self.budget, self.budget.used, start.blocks.problem

        def carry_on(rows: Rows, value: float, done: int) -> bool:
            budget.used = before + done
            self._take_rows(value, start.origin, start.blocks, rows)
            self._tell()
            return budget.in_time()

        if start.trail is None:
            start.trail = PairTrail(start.blocks, start.rows, self.random)
        start.trail.walk(moves, self.bounds[problem], carry_on)
        start.value = start.trail.value


def _families(problem: Problem) -> Iterator[Schedule]:
    """Those that the other search starts from; at large sizes, where these are few, those with pairs as well."""
    yield from family_schedules(problem.placement, problem.microbatches, problem.costs, problem.room)
    if problem.nodes <= SLOW:
        return
    for name in PAIRED:
        chunks = problem.stages // problem.ranks if name == "interleaved-overlap" else None
        try:
            schedule = build(name, problem.ranks, problem.microbatches, chunks)
        except PipeloomError:
            continue
        if schedule.placement == problem.placement:
            yield schedule
