"""What actions and hops took, read off measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pipeloom.schedule import Costs, Schedule, Timeline
from pipeloom.schedule.model import parts


def costs_of(timelines: Sequence[Timeline]) -> Costs:
    """Stage costs and the hop of some measured steps, in seconds: over the steps, the median of each one's mean.

    The hop is the median of those that a rank waited for; 0 where none did.
    """
    stages = timelines[0].schedule.stages

    def middle(name: str) -> tuple[float, ...]:
        rows = [timeline.costs.per_stage(name, stages) for timeline in timelines]
        return tuple(median(column) for column in zip(*rows, strict=True))

    waited = [seconds for t in timelines for seconds in hops(t.schedule, t.starts, t.ends)]
    return Costs(
        forward=middle("forward"),
        input_grad=middle("input_grad"),
        weight_grad=middle("weight_grad"),
        backward=middle("backward") if all(t.costs.backward is not None for t in timelines) else None,
        p2p=max(0.0, median(waited)) if waited else 0.0,
    )


def hops(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[float]:
    """From the end of an action to the start of the one on another rank that was waiting for its message."""
    route = schedule.routes[0]
    places = {
        ("F" if action.kind == "F" else "I", action.stage, action.microbatch): (rank, at)
        for rank, program in enumerate(schedule.programs)
        for at, cell in enumerate(program)
        for action in parts(cell)
        if action.kind != "W"
    }
    needed: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for (kind, stage, microbatch), (rank, at) in places.items():
        position = route.index(stage) + (-1 if kind == "F" else 1) if stage in route else -1
        if 0 <= position < len(route):
            source, entry = places[kind, route[position], microbatch]
            needed.setdefault((rank, at), []).append((ends[source][entry], source))
    found = []
    for (rank, at), messages in needed.items():
        end, source = max(messages)  # a pair waits for the later of its two
        if at and source != rank and end > ends[rank][at - 1]:
            found.append(starts[rank][at] - end)
    return found
