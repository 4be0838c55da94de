"""A schedule searched for a planned layout, on its own placement and within the memory that the family's schedule left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipeloom.errors import CapacityError, UsageError
from pipeloom.plan.predict import LayoutCosts, Planner, built
from pipeloom.schedule.actions import KEPT, PENDING, SAVED
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.slices import by_slices
from pipeloom.solver.order import search_order

REFINED = 3  # layouts for which schedules are searched
_SEARCH_SHARE = 0.4  # of the time; of a large schedule the rest is checked, cut and simulated


def refine(
    planner: Planner, predictions: Sequence[LayoutCosts], memory: float, seconds: float, whole: bool = False
) -> tuple[LayoutCosts, ...]:
    """The predictions with searched schedules in place of those of the first few with a pipeline, the fastest first.

    A schedule stays as it is where the search finds none that is faster in `memory` bytes of each device. The search has
    `seconds` in all; what one layout leaves goes to the next. With `whole` no backward is split.
    """
    # entries of a spread output layer are placed, not searched for
    deep = [each for each in predictions if each.layout.pp > 1 and each.layout.vocabulary == "last"][:REFINED]
    until, better = time.monotonic() + seconds, {}
    for at, prediction in enumerate(deep):
        left = (until - time.monotonic()) / (len(deep) - at)
        # There may be more actions than are searched, or nothing fits but the family's schedule.
        with suppress(UsageError, CapacityError):
            searched = _searched(planner, prediction, memory, max(0.1, _SEARCH_SHARE * left), whole)
            if searched.peak <= memory and searched.tokens > prediction.tokens:
                better[prediction.layout] = searched
    return tuple(sorted((better.get(each.layout, each) for each in predictions), key=lambda each: -each.tokens))


def _searched(planner: Planner, prediction: LayoutCosts, memory: float, seconds: float, whole: bool) -> LayoutCosts:
    """The prediction with the schedule that a search finds in so many seconds.

    Slices are searched for as if each were a micro-batch, with room for those that their reversed backwards keep longer.
    """
    layout, runtime, slices = prediction.layout, planner.runtime, prediction.layout.slices
    start = built(replace(layout, m=layout.m * slices, slices=1))
    costs = planner.stage_costs(layout)
    sizes = costs.bytes_in(DEVICE, start.stages)
    saved = [sum(each) for each in zip(sizes[KEPT], sizes[SAVED], strict=True)]
    held = tuple(late / whole if whole else 0.0 for late, whole in zip(sizes[PENDING], saved, strict=True))
    largest = max(costs.slice_sizes, default=1.0)
    activation = tuple(largest * size for size in saved)
    unit = replace(costs.even(1 / slices), activation=activation, held=held, bytes=())
    limits = [
        (memory - runtime.overhead - rank.standing) / (1 + runtime.margin)
        - largest * max(sizes[name][stage] for name in ("backward", "input_grad") for stage in mine)
        - (slices - 1) * largest * sum(saved[stage] for stage in mine)
        for rank, mine in zip(prediction.ranks, start.stages_of, strict=True)
    ]
    units = search_order(layout.m * slices, unit, limits, start.placement, seconds, whole=whole, start=start)
    return planner.with_schedule(layout, units if slices == 1 else by_slices(units, slices))
