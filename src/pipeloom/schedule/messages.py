"""Number and size of the messages that a schedule sends between ranks in a step, from its placement and routes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeloom.schedule.actions import OUTPUT
from pipeloom.schedule.channels import Channel, NamedEdges
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule


def message_counts(schedule: Schedule) -> dict[Channel, int]:
    """channel -> the number of its messages in one step, sorted. A hop within a rank is not a message."""
    microbatches_of_route = Counter(schedule.route_of)
    counts: Counter[Channel] = Counter()
    for channel, index, _ in _hops(schedule):
        counts[channel] += microbatches_of_route[index]
    return dict(sorted(counts.items()))


def message_sizes(schedule: Schedule, costs: Costs) -> dict[Channel, float]:
    """channel -> the total size of its messages in one step, in the unit of `Costs.message`, sorted."""
    factor_of_route = [0.0] * len(schedule.routes)
    for index, factor in zip(schedule.route_of, costs.factors(schedule.microbatches), strict=True):
        factor_of_route[index] += factor
    sizes: dict[Channel, float] = {}
    for channel, index, name in _hops(schedule):
        sizes[channel] = sizes.get(channel, 0.0) + factor_of_route[index] * costs.size_of(name)
    return dict(sorted(sizes.items()))


def _hops(schedule: Schedule) -> Iterator[tuple[Channel, int, str]]:
    """(channel, route, name) of each message of a micro-batch on a route; a gradient has the name of its tensor."""
    microbatches_of_route = Counter(schedule.route_of)
    hops = [(*hop, OUTPUT) for route in schedule.routes for hop in zip(route, route[1:], strict=False)]
    hops += [hop for edges in NamedEdges.of(schedule).writes for hop in edges]
    route_of = {stage: index for index, route in enumerate(schedule.routes) for stage in route}
    for stage, following, name in hops:
        here, there, index = schedule.placement[stage], schedule.placement[following], route_of[stage]
        if here != there and microbatches_of_route[index]:
            yield Channel(here, there, "activation"), index, name
            yield Channel(there, here, "gradient"), index, name


def size_words(count: float) -> str:
    """A number of bytes, as people write it: "1.5 MiB"."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
