"""Cyclic words to start from: one micro-batch after the other, each action in the first gap of its rank's period.

Modulo scheduling, as compilers do it for loops (Rau 1994).
"""

from __future__ import annotations

import math

from pipeloom.solver.cyclic import Cyclic
from pipeloom.solver.problem import EPS, Problem


class _Table:
    """The busy stretches of one rank's period, as (start, end) within [0, length)."""

    def __init__(self, length: float) -> None:
        self.length = length
        self.busy: list[tuple[float, float]] = []

    def take(self, ready: float, time: float) -> float:
        """The first start from `ready` on at which `time` fits; where it fits nowhere, the start of the longest gap."""
        length = self.length
        if not self.busy:
            start = ready
        else:
            best, longest, start = math.inf, -1.0, ready
            stretches = self.busy
            for at, (_, end) in enumerate(stretches):
                following = stretches[at + 1][0] if at + 1 < len(stretches) else stretches[0][0] + length
                gap = following - end
                first = ready + (end - ready) % length  # the gap's next start
                if first - length + gap >= ready + time - EPS:
                    first = ready  # it is in the gap now, with enough left of it
                if gap >= time - EPS:
                    best = min(best, first)
                elif gap > longest:
                    longest, start = gap, first
            if best < math.inf:
                start = best
        phase = start % length
        self.busy.append((phase, phase + time))
        self.busy.sort()
        return start


def packed(problem: Problem, length: float, fused: bool = False) -> Cyclic:
    """The words that come of packing all of a micro-batch into periods of this length; they may hold too much memory.

    `fused`: a gap for an input gradient is one for its weight gradient too.
    """
    tables = problem.tables
    count = problem.stages
    parts = [_Table(length) for _ in range(problem.ranks)]
    start = [0.0] * tables.none
    clock = 0.0
    for node in [*range(count), *range(2 * count - 1, count - 1, -1)]:
        time = tables.time[node]
        room = time + tables.time[node + count] if fused and node >= count else time
        home = tables.rank[node]
        if node:
            clock += tables.hop[node]
        start[node] = clock = parts[home].take(clock, room)
        clock += time
        if fused and node >= count:
            start[node + count] = clock
    if not fused:
        for node in sorted(range(count, 2 * count), key=start.__getitem__):
            start[node + count] = parts[tables.rank[node]].take(
                start[node] + tables.time[node], tables.time[node + count]
            )
    words: list[list[int]] = [[] for _ in range(problem.ranks)]
    for node in range(tables.none):
        words[tables.rank[node]].append(node)
    for row in words:
        row.sort(key=lambda node: (start[node] % length, node))
    return Cyclic(problem, words, [-math.floor(value / length) for value in start])
