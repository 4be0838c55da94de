"""I and W as one B: never longer, never more memory, and cheaper where a B is."""

from __future__ import annotations

from random import Random

import pytest

import pipeloom as pl
from pipeloom.solver.merge_backward import merge_backwards


def kinds(schedule: pl.Schedule) -> set[str]:
    return {cell.kind for program in schedule.programs for cell in program}  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_never_longer_and_never_more_memory(seed: int, objective: str) -> None:
    random = Random(seed)
    ranks, chunks, microbatches = random.randint(1, 4), random.randint(1, 2), random.randint(1, 7)
    stages = ranks * chunks
    times = [tuple(random.uniform(1, 10) for _ in range(stages)) for _ in range(3)]
    backward = tuple(random.uniform(0.8, 1.1) * (i + w) for i, w in zip(times[1], times[2], strict=True))
    costs = pl.Costs(*times, p2p=random.uniform(0, 2), backward=backward)
    schedule = pl.search(ranks, microbatches, pl.Costs(*times), chunks=chunks, iterations=50).schedule
    merged = merge_backwards(schedule, costs, objective)  # type: ignore[arg-type]
    pl.check(merged)
    before, after = pl.simulate(schedule, costs), pl.simulate(merged, costs)
    if objective == "makespan":
        assert after.makespan <= before.makespan + 1e-6
    else:
        assert max(after.spans) <= max(before.spans) + 1e-6
    assert all(map(int.__le__, after.peak_activations, before.peak_activations))


def test_one_rank_fuses_all_where_a_backward_is_cheaper() -> None:
    schedule = pl.schedules.zb_h1(1, 4)
    merged = merge_backwards(schedule, pl.Costs(backward=1.9))
    assert kinds(merged) == {"F", "B"}
    assert pl.simulate(merged, pl.Costs(backward=1.9)).makespan == pytest.approx(4 * 2.9)


def test_a_dearer_backward_stays_split() -> None:
    schedule = pl.schedules.zb_h1(1, 4)
    assert merge_backwards(schedule, pl.Costs(backward=2.1)) == schedule
    assert kinds(merge_backwards(schedule, pl.Costs(backward=2.1))) == {"F", "I", "W"}


def test_weights_that_fill_gaps_stay_where_they_are() -> None:
    """zb-h1's makespan needs the gradients to leave early: some I and W stay apart, and nothing gets longer."""
    schedule, costs = pl.schedules.zb_h1(4, 8), pl.Costs(backward=1.95)
    merged = merge_backwards(schedule, costs)
    assert kinds(merged) == {"F", "B", "I", "W"}
    assert pl.simulate(merged, costs).makespan < pl.simulate(schedule, costs).makespan + 1e-9
    whole = pl.schedules.build("1f1b", 4, 8)  # every backward as one B
    assert pl.simulate(whole, costs).makespan > pl.simulate(merged, costs).makespan


def test_pairs_are_taken_apart() -> None:
    schedule = pl.schedules.dualpipev(2, 4)
    assert schedule.has_pairs
    apart = merge_backwards(schedule, pl.Costs())
    pl.check(apart)
    assert not apart.has_pairs
