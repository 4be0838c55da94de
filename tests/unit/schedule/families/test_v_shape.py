"""zbv, v-half, v-min: makespans at unit and at measured costs, memory, any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeloom import schedules
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families.construct import building_block
from pipeloom.schedule.families.construct.building_block import BuildingBlock

Case = tuple[Callable[..., Schedule], Callable[[int], float], Callable[[int], int]]
# family, bubble of the makespan at unit costs and m = 3p in full-rank units, stage-micro-batches that it may hold
CASES: list[Case] = [
    (schedules.zbv, lambda p: (p - 1) / 2, lambda p: 2 * p),
    (schedules.v_half, lambda p: (3 * p - 7) / 2, lambda p: p + 2),
    (schedules.v_min, lambda p: 2 * p - (2.5 if p % 6 else 3.5), lambda p: 2 * ((p + 4) // 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["zbv", "v-half", "v-min"])
@pytest.mark.parametrize("p", [4, 6, 8, 10, 12])
def test_published_bubbles_or_better(case: Case, p: int) -> None:
    make, bubble, room = case
    schedule = make(p, 3 * p)
    check(schedule)
    timeline = simulate(schedule)
    assert (timeline.makespan - 18 * p) / 2 <= bubble(p)
    assert max(timeline.peak_activations) <= room(p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_zbv_has_zero_span_bubble(p: int) -> None:
    for m in {2 * p - 1, 2 * p, 3 * p}:
        timeline = simulate(schedules.zbv(p, m))
        assert timeline.spans == (6 * m,) * p
        assert timeline.span_bubble_rate == 0


@pytest.mark.parametrize(("p", "idle"), [(2, 0), (3, 1), (4, 1)])
@pytest.mark.parametrize("rounds", [2, 3])
def test_zbv_fills_waits_with_weight_gradients_that_take_longest(p: int, idle: int, rounds: int) -> None:
    """Repeated building blocks leave 1 more idle: a W must go where it delays others least."""
    costs, m = Costs(2, 2, 3), rounds * p
    assert max(simulate(schedules.zbv(p, m, costs, "span"), costs).spans) <= 2 * m * (2 + 2 + 3) + idle


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["zbv", "v-half", "v-min"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("costs", [None, Costs(5, 6, 4, 1), Costs(2, 1, 3, 0.5, activation=3.0, held=0.5)])
def test_any_size_and_costs(case: Case, p: int, costs: Costs | None) -> None:
    make, _, room = case
    for m in (1, 2, 3, p, 2 * p + 1):
        schedule = make(p, m, costs)
        check(schedule)
        assert max(simulate(schedule).peak_activations) <= room(p)


@pytest.mark.parametrize(
    ("name", "unit", "measured"), [("zbv", 75.5, 795), ("v_half", 80.5, 879), ("v_min", 85.5, 1147)]
)
def test_table_at_eight_ranks(name: str, unit: float, measured: float) -> None:
    make = getattr(schedules, name)
    assert simulate(make(8, 24)).makespan / 2 <= unit
    costs = Costs(5, 6, 4, 1)
    assert simulate(make(8, 24, costs), costs).makespan <= measured


def test_planning_with_costs_helps() -> None:
    costs = Costs(5, 6, 4, 1)
    assert simulate(schedules.zbv(8, 16, costs), costs).makespan < simulate(schedules.zbv(8, 16), costs).makespan


def test_block_that_collides_is_refused() -> None:
    assert BuildingBlock((1, 1, 1, 1), (0, 0, 0)).offsets(3) is None
    assert BuildingBlock((1, 1, 1, 1), (0, 2, 0)).offsets(3) is not None
    placement = [0, 1, 2, 3, 3, 2, 1, 0]
    assert (
        building_block.sequences_of_block(BuildingBlock((1, 1, 1, 1), (0, 0, 0)), placement, 8, memory_limit=3) is None
    )
