"""Simulated annealing (Kirkpatrick et al. 1983) of a periodic schedule: moves along the cycle that sets its initiation
interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.cyclic.period import PeriodicSchedule


@dataclass(frozen=True)
class AnnealingParameters:
    """The constants of simulated annealing; times are shares of the busiest rank's work in one period."""

    # Moves of one run: longer runs cool slower and find shorter periods, but there are fewer of them.
    steps: int = 3000
    # Initial temperatures, drawn at random: a high one leaves the warm start, a low one refines it.
    initial_temperatures: tuple[float, ...] = (0.03, 0.1, 0.2)
    # Final temperature: small enough that no worse move is accepted at the end.
    final_temperature: float = 0.0005
    # The share of moves on the critical cycle. Only these can shorten the period, but the others open the way to them.
    critical_share: float = 0.6
    # Time that a unit of memory above the limit costs: low enough to pass through infeasible schedules, high enough to return.
    memory_penalty: float = 0.3
    # Moves between two polls of the clock.
    poll_interval: int = 16


ANNEALING = AnnealingParameters()


def critical_blocks_of(cyclic: PeriodicSchedule) -> list[list[int]]:
    """Return the runs of two or more nodes of the critical cycle that lie on one rank; empty if the whole cycle lies on one."""
    critical, rank = cyclic.critical, cyclic.instance.table.rank
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


class AnnealingRun:
    """An annealed walk through periodic schedules; memory violations are penalised in the objective.

    Attributes:
        now: the current schedule.
        best: (sequences, shift) of the shortest period that fits the memory limit.
        interval: the length of that period.
        over: the memory of `now` above the limit, summed over the ranks.
    """

    def __init__(self, start: PeriodicSchedule, random: Random, initial_temperature: float) -> None:
        self.now, self.random, self.initial_temperature = start, random, initial_temperature
        self.interval = start.interval
        self.best = [list(sequence) for sequence in start.sequences], list(start.shift)
        self.excess = [
            max(0.0, start.peak(rank) - start.instance.memory_limit - TIME_TOLERANCE)
            for rank in range(start.instance.ranks)
        ]
        self.penalty = ANNEALING.memory_penalty * start.work

    @property
    def over(self) -> float:
        return sum(self.excess)

    def run(self, steps: int, goal: float, carry_on: Callable[[int], bool] = lambda done: True) -> None:
        """Make `steps` moves at falling temperature; stop early at interval `goal`, or if `carry_on(moves made)` is false."""
        random, now, initial_temperature = self.random, self.now, self.initial_temperature
        for step in range(steps):
            if self.interval <= goal + TIME_TOLERANCE or (step % ANNEALING.poll_interval == 0 and not carry_on(step)):
                return
            temperature = (
                now.work * initial_temperature * (ANNEALING.final_temperature / initial_temperature) ** (step / steps)
            )
            self._iterate(now.interval + self.penalty * self.over - temperature * math.log(1.0 - random.random()))

    def _iterate(self, most: float) -> None:
        """Make a random move; undo it unless the interval plus the penalty for memory above the limit is at most `most`."""
        now, random = self.now, self.random
        runs = critical_blocks_of(now) if random.random() < ANNEALING.critical_share else []
        run = random.choice(runs) if runs else []
        rank = now.instance.table.rank[run[0]] if run else random.randrange(now.instance.ranks)
        before = list(now.sequences[rank]), list(now.shift), self.excess[rank]
        state = now.end, now.order, now.critical, now.interval
        if self._move(run, rank) if run else self._swap(rank, random.choice(now.sequences[rank])):
            self.excess[rank] = max(0.0, now.peak(rank) - now.instance.memory_limit - TIME_TOLERANCE)
            left = most - self.penalty * self.over
            if left >= now.work:
                now.link(rank)
                now.end, now.order = list(now.end), list(now.order)
                if now.measure(left):
                    if now.interval < self.interval - TIME_TOLERANCE and not self.over:
                        self.interval = now.interval
                        self.best = [list(sequence) for sequence in now.sequences], list(now.shift)
                    return
        now.sequences[rank], now.shift, self.excess[rank] = before
        now.link(rank)
        now.end, now.order, now.critical, now.interval = state

    def _move(self, run: list[int], rank: int) -> bool:
        """Swap the first or last two nodes of a run, or move a node to its front or end; false if that is not allowed."""
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
        """Swap `node` with the node after it; false if that is not allowed."""
        now = self.now
        sequence, shift, table = now.sequences[rank], now.shift, now.instance.table
        at = sequence.index(node)
        if at == len(sequence) - 1:
            first = sequence.pop(0)  # the same cyclic sequence, cut one node later
            shift[first] += 1
            sequence.append(first)
            at -= 1
        other = sequence[at + 1]
        if node // table.microbatches == other // table.microbatches:
            return False
        if shift[node] == shift[other] and (table.weight_grad_of[node] == other or table.predecessor[other] == node):
            return False
        sequence[at], sequence[at + 1] = other, node
        return True
