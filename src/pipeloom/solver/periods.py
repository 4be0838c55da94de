"""One period searched for all: cyclic words are annealed, and unrolled to the words of every micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from pipeloom.solver.anneal import Walk
from pipeloom.solver.cyclic import Cyclic
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.extended import stretch_of
from pipeloom.solver.modulo import packed
from pipeloom.solver.problem import EPS, Problem, Words

STEPS = 3000
HEATS = (0.03, 0.1, 0.2)
KEPT = 6
WIDEST = 8
LONGEST = 24
TRIES, LONGER = 300, 1.02
NODES = 800
CLOSE = 1.004
SLOWEST = 1.15

Snapshot = tuple[float, float, int, Words, list[int]]


class Periods:
    """Cyclic words of one problem, its micro-batches taken as alike, and the best unrolled words that came of them.

    Attributes:
        pool: (value, micro-batches of a period, words, shift), the best first.
        best: the best unrolled words, or None.
        value: theirs.
        work: nodes looked at so far.
    """

    def __init__(self, problem: Problem, random: Random, seeds: Sequence[tuple[Problem, Words]]) -> None:
        self.problem, self.random = problem, random
        self.pool: list[Snapshot] = []
        self.best: Words | None = None
        self.value = math.inf
        self.work = 0
        self.starts = starts_of(problem, seeds)

    def run(self, carry_on: Callable[[], bool]) -> None:
        """Anneals from the starts and from what came of them, until `carry_on()` says no."""
        for start in self.starts:
            self.work += len(start.shift)
            if start.length <= SLOWEST * start.problem.microbatches * self._shortest():
                self._add(start)
            if not carry_on():
                return
        while self.pool and carry_on():
            self._walk(carry_on)

    def _shortest(self) -> float:
        """The least time of one micro-batch so far."""
        return min((length / each for _, length, each, _, _ in self.pool), default=math.inf)

    def _walk(self, carry_on: Callable[[], bool]) -> None:
        random = self.random
        _, _, each, words, shift = self.pool[min(random.randrange(KEPT), random.randrange(len(self.pool)))]
        start = Cyclic(replace(self.problem.even, microbatches=each), words, shift)
        most = min(WIDEST, self.problem.microbatches // 2, NODES // (3 * self.problem.stages)) // each
        if most > 1 and random.random() < 0.5:
            start = widened(start, random.randint(2, most))
        start.measure()
        walk = Walk(start, random, random.choice(HEATS))
        nodes = len(start.shift)

        def look(done: int) -> bool:
            self.work += 16 * nodes
            if (
                self.problem.nodes < 20_000
                and not walk.over
                and start.length <= CLOSE * walk.length
                and random.random() < 0.2
            ):
                self._add(start)
            return carry_on()

        walk.run(STEPS, start.work, look)
        best = Cyclic(start.problem, *walk.best)
        best.length = walk.length
        self._add(best)

    def _add(self, found: Cyclic) -> None:
        """Evaluates what it unrolls to, and keeps it among the best."""
        words = found.unrolled(self.problem)
        self.work += self.problem.nodes
        ended = evaluate(self.problem, words)
        if ended is None or not self.problem.fits(words):
            return
        if ended.value < self.value - EPS:
            self.value, self.best = ended.value, words
        each = found.problem.microbatches
        if all(abs(ended.value - value) > EPS or each != other for value, _, other, _, _ in self.pool):
            self.pool.append((ended.value, found.length, each, [list(row) for row in found.words], list(found.shift)))
            self.pool.sort(key=lambda kept: kept[0])
            del self.pool[KEPT:]


def starts_of(problem: Problem, seeds: Sequence[tuple[Problem, Words]]) -> Iterator[Cyclic]:
    """Cyclic words that fit: packed periods, and stretches of the seeds in which every letter comes equally often."""
    yield from packed_starts(problem)
    for each in range(1, LONGEST + 1):
        for small, words in seeds:
            if 2 * each <= small.microbatches:
                stretch = stretch_of(small, words, each)
                if stretch is not None and stretch.fits and stretch.measure():
                    yield stretch


def packed_starts(problem: Problem) -> Iterator[Cyclic]:
    """The shortest periods, of those tried, that a micro-batch can be packed into within the room."""
    one = replace(problem.even, microbatches=1)
    for fused in (False, True):
        length = packed(one, sum(one.tables.time), fused).work
        for _ in range(TRIES):
            found = packed(one, length, fused)
            if found.fits and found.measure():
                yield found
                break
            length *= LONGER


def widened(cyclic: Cyclic, factor: int) -> Cyclic:
    """The same words, `factor` periods as one."""
    each = cyclic.problem.microbatches
    wide = replace(cyclic.problem, microbatches=each * factor)
    shift = [0] * wide.tables.none
    words = []
    for row in cyclic.words:
        line = []
        for period in range(factor):
            for node in row:
                letter, j = divmod(node, each)
                # the micro-batch that the node handles in this period, over all of them
                ahead, rest = divmod((period + cyclic.shift[node]) * each + j, each * factor)
                own = letter * each * factor + rest
                shift[own] = ahead
                line.append(own)
        words.append(line)
    return Cyclic(wide, words, shift)
