"""A schedule searched for a planned layout, on its own placement and within the memory that the family's schedule left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipeloom.errors import CapacityError, UsageError
from pipeloom.plan.predict import LayoutCosts, Planner, built
from pipeloom.schedule.actions import PENDING, SAVED
from pipeloom.solver import search

REFINED = 3  # layouts for which schedules are searched


def refine(
    planner: Planner, predictions: Sequence[LayoutCosts], memory: float, seconds: float
) -> tuple[LayoutCosts, ...]:
    """The predictions with searched schedules in place of those of the first few with a pipeline, the fastest first.

    A schedule stays as it is where the search finds none that is faster in `memory` bytes of each device. The search has
    `seconds` in all; what one layout leaves goes to the next.
    """
    # schedules are searched for whole sequences
    deep = [each for each in predictions if each.layout.pp > 1 and each.layout.slices == 1][:REFINED]
    until, better = time.monotonic() + seconds, {}
    for at, prediction in enumerate(deep):
        left = (until - time.monotonic()) / (len(deep) - at)
        with suppress(
            UsageError, CapacityError
        ):  # more actions than are searched; nothing fits but the family's schedule
            searched = _searched(planner, prediction, memory, max(0.1, left))
            if searched.peak <= memory and searched.tokens > prediction.tokens:
                better[prediction.layout] = searched
    return tuple(sorted((better.get(each.layout, each) for each in predictions), key=lambda each: -each.tokens))


def _searched(planner: Planner, prediction: LayoutCosts, memory: float, seconds: float) -> LayoutCosts:
    """The prediction with the schedule that a search finds in so many seconds."""
    layout, runtime, start = prediction.layout, planner.runtime, built(prediction.layout)
    costs = planner.stage_costs(layout)
    sizes = {name: costs.bytes_in("device", start.stages)[name] for name in (SAVED, PENDING, "temporaries")}
    held = tuple(late / whole if whole else 0.0 for late, whole in zip(sizes[PENDING], sizes[SAVED], strict=True))
    limits = [
        (memory - runtime.overhead - rank.standing) / (1 + runtime.margin)
        - max(sizes["temporaries"][stage] for stage in mine)
        for rank, mine in zip(prediction.ranks, start.stages_of, strict=True)
    ]
    result = search(
        layout.pp,
        layout.m,
        replace(costs, activation=sizes[SAVED], held=held, bytes=()),
        limits,
        placement=start.placement,
        start=start,
        time_limit=seconds,
    )
    return planner.with_schedule(layout, result.schedule)
