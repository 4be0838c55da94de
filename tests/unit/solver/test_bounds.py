"""Bounds that know the memory: formulas, and never above what a schedule does."""

from __future__ import annotations

import pytest

from pipeloom.schedule import Action, Costs, Pair, Schedule, check, simulate
from pipeloom.schedule.bounds import lower_bound, memory_bound


@pytest.mark.parametrize(("p", "k"), [(4, 2), (4, 3), (8, 6), (8, 3)])
def test_before_the_first_backward(p: int, k: int) -> None:
    """work + max(0, (p-1)(b+2c) + (p-k) f), for one stage a rank and few micro-batches."""
    f, b, w, c, m = 2.0, 3.0, 1.0, 0.5, k
    expected = m * (f + b + w) + (p - 1) * (b + 2 * c) + (p - k) * f
    assert memory_bound(range(p), m, Costs(f, b, w, c), k, "span") == pytest.approx(expected)


@pytest.mark.parametrize(("k", "idle"), [(2, 3.5), (3.5, 2.5), (20, 0)])
def test_after_the_last_input_gradient(k: float, idle: float) -> None:
    """head + work + max(0, (p-1)(b+c) + w - k w): only what W of k whole micro-batches need fits, whatever F needs."""
    f, b, w, c, p, m = 2.0, 1.0, 1.0, 0.5, 4, 30
    costs = Costs(f, b, w, c, activation=0.01, held=100)
    assert memory_bound(range(p), m, costs, k) == (p - 1) * (f + c) + m * (f + b + w) + idle
    assert memory_bound(range(p), m, costs, k, "span") <= m * (f + b + w)
    assert memory_bound((0,), m, Costs(activation=0.01, held=200), 1) == 3 * m  # nothing follows a B of the first stage


def test_steady_state() -> None:
    """m times life / room on the first rank: life = p (f+b) + w + 2 c (p-1)."""
    assert memory_bound(range(4), 100, Costs(2, 3, 1, 0.5), 2) == 100 * (4 * 5 + 1 + 2 * 0.5 * 3) / 2


def test_nothing_is_claimed_where_pairs_gain() -> None:
    assert memory_bound(range(4), 8, Costs(all_to_all=0.3), 2) == 0
    assert memory_bound(range(4), 8, Costs(pair=2.0), 2) == 0


def test_only_whole_micro_batches_fit_before_the_first_backward() -> None:
    """Room for 2.5 micro-batches is room for 2."""
    f, b, w, p, m = 2.0, 3.0, 1.0, 4, 3
    assert memory_bound(range(p), m, Costs(f, b, w), 2.5, "span") == pytest.approx(
        m * (f + b + w) + (p - 1) * b + (p - 2) * f
    )


def test_a_first_forward_may_be_paired_with_a_backward_of_the_other_route() -> None:
    """Rank 1 is on one route only: what comes down to it was in a pair that takes a tenth of the forward alone."""
    first = [Action("F", 2, 1), Action("F", 3, 1), Pair(Action("F", 0, 0), Action("B", 3, 1))]
    programs = [[*first, Action("B", 2, 1), Action("B", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    routes, placement = ((0, 1), (2, 3)), (0, 1, 0, 0)
    schedule = Schedule.of(
        programs, placement=placement, microbatches=2, name="two routes", routes=routes, route_of=(0, 1)
    )
    check(schedule)
    forward, backward = (10.0, 20.0, 1.0, 1.0), (2.0, 40.0, 2.0, 2.0)
    pair = tuple(tuple(1.0 if (s, t) == (0, 3) else forward[s] + backward[t] for t in range(4)) for s in range(4))
    costs = Costs(forward, (1.0, 20.0, 1.0, 1.0), (1.0, 20.0, 1.0, 1.0), pair=pair)
    assert lower_bound(schedule, costs) == 60  # rank 1's work; after F of stage 0 alone it would be 70
    assert simulate(schedule, costs).makespan == 65
