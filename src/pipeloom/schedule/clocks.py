"""Measured times on clocks that do not agree: shifted so that no message arrives before it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pipeloom.errors import ScheduleError
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.measured import measured_costs
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.timeline import Timeline

TimeRows = Sequence[Sequence[float]]

# Two events of one rank may overlap by this share of the shorter one: timers of two streams differ a little.
_OVERLAP = 0.02


def needs(schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, entry) of the producer and of the receiver of each message, four numbers in all; also within a rank."""
    graph = Graph.of(schedule, full=True)
    assert graph.event is not None
    entries = [schedule.split_entries(rank) for rank in range(schedule.ranks)]
    maker = {
        graph.event[code]: (rank, at)
        for rank, both in enumerate(entries)
        for codes in both
        for at, code in enumerate(codes)
    }
    for rank, both in enumerate(entries):
        for codes in both:
            for at, code in enumerate(codes):
                source = maker.get(graph.needs[code]) if graph.needs[code] < graph.always else None
                if source is not None:
                    yield (*source, rank, at)


def offsets(schedule: Schedule, starts: TimeRows, ends: TimeRows) -> tuple[list[float], float]:
    """Return (rank -> seconds to add to its clock, the most by which a message still arrives before it is sent).

    The shifts are the smallest from 0 on with which no message arrives before it is sent, as longest paths over the ranks
    (Bellman and Ford). They are needed because each rank's clock begins with its own iteration.
    """
    bound: dict[tuple[int, int], float] = {}
    for source, at_source, rank, at in needs(schedule):
        if source != rank:
            late = ends[source][at_source] - starts[rank][at]
            bound[source, rank] = max(late, bound.get((source, rank), late))
    shifts = [0.0] * schedule.ranks
    for _ in range(schedule.ranks):
        for (source, rank), late in bound.items():
            shifts[rank] = max(shifts[rank], shifts[source] + late)
    left = max((shifts[source] + late - shifts[rank] for (source, rank), late in bound.items()), default=0.0)
    return shifts, max(0.0, left)


def aligned(schedule: Schedule, starts: TimeRows, ends: TimeRows) -> Timeline:
    """Return the timeline with the ranks' clocks aligned; its times count from its first action.

    Raises ScheduleError where two entries of a rank overlap: a rank runs one at a time.
    """
    starts = [_in_turn(schedule, rank, row, ends[rank]) for rank, row in enumerate(starts)]
    shifts, _ = offsets(schedule, starts, ends)
    origin = min(row[0] + shift for row, shift in zip(starts, shifts, strict=True) if row)

    def shifted(times: TimeRows) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time + shift - origin for time in row) for row, shift in zip(times, shifts, strict=True))

    begins, stops = shifted(starts), shifted(ends)
    turns: list[Mapping[int, float]] = [
        {at: (begins[rank][at] + stops[rank][at]) / 2 for at, cell in enumerate(program) if len(parts(cell)) > 1}
        for rank, program in enumerate(schedule.programs)
    ]
    return Timeline(schedule, measured_costs(schedule, begins, stops, turns), begins, stops, source="measured")


def _in_turn(schedule: Schedule, rank: int, starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """The starts, each no earlier than the end of the entry before."""
    turns = list(starts)
    program = schedule.programs[rank]
    for before, at in pairwise(range(len(turns))):
        late = ends[before] - turns[at]
        if late > _OVERLAP * min(ends[before] - turns[before], ends[at] - starts[at]) + 1e-9:
            raise ScheduleError(
                f"rank {rank} begins {program[at]} {late * 1e3:.4g} ms before {program[before]} ends; a rank runs one at a time"
            )
        turns[at] = min(max(turns[at], ends[before]), ends[at])
    return turns
