"""Cyclic words: the order in which every rank repeats its work, one period after another, and how long a period takes.

In period k a rank runs each of its nodes once; node (letter, j) then handles micro-batch (k + shift) D + j, where D
micro-batches make a period. With e the end of a node in period 0's micro-batches and L the length of a period,

    e(v) >= e(before v on its rank) - L height + time(v)        e(v) >= e(need of v) + hop + time(v)

where height is how much further the micro-batch of v is than that of the node before it. L is the largest ratio of time to height
over the cycles of this graph (a maximum cycle ratio: Baccelli et al., Synchronization and Linearity, chapter 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeloom.solver.problem import EPS, Problem, Words

MOST = 2000


class Cyclic:
    """Cyclic words of a problem whose `microbatches` make one period.

    Attributes:
        words: rank -> its nodes, in cyclic order.
        shift: node -> periods that it is ahead.
        end: node -> end of it for the micro-batches of period 0, valid after `measure`.
        length: of a period.
        critical: the nodes of a cycle that sets the length, each after the one before it.
    """

    def __init__(self, problem: Problem, words: Words, shift: Sequence[int]) -> None:
        self.problem = problem
        self.words = [list(row) for row in words]
        self.shift = list(shift)
        tables = problem.tables
        self.end = [0.0] * tables.none + [-math.inf]
        self.before = [0] * tables.none
        self.height = [0] * tables.none
        self.length = math.inf
        self.critical: list[int] = []
        self.order = list(range(tables.none))
        for rank in range(problem.ranks):
            self.link(rank)
        self.work = max(sum(tables.time[node] for node in row) for row in self.words)

    def link(self, rank: int) -> None:
        """Sets what comes before each node of `rank`, and by how many periods it is ahead."""
        row, shift = self.words[rank], self.shift
        last = row[-1]
        ahead = shift[last] - 1
        for node in row:
            self.before[node] = last
            self.height[node] = shift[node] - ahead
            last, ahead = node, shift[node]

    def peak(self, rank: int) -> float:
        """The largest memory of `rank` when all periods are full."""
        change, shift, row = self.problem.tables.change, self.shift, self.words[rank]
        level = sum(change[node] * shift[node] for node in row)
        best = level
        for node in row:
            level += change[node]
            if level > best:
                best = level
        return best

    @property
    def fits(self) -> bool:
        room = self.problem.room + EPS
        return all(self.peak(rank) <= room for rank in range(self.problem.ranks))

    def measure(self, most: float = math.inf) -> bool:
        """Finds the length, the ends and a critical cycle; false if words wait for one another, or the length passes `most`.

        False too where that takes too many passes over the nodes.

        Ends are raised along the constraints until they hold; whenever their reasons form a cycle that is slower than the
        length so far, that is the new length.
        """
        tables = self.problem.tables
        time, need, hop = tables.time, tables.need, tables.hop
        end, before, height, order = self.end, self.before, self.height, self.order
        length = self.work
        reason = [tables.none] * tables.none
        self.critical = []
        rounds = 0
        while True:
            changed = False
            for node in order:
                other, sent = before[node], need[node]
                value = end[other] - length * height[node]
                arrival = end[sent] + hop[node]
                if arrival > value:
                    value, other = arrival, sent
                value += time[node]
                if value > end[node] + EPS:
                    end[node] = value
                    reason[node] = other
                    changed = True
            if not changed:
                break
            rounds += 1
            if rounds > MOST:
                return False
            found = self._cycle(reason)
            if found:
                ratio = self._ratio(found)
                if ratio is None or ratio > most:
                    return False
                if ratio > length + EPS:
                    length, self.critical = ratio, found
        self.length = length
        low = min(end[:-1])
        self.end = [value - low for value in end[:-1]] + [-math.inf]
        self.order.sort(key=self.end.__getitem__)
        return True

    def _cycle(self, reason: Sequence[int]) -> list[int]:
        """The slowest cycle that the reasons form, in order; empty if there is none."""
        none = self.problem.tables.none
        seen = [0] * none
        best: list[int] = []
        slowest = -math.inf
        for first in range(none):
            if seen[first]:
                continue
            node, mark = first, first + 1
            while node != none and not seen[node]:
                seen[node] = mark
                node = reason[node]
            if node == none or seen[node] != mark:
                continue
            cycle = [node]
            at = reason[node]
            while at != node:
                cycle.append(at)
                at = reason[at]
            cycle.reverse()
            ratio = self._ratio(cycle)
            if ratio is None:
                return cycle
            if ratio > slowest:
                best, slowest = cycle, ratio
        return best

    def _ratio(self, cycle: Sequence[int]) -> float | None:
        """Time over height of a cycle; None if it never gets ahead."""
        tables = self.problem.tables
        time, periods = 0.0, 0
        last = cycle[-1]
        for node in cycle:
            time += tables.time[node]
            if tables.need[node] == last and not (self.before[node] == last and self.height[node] <= 0):
                time += tables.hop[node]
            else:
                periods += self.height[node]
            last = node
        return time / periods if periods > 0 else None

    def unrolled(self, problem: Problem) -> Words:
        """The words of `problem`, which has all micro-batches: every period of every rank, as far as its micro-batches exist."""
        each, m = self.problem.microbatches, problem.microbatches
        words = []
        for row in self.words:
            ahead = [self.shift[node] for node in row]
            entries = [(node // each * m, node % each, shift) for node, shift in zip(row, ahead, strict=True)]
            line = []
            for period in range(-max(ahead), -(-m // each) - min(ahead)):
                for letter, j, shift in entries:
                    microbatch = (period + shift) * each + j
                    if 0 <= microbatch < m:
                        line.append(letter + microbatch)
            words.append(line)
        return words
