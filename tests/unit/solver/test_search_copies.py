"""The search for what to copy to host memory, limits by rank, and a schedule to start from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.families.construct.list_scheduling import Turns
from pipeloom.schedule.offload import offload
from pipeloom.schedule.transforms import recompute
from pipeloom.solver.construct import sequences_of
from pipeloom.solver.copies import CopyPlan
from pipeloom.solver.instance import Instance

# A copy of what F saves takes 0.9 of F.
COSTS = Costs(1, 1, 1, kept=0.1, held=0.7, host_bandwidth=1.0)


def fits(schedule: Schedule, costs: Costs, memory: float) -> bool:
    return max(simulate(schedule, costs).peak_memory) <= memory + 1e-9


def test_copies_make_an_order_fit_that_does_not_without() -> None:
    """At 2.2 of the 4 micro-batches that 1F1B holds; no longer than families with copies, and shorter than without."""
    result = pl.search(4, 5, COSTS, memory=2.2, iterations=0)
    check(result.schedule)
    assert fits(result.schedule, COSTS, 2.2)
    assert result.timeline == simulate(result.schedule, COSTS)
    named = [offload(build("1f1b", 4, 5), COSTS, count, count) for count in (1, 4)]
    assert result.value <= min(simulate(each, COSTS).makespan for each in named if fits(each, COSTS, 2.2))
    assert result.value < pl.search(4, 5, replace(COSTS, host_bandwidth=math.inf), memory=2.2, iterations=9).value
    assert result.lower_bound <= result.value
    assert not result.recomputed
    assert result.offloaded[0]
    copied = {(a.stage, a.microbatch) for row in result.schedule.programs for a in row if a.kind[:1] == "O"}
    assert {(stage, mb) for stage, group in result.offloaded.items() for mb in group} == copied


def test_a_construction_waits_for_copies_and_leaves_no_more_than_fits() -> None:
    """One rank whose forwards come back to back: each waits until the one before the last is copied."""
    instance = Instance((0,), 4, Costs(1, 1, 1, host_bandwidth=0.75), 2.0)
    order = sequences_of(instance, build("gpipe", 1, 4))
    timeline = CopyPlan(instance, order, "gpipe", 1, 0.0).timed()
    assert timeline is not None
    assert timeline.starts[0][:4] == pytest.approx((0, 1, 1 + 4 / 3, 1 + 8 / 3))
    in_parts = CopyPlan(instance, order, "gpipe", 4, 0.0).timed()
    assert in_parts is not None
    assert in_parts.starts[0][:4] == (0, 1, 2, 3)
    assert CopyPlan(replace(instance, memory_limit=0.9), order, "gpipe", 1, 0.0).timed() is None


def test_what_weight_gradients_wait_for_counts() -> None:
    """Two of them fill the memory, so one runs before the next input gradient."""
    instance = Instance((0,), 4, Costs(1, 1, 1, host_bandwidth=10), 2.0)
    timeline = CopyPlan(instance, sequences_of(instance, build("gpipe", 1, 4)), "gpipe", 1, 0.0).timed()
    assert timeline is not None
    assert "".join(action.kind for action in timeline.schedule.programs[0]) == "FFFFIIWIWIWW"


def test_each_rank_has_a_limit_of_its_own() -> None:
    limits = [2.0, 1.3]
    result = pl.search(2, 4, COSTS, memory=limits, iterations=5)
    assert all(peak <= limit + 1e-9 for peak, limit in zip(result.timeline.peak_memory, limits, strict=True))
    assert max(result.timeline.peak_memory) > 1.3
    assert result.value < pl.search(2, 4, COSTS, memory=1.3, iterations=5).value
    with pytest.raises(UsageError, match="memory has 3 values and the schedule 2 ranks: give one number or 2"):
        pl.search(2, 4, COSTS, memory=[1.0, 2.0, 3.0])


def test_a_schedule_to_start_from_is_never_made_longer() -> None:
    """On a placement that no family has, with what it recomputes and copies; without, its order is a start."""
    place = [0, 1, 1, 0, 0, 1]
    plain = pl.search(2, 4, placement=place, iterations=200, seed=3).schedule
    start = recompute(plain, True, [(0, 3)])
    costs = replace(COSTS, recompute=0.5)
    memory = max(simulate(start, costs).peak_memory)
    result = pl.search(2, 4, costs, memory=memory, start=start, iterations=0)
    assert result.schedule.placement == tuple(place)
    assert result.value <= simulate(start, costs).makespan
    mine = replace(build("gpipe", 1, 3), name="mine")  # as short as any
    assert pl.search(1, 3, start=mine, iterations=0).origin == "mine"
    with pytest.raises(UsageError, match="start has 2 ranks, 4 micro-batches and the placement"):
        pl.search(2, 5, costs, start=start)


def test_too_little_memory_for_any_copies() -> None:
    with pytest.raises(CapacityError, match=r"memory is 0\.9; no schedule was found that fits it, not with copies"):
        pl.search(2, 3, COSTS, memory=0.9, iterations=5)


def test_a_rank_has_one_turn_at_a_time_the_earliest() -> None:
    turns, seen = Turns(2), list[tuple[float, int]]()
    for now, rank in turns:
        seen.append((now, rank))
        for later in (5.0, 3.0, 4.0) if now == 0 else ():
            turns.call(rank, later + rank)
    assert seen == [(0, 0), (0, 1), (3, 0), (4, 1)]
