"""The critical path: the chain of entries, each of which had to wait for the one before it, that sets the makespan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.schedule.graph import Graph

if TYPE_CHECKING:
    from pipeloom.schedule.timeline import Timeline


def critical_path(timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """See `Timeline.critical_path`. Linear in the number of entries, once."""
    schedule = timeline.schedule
    graph = Graph.of(schedule)
    factors = timeline.costs.factors(schedule.microbatches)
    entries = [schedule.split_entries(rank) for rank in range(schedule.ranks)]
    maker: dict[int, tuple[int, int]] = {}
    none = schedule.no_action
    for rank, (firsts, seconds) in enumerate(entries):
        for codes in (firsts, seconds):
            for at, code in enumerate(codes):
                if code != none:
                    maker[graph.event[code] if graph.event is not None else code] = rank, at
    _, rank, at = max((ends[-1], rank, len(ends) - 1) for rank, ends in enumerate(timeline.ends) if ends)
    path = [(rank, at)]
    while True:
        candidates = []
        for code in (entries[rank][0][at], entries[rank][1][at]):
            made = maker.get(graph.needs[code]) if code != none else None
            if made is not None:
                source, position = made
                arrival = timeline.ends[source][position]
                if timeline.overlap_p2p:  # else the hop comes after whatever was waited for
                    arrival += timeline.costs.hop(source, rank, factors[code % schedule.microbatches])
                candidates.append((arrival, source != rank, made))
        if at:
            candidates.append((timeline.ends[rank][at - 1], False, (rank, at - 1)))
        if not candidates:
            return tuple(reversed(path))
        rank, at = max(candidates)[2]
        path.append((rank, at))
