"""The steady state repeated: the same schedules as planned whole, at any number of micro-batches."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.families.construct import steady

MEASURED = Costs(10, 12, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "zb-auto"])
@pytest.mark.parametrize("costs", [Costs(), MEASURED], ids=["unit", "measured"])
def test_it_is_as_long_as_planned_whole(name: str, costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "MOST_CELLS_PLANNED_WHOLE", 0)
    repeated = build(name, 6, 67, costs=costs)
    monkeypatch.setattr(steady, "MOST_CELLS_PLANNED_WHOLE", 1_500)
    whole = build(name, 6, 67, costs=costs)
    check(repeated)
    got, want = simulate(repeated, costs), simulate(whole, costs)
    assert got.makespan == want.makespan
    assert max(got.peak_activations) == max(want.peak_activations)


@pytest.mark.parametrize("microbatches", [20, 21, 140])
def test_a_part_with_as_many_of_every_action_is_repeated(microbatches: int) -> None:
    """The forwards come in twos; a forward and a backward between them are such a part."""
    twos = ["0F{0}", "0F{1}", "0B{0}", "0B{1}"]
    program = [cell.format(first, first + 1) for first in range(0, 18, 2) for cell in twos]
    small = Schedule.of([program], placement=[0], microbatches=18)
    part = steady.steady_state(simulate(small), [1, 2])
    assert part == steady.SteadyState(1, (1,), 3)
    longer = steady.repeated(small, part, microbatches)
    check(longer)
    assert simulate(longer).makespan == 3 * microbatches
    assert simulate(longer).peak_activations == (2,)


def test_no_part_is_repeated_where_none_is_balanced() -> None:
    assert steady.steady_state(simulate(schedules.gpipe(2, 8)), [1, 2, 3]) is None


def test_many_microbatches_take_no_more_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    real = steady.simulate
    monkeypatch.setattr(steady, "simulate", lambda s, costs: (planned.append(s.microbatches), real(s, costs))[1])
    check(schedules.zbv(8, 1_000))
    assert max(planned) < 60


def test_interleaved_zb_keeps_its_plan_at_large_sizes() -> None:
    """Above S m = 40,000 the idle time was 693 and not 364 at p = 64."""
    costs = Costs(5, 6, 4)
    few, many = (simulate(schedules.interleaved_zb(16, m, costs=costs), costs) for m in (128, 1_280))
    assert many.makespan - few.makespan == 2 * 15 * (1_280 - 128)
    assert many.peak_activations == few.peak_activations


def test_zb_auto_is_never_longer_than_zb_h1() -> None:
    costs = Costs(1.2, 1.0, 1.4)
    automatic, by_hand = schedules.zb_auto(6, 12, 6, costs), schedules.zb_h1(6, 12)
    assert simulate(automatic, costs).makespan <= simulate(by_hand, costs).makespan + 1e-9


def test_zb_auto_plans_for_the_least_span() -> None:
    costs = Costs(10, 12, 8, 1, held=0.6)
    by_makespan, by_span = (
        simulate(build("zb-auto", 8, 26, None, {"objective": objective}, costs), costs)
        for objective in ("makespan", "span")
    )
    assert by_makespan.makespan < by_span.makespan
    assert max(by_span.spans) < max(by_makespan.spans)


@pytest.mark.parametrize(("p", "makespan"), [(4, 15), (8, 31)])
def test_zb_h2_puts_off_no_weight_gradient_for_nothing(p: int, makespan: int) -> None:
    assert simulate(schedules.zb_h2(p, p)).makespan == makespan
