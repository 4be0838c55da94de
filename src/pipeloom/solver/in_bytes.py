"""`search` for a limit in bytes of each device: one search for each placement, since what stands on its ranks differs, and for
cuts of the model into stages that differ by one layer from the best one so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import TIME_TOLERANCE, activation_limit
from pipeloom.solver.instance import Instance
from pipeloom.solver.memory import per_rank_limits
from pipeloom.solver.recompute import bound_with_recomputation
from pipeloom.solver.search import SearchResult, fullest, placements_of, search

# Seconds of all searches over cuts without a limit, and into how many each is divided: more reach cuts further away, shorter.
CUTS_SECONDS, CUTS_SEARCHES = 30.0, 8


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
    bounds: list[float] = []
    objective = options.get("objective", "makespan")
    share = None if time_limit is None else time_limit / len(places)
    for place in places:
        try:
            values, limits = activation_limit(costs, memory, place)
        except CapacityError as error:
            refusals.append(error)
            continue
        try:
            results.append(search(ranks, microbatches, values, limits, placement=place, time_limit=share, **options))
            bounds.append(results[-1].lower_bound)
        except CapacityError:
            instance = _instance(values, limits, place, microbatches, objective)
            rank, filled = fullest(instance)
            refusals.append(
                CapacityError(
                    f"memory is {size_words(memory)}; no schedule was found that fits it: beside weights, gradients and what a "
                    f"backward needs, rank {rank} has {size_words(limits[rank])}, and one micro-batch in all of its stages takes "
                    f"{size_words(filled * limits[rank])}"
                )
            )
            bounds.append(bound_with_recomputation(instance))
        if results and results[-1].interrupted:
            break
    if not results:
        raise refusals[0]
    best = min(results, key=lambda result: result.value)
    bound = min(bounds)
    return replace(
        best,
        lower_bound=bound,
        proved=best.proved and best.value <= bound,
        iterations=sum(result.iterations for result in results),
        seconds=sum(result.seconds for result in results),
        interrupted=results[-1].interrupted,
        limit=memory,
    )


def search_cuts_in_bytes(
    cut: Sequence[int],
    costs_of: Callable[[tuple[int, ...]], Costs],
    ranks: int,
    microbatches: int,
    memory: float,
    *,
    time_limit: float | None = None,
    **options: Any,
) -> tuple[tuple[int, ...], SearchResult]:
    """Return a cut of the model into stages, and the best schedule found for it within `memory` bytes on each device.

    From `cut` on, one layer at a time moves to a neighbouring stage as long as that gains. What is left of the time goes to the
    best cut.

    Args:
        cut: stage -> its layers.
        costs_of: the costs of a cut's stages, with bytes.
        time_limit: longest search of all cuts together, in seconds.
        options: as for `search_in_bytes`.

    Raises as `search_in_bytes`, CapacityError if nothing fits any of the cuts.
    """
    seconds = CUTS_SECONDS if time_limit is None else time_limit
    begun = time.monotonic()
    places = placements_of(ranks, options.get("chunks"), options.get("placement"))
    objective = options.get("objective", "makespan")
    best: tuple[tuple[int, ...], SearchResult] | None = None
    refusal: CapacityError | None = None
    waiting, seen = [tuple(cut)], {tuple(cut)}
    while waiting and (best is None or time.monotonic() - begun < seconds * (1 - 1 / CUTS_SEARCHES)):
        bounds = {each: _bound(costs_of(each), memory, places, microbatches, objective) for each in waiting}
        waiting = [each for each in waiting if best is None or bounds[each] < best[1].value - TIME_TOLERANCE]
        if not waiting:
            break
        now = min(waiting, key=bounds.__getitem__)
        waiting.remove(now)
        try:
            result = search_in_bytes(
                ranks, microbatches, costs_of(now), memory, time_limit=seconds / CUTS_SEARCHES, **options
            )
        except CapacityError as error:
            refusal = refusal or error
            result = None
        if best is None or (result is not None and result.value < best[1].value - TIME_TOLERANCE):
            waiting += [each for each in _neighbours(now) if each not in seen]
            seen.update(waiting)
            best = best if result is None else (now, result)
        if result is not None and result.interrupted:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    now, result = best
    left = seconds - (time.monotonic() - begun)
    if left > 0 and not (result.proved or result.interrupted):
        settings = options | {"placement": result.schedule.placement, "chunks": None}
        longer = search_in_bytes(
            ranks, microbatches, costs_of(now), memory, start=result.schedule, time_limit=left, **settings
        )
        result = min(result, longer, key=lambda each: each.value)
    return now, replace(result, seconds=time.monotonic() - begun)


def _bound(costs: Costs, memory: float, places: Sequence[Sequence[int]], microbatches: int, objective: Any) -> float:
    """Return a lower bound on schedules within `memory` bytes on any of the placements; infinite where none fits."""
    least = math.inf
    for place in map(tuple, places):
        try:
            values, limits = activation_limit(costs, memory, place)
        except CapacityError:
            continue
        least = min(least, bound_with_recomputation(_instance(values, limits, place, microbatches, objective)))
    return least


def _instance(
    costs: Costs, limits: Sequence[float], place: tuple[int, ...], microbatches: int, objective: Any
) -> Instance:
    return Instance(place, microbatches, per_rank_limits(place, costs, limits), max(limits), objective)


def _neighbours(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one layer moved between neighbouring stages, each of which has at least one."""
    for at in range(len(cut) - 1):
        for first in (1, -1):
            moved = [*cut]
            moved[at] += first
            moved[at + 1] -= first
            if min(moved) > 0:
                yield tuple(moved)
