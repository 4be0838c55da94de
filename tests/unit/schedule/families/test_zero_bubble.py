"""zb-h1, zb-h2, zb-auto, interleaved-zb: formulas, memory, and what the automatic one finds."""

from __future__ import annotations

import contextlib

import pytest

from paths import DATA, ROOT
from pipeloom import schedules
from pipeloom.errors import CapacityError, ScheduleError, UsageError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.families import build

UNEVEN = Costs(10, 12, 8, 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (3, 2, 1), (2, 3, 2), (10, 12, 8)])
def test_handcrafted_spans(p: int, f: float, b: float, w: float) -> None:
    for m in {p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1}:
        work = m * (f + b + w)
        if w <= min(f, b):
            timeline = simulate(schedules.zb_h1(p, m), Costs(f, b, w))
            assert max(timeline.spans) - work == pytest.approx((p - 1) * (f + b - w)), m
        if m >= 2 * p - 1 and 2 * w <= f + b and w <= f:
            timeline = simulate(schedules.zb_h2(p, m), Costs(f, b, w))
            assert max(timeline.spans) - work == pytest.approx((p - 1) * (f + b - 2 * w)), m


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 4, 2), (2, 6, 3), (1, 5, 3)])
def test_zb_h2_s_span_bubble_needs_a_short_weight_gradient(p: int, f: float, b: float, w: float) -> None:
    """With f < w <= (f + b) / 2 the formula does not hold, and the docs say so."""
    m = 3 * p
    idle = max(simulate(schedules.zb_h2(p, m), Costs(f, b, w)).spans) - m * (f + b + w)
    assert 2 * w <= f + b
    assert idle > (p - 1) * (f + b - 2 * w)
    docs = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert "2w ≤ f+b and w ≤ f" in docs
    assert "w <= f" in str(schedules.zb_h2.__doc__)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 20])
def test_handcrafted_memory(p: int, m: int) -> None:
    for make, limit in ((schedules.zb_h1, p), (schedules.zb_h2, 2 * p - 1)):
        schedule = make(p, m)
        check(schedule)
        assert max(simulate(schedule).peak_activations) <= min(m, limit)


@pytest.mark.parametrize("p", [1, 2, 4, 5])
@pytest.mark.parametrize("m", [1, 3, 8, 11])
@pytest.mark.parametrize("memory", [1, 1.5, 2, 3, 5, 9, 40])
def test_automatic_fits_any_memory(p: int, m: int, memory: float) -> None:
    for costs in (Costs(), UNEVEN, Costs((1, 2, 3, 1, 2)[:p], 1, 0.5, held=0.6)):
        schedule = schedules.zb_auto(p, m, memory, costs)
        check(schedule)
        assert max(simulate(schedule, costs).peak_memory) <= memory + 1e-9


def test_automatic_is_optimal_where_proved() -> None:
    for memory, makespan in ((8, 79), (16, 79)):
        assert simulate(schedules.zb_auto(8, 24, memory)).makespan == makespan
    assert max(simulate(schedules.zb_auto(8, 24, 16)).spans) == 72
    assert simulate(schedules.zb_auto(4, 8, 2)).makespan == 41  # the paper's rule alone: 51


def test_automatic_uses_what_an_input_gradient_frees() -> None:
    costs = Costs(10, 12, 8, 1, held=0.5)
    timeline = simulate(schedules.zb_auto(8, 16, 9, costs), costs)
    assert (timeline.makespan, max(timeline.peak_memory)) == (586, 9)  # 606 in 8, where none counts as freed


def test_automatic_weighs_activations() -> None:
    costs = Costs(activation=2.0)
    timeline = simulate(schedules.zb_auto(4, 8, 8, costs), costs)
    assert max(timeline.peak_activations) == 4
    with pytest.raises(CapacityError, match="one micro-batch's activations take 2"):
        schedules.zb_auto(4, 8, 1.5, costs)
    with pytest.raises(UsageError, match="memory is -1"):
        schedules.zb_auto(4, 8, -1)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("rounds", ["balanced", "tail", "head", "paper"])
def test_split_interleaved_is_never_longer(p: int, v: int, rounds: str) -> None:
    every = (None, Costs(5, 6, 4, 1), Costs(1, 3, 0.2, 0.5))
    for m in range(1, 10):
        costs = every[(m + p + v) % 3]
        whole = schedules.interleaved(p, m, v, rounds)
        split = schedules.interleaved_zb(p, m, v, rounds, costs=costs)
        try:
            check(whole)
        except ScheduleError:  # its shorter warm-up may run where interleaved's rounds deadlock
            assert rounds == "paper"
            with contextlib.suppress(ScheduleError):
                check(split)
            continue
        check(split)
        before, after = simulate(whole, costs), simulate(split, costs)
        assert after.makespan <= before.makespan + 1e-9
        assert max(after.peak_activations) <= max(before.peak_activations)


def test_split_interleaved_gains() -> None:
    timeline = simulate(schedules.interleaved_zb(8, 24), Costs(0.5, 0.5, 0.5))
    assert timeline.makespan <= 75.5  # interleaved: 82.5; at most 23 stage-micro-batches, as interleaved
    assert max(timeline.peak_activations) <= 23


def test_split_interleaved_is_as_good_as_torch_s_table() -> None:
    path = DATA / "torch" / "interleaved-zb.csv"
    theirs = simulate(from_csv(path.read_text(), name="torch"))
    ours = simulate(schedules.interleaved_zb(4, 8))
    assert ours.makespan <= theirs.makespan == 51
    assert max(ours.peak_activations) <= max(simulate(schedules.interleaved(4, 8)).peak_activations)


def test_costs_reach_the_families_that_plan_with_them() -> None:
    costs = Costs(5, 6, 4, 1)
    assert build("zbv", 8, 24, costs=costs) == schedules.zbv(8, 24, costs)
    assert build("zb-auto", 4, 8, options={"memory": 4}, costs=costs) == schedules.zb_auto(4, 8, 4, costs)
    assert build("1f1b", 4, 8, costs=costs) == schedules.one_f_one_b(4, 8)
