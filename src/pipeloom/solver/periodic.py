"""Periodic schedules: the sequence that each rank repeats in every period, and the initiation interval that results.

In period k a rank runs each of its nodes once; node (operation type, j) then handles micro-batch (k + shift) D + j, where D
micro-batches make a period. With e(v) the end of node v for the micro-batches of period 0 and L the initiation interval, the
length of a period,

    e(v) >= e(before v on its rank) - L height + time(v)        e(v) >= e(need of v) + hop + time(v)

where height is by how many periods the micro-batch of v is ahead of that of the node before it. L is the largest ratio of time to
height over the cycles of this graph (a maximum cycle ratio: Baccelli et al., Synchronization and Linearity, chapter 3).

Periodic schedules come from modulo scheduling, as compilers do it for loops (Rau 1994: the actions of one micro-batch are placed
in turn, each in the first gap of its rank's period), and from parts of other sequences that hold every operation type equally
often. A part that is repeated gives sequences for many micro-batches from those for a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families.construct.steady import balanced_windows, extended
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


class _Table:
    """The busy stretches of one rank's period, as (start, end); starts lie in [0, interval), ends may lie beyond."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.busy: list[tuple[float, float]] = []

    def take(self, ready: float, time: float) -> float:
        """Reserve `time` from the first start at or after `ready` at which it fits, else from the start of the longest gap.

        Returns the start.
        """
        interval = self.interval
        if not self.busy:
            start = ready
        else:
            best, longest, start = math.inf, -1.0, ready
            stretches = self.busy
            for at, (_, end) in enumerate(stretches):
                following = stretches[at + 1][0] if at + 1 < len(stretches) else stretches[0][0] + interval
                gap = following - end
                first = ready + (end - ready) % interval  # the gap's next start
                if first - interval + gap >= ready + time - TIME_TOLERANCE:
                    first = ready  # `ready` lies in the gap, and enough of the gap follows it
                if gap >= time - TIME_TOLERANCE:
                    best = min(best, first)
                elif gap > longest:
                    longest, start = gap, first
            if best < math.inf:
                start = best
        phase = start % interval
        self.busy.append((phase, phase + time))
        self.busy.sort()
        return start


def modulo_packed(instance: Instance, interval: float, adjacent: bool = False) -> PeriodicSchedule:
    """Return the periodic schedule that packs all actions of a micro-batch into a period of `interval`.

    The interval that results may be longer, and its memory may exceed the limit. `adjacent`: a gap must hold an input gradient
    and its weight gradient together.
    """
    table = instance.table
    count = instance.stages
    parts = [_Table(interval) for _ in range(instance.ranks)]
    start = [0.0] * table.none
    clock = 0.0
    for node in [*range(count), *range(2 * count - 1, count - 1, -1)]:
        time = table.time[node]
        gap_needed = time + table.time[node + count] if adjacent and node >= count else time
        home = table.rank[node]
        if node:
            clock += table.hop[node]
        start[node] = clock = parts[home].take(clock, gap_needed)
        clock += time
        if adjacent and node >= count:
            start[node + count] = clock
    if not adjacent:
        for node in sorted(range(count, 2 * count), key=start.__getitem__):
            start[node + count] = parts[table.rank[node]].take(start[node] + table.time[node], table.time[node + count])
    sequences: list[list[int]] = [[] for _ in range(instance.ranks)]
    for node in range(table.none):
        sequences[table.rank[node]].append(node)
    for sequence in sequences:
        sequence.sort(key=lambda node: (start[node] % interval, node))
    return PeriodicSchedule(instance, sequences, [-math.floor(value / interval) for value in start])


# Choice of the parts of a schedule that are tried for repetition.
# The most micro-batches of a part, and the most nodes for which its interval is computed: longer parts repeat
# more schedules, and cost more to measure.
LONGEST_REPEATED = 12
MOST_MEASURED_NODES = 5000
# A part within this factor of its busiest rank's work is taken at once: no other can gain more.
CLOSE_TO_WORK = 1.01


def repeat_period(small: Instance, sequences: Sequences, instance: Instance) -> Sequences | None:
    """Return `sequences` of `small` extended to all micro-batches of `instance`; None if no stretch of them can be repeated
    within the memory limit.

    Of the stretches tried, the one whose repetition takes the least time per micro-batch is used.
    """
    p, missing = instance.ranks, instance.microbatches - small.microbatches
    shortest, least = None, float("inf")
    for per_period in range(
        1, min(LONGEST_REPEATED, MOST_MEASURED_NODES // (3 * instance.stages), small.microbatches // 2) + 1
    ):
        if missing % per_period:
            continue
        part = periodic_part(small, sequences, per_period)
        if part is None or not part.fits or not part.measure(least * per_period):
            continue
        if part.interval / per_period < least - TIME_TOLERANCE:
            shortest, least = per_period, part.interval / per_period
        if part.interval <= CLOSE_TO_WORK * part.work:
            return with_repeated_part(small, sequences, per_period, instance)
    if (
        missing % p == 0 and 2 * p <= small.microbatches
    ):  # a round, as in interleaved schedules; too long to be measured
        part = periodic_part(small, sequences, p)
        if part is not None and part.fits:
            return with_repeated_part(small, sequences, p, instance)
    return None if shortest is None else with_repeated_part(small, sequences, shortest, instance)


def periodic_part(instance: Instance, sequences: Sequences, per_period: int) -> PeriodicSchedule | None:
    """Return the middle part of the sequences with every operation type `per_period` times; None if there is none."""
    m = instance.microbatches
    part = replace(instance.even, microbatches=per_period)
    shift = [0] * part.table.none
    part_sequences = []
    for sequence in sequences:
        first = balanced_window([node // m for node in sequence], per_period)
        if first is None:
            return None
        line = []
        for node in sequence[first : first + per_period * (len(sequence) // m)]:
            operation_type, microbatch = divmod(node, m)
            node_of_period = operation_type * per_period + microbatch % per_period
            shift[node_of_period] = microbatch // per_period
            line.append(node_of_period)
        part_sequences.append(line)
    return PeriodicSchedule(part, part_sequences, shift)


def with_repeated_part(small: Instance, sequences: Sequences, per_period: int, instance: Instance) -> Sequences | None:
    """Return `sequences` of `small`, with a stretch of `per_period` micro-batches repeated to give as many as `instance` has.

    None if a rank has no such stretch. The number of missing micro-batches must be a multiple of `per_period`. The operations
    before and after the stretch stay, so the result may be longer or hold more memory than expected: the caller checks.
    """
    m, more = small.microbatches, (instance.microbatches - small.microbatches) // per_period
    result = []
    for sequence in sequences:
        operation_types = [node // m for node in sequence]
        first = balanced_window(operation_types, per_period)
        if first is None:
            return None
        window = first, first + per_period * (len(sequence) // m)
        result.append(extended(operation_types, window, more, instance.microbatches))
    return result


def balanced_window(operation_types: Sequence[int], times: int) -> int | None:
    """Return the start of the window nearest to the middle with every operation type `times` times; None if there is none."""
    windows = balanced_windows(operation_types, times)
    starts = (at for at, balanced in enumerate(windows) if balanced)
    return min(starts, key=lambda at: abs(2 * at - len(windows) + 1), default=None)
