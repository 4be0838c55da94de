"""How many messages a schedule sends between ranks in a step, from its placement and routes alone."""

from __future__ import annotations

from collections import Counter

from pipeloom.schedule.channels import Channel, NamedEdges
from pipeloom.schedule.model import Schedule


def message_counts(schedule: Schedule) -> dict[Channel, int]:
    """channel -> messages of one step, sorted. A hop within a rank is no message."""
    taken = Counter(schedule.route_of)
    counts: Counter[Channel] = Counter()
    hops = [hop for route in schedule.routes for hop in zip(route, route[1:], strict=False)]
    hops += [(stage, following) for edges in NamedEdges.of(schedule).writes for stage, following, _ in edges]
    route_of = {stage: index for index, route in enumerate(schedule.routes) for stage in route}
    for stage, following in hops:
        here, there, index = schedule.placement[stage], schedule.placement[following], route_of[stage]
        if here != there and taken[index]:
            counts[Channel(here, there, "activation")] += taken[index]
            counts[Channel(there, here, "gradient")] += taken[index]
    return dict(sorted(counts.items()))
