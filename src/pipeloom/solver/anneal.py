"""Simulated annealing over cyclic words: shorter periods, move by move along the cycle that sets the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pipeloom.solver.cyclic import Cyclic
from pipeloom.solver.problem import EPS

COLD = 0.0005  # of the period; the heat at the end
CRITICAL = 0.6
PRICE = 0.3


def blocks_of(cyclic: Cyclic) -> list[list[int]]:
    """The runs of the critical cycle that lie on one rank, two nodes or more; none if all of it does."""
    critical, rank = cyclic.critical, cyclic.problem.tables.rank
    breaks = [
        at
        for at, node in enumerate(critical)
        if cyclic.before[node] != critical[at - 1] or rank[critical[at - 1]] != rank[node]
    ]
    runs = []
    for place, at in enumerate(breaks):
        to = breaks[place + 1] if place + 1 < len(breaks) else breaks[0] + len(critical)
        if to - at > 1:
            runs.append([critical[index % len(critical)] for index in range(at, to)])
    return runs


class Walk:
    """An annealed walk through cyclic words; what passes the room is paid for in time.

    Attributes:
        now: where it is.
        best: (words, shift) of the shortest period that fits.
        length: its length.
        over: what `now` is above the room, over all ranks.
    """

    def __init__(self, start: Cyclic, random: Random, hot: float) -> None:
        self.now, self.random, self.hot = start, random, hot
        self.length = start.length
        self.best = [list(row) for row in start.words], list(start.shift)
        self.excess = [max(0.0, start.peak(rank) - start.problem.room - EPS) for rank in range(start.problem.ranks)]
        self.price = PRICE * start.work

    @property
    def over(self) -> float:
        return sum(self.excess)

    def run(self, steps: int, goal: float, carry_on: Callable[[int], bool] = lambda done: True) -> None:
        """`steps` moves, from hot to cold; ends early at a length of `goal` or when `carry_on(moves made)` says no."""
        random, now, hot = self.random, self.now, self.hot
        for step in range(steps):
            if self.length <= goal + EPS or (step % 16 == 0 and not carry_on(step)):
                return
            heat = now.work * hot * (COLD / hot) ** (step / steps)
            self._once(now.length + self.price * self.over - heat * math.log(1.0 - random.random()))

    def _once(self, most: float) -> None:
        """One random move; it stays if the period, and the price of what is above the room, are at most `most` then."""
        now, random = self.now, self.random
        runs = blocks_of(now) if random.random() < CRITICAL else []
        run = random.choice(runs) if runs else []
        rank = now.problem.tables.rank[run[0]] if run else random.randrange(now.problem.ranks)
        before = list(now.words[rank]), list(now.shift), self.excess[rank]
        state = now.end, now.order, now.critical, now.length
        if self._move(run, rank) if run else self._swap(rank, random.choice(now.words[rank])):
            self.excess[rank] = max(0.0, now.peak(rank) - now.problem.room - EPS)
            left = most - self.price * self.over
            if left >= now.work:
                now.link(rank)
                now.end, now.order = list(now.end), list(now.order)
                if now.measure(left):
                    if now.length < self.length - EPS and not self.over:
                        self.length = now.length
                        self.best = [list(row) for row in now.words], list(now.shift)
                    return
        now.words[rank], now.shift, self.excess[rank] = before
        now.link(rank)
        now.end, now.order, now.critical, now.length = state

    def _move(self, run: list[int], rank: int) -> bool:
        """Swaps the first or last two of a run, or takes one of it to the front or the end of it."""
        random = self.random
        kind = random.randrange(4)
        if kind == 0 or len(run) == 2:
            return self._swap(rank, run[0])
        if kind == 1:
            return self._swap(rank, run[-2])
        at = random.randrange(len(run))
        node = run[at]
        if kind == 2:
            return at < len(run) - 1 and all(self._swap(rank, node) for _ in range(len(run) - 1 - at))
        return at > 0 and all(self._swap(rank, other) for other in reversed(run[:at]))

    def _swap(self, rank: int, node: int) -> bool:
        """`node` and the one after it change places, if they may."""
        now = self.now
        row, shift, tables = now.words[rank], now.shift, now.problem.tables
        at = row.index(node)
        if at == len(row) - 1:
            first = row.pop(0)  # the same words, cut one later
            shift[first] += 1
            row.append(first)
            at -= 1
        other = row[at + 1]
        if node // tables.microbatches == other // tables.microbatches:
            return False
        if shift[node] == shift[other] and (tables.own_weight[node] == other or tables.need[other] == node):
            return False
        row[at], row[at + 1] = other, node
        return True
