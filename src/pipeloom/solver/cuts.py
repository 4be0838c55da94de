"""The search for how many layers each stage has, beside the order: cuts by their bounds, the least first, until none can win."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from pipeloom.errors import ArgumentError, CapacityError
from pipeloom.limits import require_at_most
from pipeloom.schedule import Costs
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.construct import cut_costs
from pipeloom.solver.instance import Instance
from pipeloom.solver.recompute import bound_with_recomputation
from pipeloom.solver.search import SearchResult, placements_of, search

# Most cuts whose bounds are computed: each takes about half a millisecond.
MOST_CUTS = 50_000


@dataclass(frozen=True)
class CutResult:
    """Result of `search_cuts`.

    Attributes:
        cut: stage -> its layers.
        costs: of these stages.
        result: of the search with these costs.
        lower_bound: on the objective over all cuts.
        searched: how many cuts were searched; the bounds of all others exceed the result.
        cuts: how many there are.
    """

    cut: tuple[int, ...]
    costs: Costs
    result: SearchResult
    lower_bound: float
    searched: int
    cuts: int


def search_cuts(
    layers: int,
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | None = None,
    *,
    chunks: int = 1,
    placement: str | Sequence[int] | None = None,
    **options: Any,
) -> CutResult:
    """Return the best cut of a model into stages, with the best schedule found for it.

    Cuts are searched in the order of their bounds until the next bound is no less than the best value.

    Args:
        layers: of the model, an embedding and a head included.
        costs: of one layer: a number, or a tuple with one number for each layer.
        memory: as for `search`, one number.
        options: for every `search`, such as `iterations` or `objective`.

    Raises:
        UsageError: fewer layers than stages, more than `MOST_CUTS` cuts, and as `search`.
        CapacityError: no schedule of any cut was found that fits.
    """
    places = placements_of(ranks, chunks, placement)
    stages = len(places[0])
    if layers < stages:
        raise ArgumentError("layers", f" is {layers}, fewer than the {stages} stages; nearest: {stages}")
    count = math.comb(layers - 1, stages - 1)
    require_at_most("cuts", count, MOST_CUTS)
    ordered = []
    for cut in _cuts(layers, stages):
        merged = cut_costs(costs, cut)
        bounds = [
            bound_with_recomputation(
                Instance(place, microbatches, merged, memory or math.inf, options.get("objective", "makespan"))
            )
            for place in places
        ]
        ordered.append((min(bounds), cut, merged))
    ordered.sort(key=lambda one: one[:2])
    best: tuple[float, tuple[int, ...], Costs, SearchResult] | None = None
    least, searched = math.inf, 0
    for bound, cut, merged in ordered:
        if best is not None and bound >= best[0] - TIME_TOLERANCE:
            least = min(least, bound)
            break
        searched += 1
        try:
            result = search(ranks, microbatches, merged, memory, chunks=chunks, placement=placement, **options)
        except CapacityError:
            least = min(least, bound)
            continue
        least = min(least, result.lower_bound)
        if best is None or result.value < best[0] - TIME_TOLERANCE:
            best = result.value, cut, merged, result
    if best is None:
        raise CapacityError(f"memory is {memory:g}; no cut of {layers} layers was found to fit it: give more memory")
    return CutResult(*best[1:], min(least, best[0]), searched, count)


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut so many layers into stages of at least one."""
    for edges in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *edges, layers)))
