"""How many messages a schedule sends between ranks in a step, from its placement and routes alone."""

from __future__ import annotations

from collections import Counter

from pipeloom.schedule.channels import Channel, NamedEdges
from pipeloom.schedule.model import Schedule


def message_counts(schedule: Schedule) -> dict[Channel, int]:
    """channel -> messages of one step, sorted. A hop within a rank is no message."""
    taken = Counter(schedule.route_of)
    counts: Counter[Channel] = Counter()
    for index, route in enumerate(schedule.routes):
        for stage, following in zip(route, route[1:], strict=False):
            here, there = schedule.placement[stage], schedule.placement[following]
            if here != there and taken[index]:
                counts[Channel(here, there, "activation")] += taken[index]
                counts[Channel(there, here, "gradient")] += taken[index]
    for edges in NamedEdges.of(schedule).writes:
        for stage, following, _ in edges:
            here, there = schedule.placement[stage], schedule.placement[following]
            index = next(at for at, route in enumerate(schedule.routes) if stage in route)
            if here != there and taken[index]:
                counts[Channel(here, there, "activation")] += taken[index]
                counts[Channel(there, here, "gradient")] += taken[index]
    return dict(sorted(counts.items()))
