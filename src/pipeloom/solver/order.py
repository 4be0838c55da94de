"""An order searched for stages on their ranks, with backwards whole or split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.costs import StageCosts
from pipeloom.schedule.transforms import merge_backward
from pipeloom.solver.search import search


def search_order(
    microbatches: int,
    costs: Costs,
    limits: Sequence[float],
    placement: Sequence[int],
    seconds: float,
    *,
    whole: bool = False,
    start: Schedule | None = None,
) -> Schedule:
    """Return the fastest schedule that a search finds in so many seconds.

    Args:
        limits: rank -> the largest peak of memory, in units of `Costs.activation`.
        placement: stage -> rank.
        whole: whether backwards are not split into I and W.
        start: a schedule on this placement to begin with.
    """
    if whole:  # an I that takes as long as a B and frees as much, and a W that takes no time
        input_grad = tuple(StageCosts(costs, len(placement)).backward)
        costs = replace(costs, input_grad=input_grad, weight_grad=0.0, backward=None, held=0.0)
    ranks, place = max(placement) + 1, list(placement)
    order = search(ranks, microbatches, costs, limits, placement=place, start=start, time_limit=seconds).schedule
    return merge_backward(order) if whole else order
