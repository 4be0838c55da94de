"""Periodic schedules as warm starts: modulo scheduling, as compilers do it for loops (Rau 1994).

The actions of one micro-batch are placed in turn, each in the first gap of its rank's period.
"""

from __future__ import annotations

import math

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.cyclic.period import PeriodicSchedule
from pipeloom.solver.instance import Instance


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
