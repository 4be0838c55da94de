"""Periodic schedules as warm starts: modulo scheduling, as compilers do it for loops (Rau 1994).

The actions of one micro-batch are placed in turn, each in the first gap of its rank's period.
"""

from __future__ import annotations

import math

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.cyclic.period import PeriodicSchedule
from pipeloom.solver.instance import Instance


class _Table:
    """The busy stretches of one rank's period, as (start, end) within [0, length)."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.busy: list[tuple[float, float]] = []

    def take(self, ready: float, time: float) -> float:
        """The first start from `ready` on at which `time` fits; where it fits nowhere, the start of the longest gap."""
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
                    first = ready  # it is in the gap now, with enough left of it
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
    """The sequences that come of packing all of a micro-batch into periods of this length; they may hold too much memory.

    `adjacent`: a gap for an input gradient is one for its weight gradient too.
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
