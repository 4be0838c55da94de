"""`search` for a limit in bytes of each device: one search for each placement, since what stands on its ranks differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs
from pipeloom.schedule.costs import activation_limit
from pipeloom.solver.search import SearchResult, placements_of, search


def search_in_bytes(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float,
    *,
    chunks: int | None = None,
    placement: str | Sequence[int] | None = None,
    time_limit: float | None = None,
    **options: Any,
) -> SearchResult:
    """Return the best schedule found that fits `memory` bytes on each device, with what `Costs.bytes` says stands there.

    Args:
        costs: with bytes; `Costs.recompute` and `Costs.host_bandwidth` allow recomputation and copies to host memory.
        time_limit: longest search of all placements together, in seconds.
        options: as for `search`; a number of moves is for each placement.

    Raises UsageError for costs without bytes, and as `search`; CapacityError if nothing fits on any placement.
    """
    places = placements_of(ranks, chunks, placement)
    results: list[SearchResult] = []
    refusals: list[CapacityError] = []
    share = None if time_limit is None else time_limit / len(places)
    for place in places:
        try:
            values, limits = activation_limit(costs, memory, place)
            results.append(search(ranks, microbatches, values, limits, placement=place, time_limit=share, **options))
        except CapacityError as error:
            refusals.append(error)
        if results and results[-1].interrupted:
            break
    if not results:
        raise refusals[0]
    best = min(results, key=lambda result: result.value)
    bound = min(result.lower_bound for result in results)
    return replace(
        best,
        lower_bound=bound,
        proved=best.proved and best.value <= bound,
        iterations=sum(result.iterations for result in results),
        seconds=sum(result.seconds for result in results),
        interrupted=results[-1].interrupted,
    )
