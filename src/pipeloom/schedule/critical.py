"""The critical path: the chain of entries, each of which had to wait for the one before it, that sets the makespan."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.model import Schedule


def critical_path(
    schedule: Schedule, costs: Costs, all_ends: Sequence[Sequence[float]], overlap_p2p: bool
) -> tuple[tuple[int, int], ...]:
    """Return the value of `Timeline.critical_path`; `all_ends`: rank -> the ends of its entries. Linear in their number."""
    graph = Graph.of(schedule)
    factors = costs.factors(schedule.microbatches)
    entries = [schedule.split_entries(rank) for rank in range(schedule.ranks)]
    maker: dict[int, tuple[int, int]] = {}
    none = schedule.no_action
    for rank, (firsts, seconds) in enumerate(entries):
        for codes in (firsts, seconds):
            for at, code in enumerate(codes):
                if code != none:
                    maker[graph.event[code] if graph.event is not None else code] = rank, at
    _, rank, at = max((ends[-1], rank, len(ends) - 1) for rank, ends in enumerate(all_ends) if ends)
    path = [(rank, at)]
    while True:
        candidates = []
        for code in (entries[rank][0][at], entries[rank][1][at]):
            for event, name in graph.waits_of(code) if code != none else ():
                if event not in maker:
                    continue
                source, position = maker[event]
                arrival = all_ends[source][position]
                if overlap_p2p:  # otherwise the hop starts when the wait ends
                    arrival += costs.hop(source, rank, factors[code % schedule.microbatches], name)
                candidates.append((arrival, source != rank, maker[event]))
        if at:
            candidates.append((all_ends[rank][at - 1], False, (rank, at - 1)))
        if not candidates:
            return tuple(reversed(path))
        rank, at = max(candidates)[2]
        path.append((rank, at))
