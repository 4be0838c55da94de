"""Periodic schedules: the sequence that each rank repeats in every period, and the initiation interval that results.

In period k a rank runs each of its nodes once; node (operation type, j) then handles micro-batch (k + shift) D + j, where D
micro-batches make a period. With e(v) the end of node v for the micro-batches of period 0 and L the initiation interval, the
length of a period,

    e(v) >= e(before v on its rank) - L height + time(v)        e(v) >= e(need of v) + hop + time(v)

where height is by how many periods the micro-batch of v is ahead of that of the node before it. L is the largest ratio of time to
height over the cycles of this graph (a maximum cycle ratio: Baccelli et al., Synchronization and Linearity, chapter 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.instance import Instance, Sequences

# Passes over the nodes before `measure` gives up: more would measure a few schedules that it now refuses.
MOST_PASSES = 2000


class PeriodicSchedule:
    """A periodic schedule of an instance whose `microbatches` make one period.

    Attributes:
        sequences: rank -> its nodes, in cyclic order.
        shift: node -> the number of periods by which it is ahead.
        end: node -> its end for the micro-batches of period 0, valid after `measure`.
        interval: the length of a period, valid after `measure`.
        critical: the nodes of a cycle that determines the interval, in order; empty if the work of a rank determines it.
    """

    def __init__(self, instance: Instance, sequences: Sequences, shift: Sequence[int]) -> None:
        self.instance = instance
        self.sequences = [list(sequence) for sequence in sequences]
        self.shift = list(shift)
        table = instance.table
        self.end = [0.0] * table.none + [-math.inf]
        self.before = [0] * table.none
        self.height = [0] * table.none
        self.interval = math.inf
        self.critical: list[int] = []
        self.order = list(range(table.none))
        for rank in range(instance.ranks):
            self.link(rank)
        self.work = max(sum(table.time[node] for node in sequence) for sequence in self.sequences)

    def link(self, rank: int) -> None:
        """Set `before` and `height` of each node of `rank`: the previous node, and by how many periods it is ahead of that."""
        sequence, shift = self.sequences[rank], self.shift
        last = sequence[-1]
        ahead = shift[last] - 1
        for node in sequence:
            self.before[node] = last
            self.height[node] = shift[node] - ahead
            last, ahead = node, shift[node]

    def peak(self, rank: int) -> float:
        """Return the peak memory of `rank` when all periods are full."""
        change, shift, sequence = self.instance.table.change, self.shift, self.sequences[rank]
        level = sum(change[node] * shift[node] for node in sequence)
        best = level
        for node in sequence:
            level += change[node]
            if level > best:
                best = level
        return best

    @property
    def fits(self) -> bool:
        memory_limit = self.instance.memory_limit + TIME_TOLERANCE
        return all(self.peak(rank) <= memory_limit for rank in range(self.instance.ranks))

    def measure(self, most: float = math.inf) -> bool:
        """Compute the interval, the ends and a critical cycle.

        Returns False if the sequences wait for one another, the interval exceeds `most`, or it takes too many passes over the
        nodes. Ends are raised along the constraints until all hold. Whenever the constraints that raised them form a cycle whose
        ratio exceeds the interval so far, that ratio becomes the interval.
        """
        table = self.instance.table
        time, predecessor, hop = table.time, table.predecessor, table.hop
        end, before, height, order = self.end, self.before, self.height, self.order
        interval = self.work
        reason = [table.none] * table.none
        self.critical = []
        rounds = 0
        while True:
            changed = False
            for node in order:
                other, sent = before[node], predecessor[node]
                value = end[other] - interval * height[node]
                arrival = end[sent] + hop[node]
                if arrival > value:
                    value, other = arrival, sent
                value += time[node]
                if value > end[node] + TIME_TOLERANCE:
                    end[node] = value
                    reason[node] = other
                    changed = True
            if not changed:
                break
            rounds += 1
            if rounds > MOST_PASSES:
                return False
            cycle = self._cycle(reason)
            if cycle:
                ratio = self._ratio(cycle)
                if ratio is None or ratio > most:
                    return False
                if ratio > interval + TIME_TOLERANCE:
                    interval, self.critical = ratio, cycle
        self.interval = interval
        low = min(end[:-1])
        self.end = [value - low for value in end[:-1]] + [-math.inf]
        self.order.sort(key=self.end.__getitem__)
        return True

    def _cycle(self, reason: Sequence[int]) -> list[int]:
        """Return the slowest cycle that the reasons form, in order; empty if there is none."""
        none = self.instance.table.none
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
        """Return the time of a cycle divided by its height in periods; None if the height is not above 0."""
        table = self.instance.table
        time, periods = 0.0, 0
        last = cycle[-1]
        for node in cycle:
            time += table.time[node]
            if table.predecessor[node] == last and not (self.before[node] == last and self.height[node] <= 0):
                time += table.hop[node]
            else:
                periods += self.height[node]
            last = node
        return time / periods if periods > 0 else None

    def unrolled(self, instance: Instance) -> Sequences:
        """Return the sequences of `instance`, which has all micro-batches: every period of every rank, as far as its
        micro-batches exist.
        """
        per_period, m = self.instance.microbatches, instance.microbatches
        sequences = []
        for sequence in self.sequences:
            ahead = [self.shift[node] for node in sequence]
            entries = [
                (node // per_period * m, node % per_period, shift) for node, shift in zip(sequence, ahead, strict=True)
            ]
            line = []
            for period in range(-max(ahead), -(-m // per_period) - min(ahead)):
                for operation_type, j, shift in entries:
                    microbatch = (period + shift) * per_period + j
                    if 0 <= microbatch < m:
                        line.append(operation_type + microbatch)
            sequences.append(line)
        return sequences
