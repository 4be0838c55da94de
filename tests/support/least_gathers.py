"""The fewest gathers of parameters by a flow of least cost, where `shard` keeps the stage that is used soonest."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.schedule import Schedule
from pipeloom.schedule.sharding import StageSet, uses_of_parameters


def least_gathers(schedule: Schedule, slots: int, for_torch: bool = False) -> tuple[int, ...]:
    """rank -> a number of gathers below which no order of UNSHARD and RESHARD with `slots` slots runs its program.

    Each gap between two uses of a stage that a slot bridges saves one gather. The most that `slots` can bridge is a flow of least
    cost through the program: a unit is a slot, which bridges gaps one after the other (Arkin and Silverberg, Scheduling jobs with
    fixed start and end times, 1987).
    """
    return tuple(_least([stages for _, stages in uses_of_parameters(p, for_torch)], slots) for p in schedule.programs)


def _least(requests: Sequence[StageSet], slots: int) -> int:
    """Return the number of uses less those that directly follow another, less the most gaps that slots can bridge."""
    least, last = 0, dict[int, int]()
    arcs: list[list[int]] = []  # tail, head, capacity, cost; an arc and its reverse are neighbours
    out: list[list[int]] = [[] for _ in range(len(requests) + 1)]

    def arc(tail: int, head: int, capacity: int, cost: int) -> None:
        for row in ([tail, head, capacity, cost], [head, tail, 0, -cost]):
            out[row[0]].append(len(arcs))
            arcs.append(row)

    for at, stages in enumerate(requests):
        arc(at, at + 1, slots, 0)
        if len(stages) > 1:
            arc(at, at + 1, len(stages) - 1, -len(requests) * slots)  # held by the entry itself, whatever else is
        for stage in stages:
            before = last.get(stage)
            if before is None or before + 1 < at:
                least += 1
            if before is not None and before + 1 < at:
                arc(before + 1, at, 1, -1)
            last[stage] = at
    for _ in range(slots - 1):
        least += _augmented(arcs, out, len(requests) * slots)
    return least


def _augmented(arcs: list[list[int]], out: list[list[int]], large: int) -> int:
    """Send one unit more on the cheapest way from the first node to the last; return its cost without those of `large`."""
    best, by, queue = [0] + [10**9] * (len(out) - 1), [-1] * len(out), [0]
    queued = {0}
    for node in queue:  # Bellman and Ford's, as a queue that grows
        queued.discard(node)
        for number in out[node]:
            _, head, capacity, cost = arcs[number]
            if capacity and best[node] + cost < best[head]:
                best[head], by[head] = best[node] + cost, number
                if head not in queued:
                    queued.add(head)
                    queue.append(head)
    node, total = len(out) - 1, 0
    while node:
        number = by[node]
        arcs[number][2] -= 1
        arcs[number ^ 1][2] += 1
        cost = arcs[number][3]
        total += cost if abs(cost) < large else 0
        node = arcs[number][0]
    return total
