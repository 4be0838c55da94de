"""Overlapped and bidirectional families: pairs, two routes, the eight phases."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.errors import UsageError
from pipeloom.schedule import Costs, Pair, check, simulate
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import unpair


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 5, 12])
def test_1f1b_overlap(p: int, m: int) -> None:
    schedule = schedules.one_f_one_b_overlap(p, m)
    check(schedule)
    timeline = simulate(schedule, Costs(2, 3, 1))
    assert max(timeline.idle) == 6 * (p - 1)
    assert timeline.peak_activations == tuple(min(m, 2 * (p - r)) for r in range(p))


@pytest.mark.parametrize("name", ["1f1b-overlap", "interleaved-overlap", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("costs", [Costs(), Costs(10, 12, 8, 1), Costs(2, 1, 3, 0.5)])
def test_apart_pairs_are_never_slower(name: str, costs: Costs) -> None:
    """A block of two waits for both inputs; one action after the other does not."""
    for p, m in ((2, 8), (4, 12), (8, 32)):
        paired = schedules.build(name, p, m)
        apart = unpair(paired)
        check(apart)
        assert paired.has_pairs
        assert not apart.has_pairs
        cells = [list(program) for program in paired.programs]
        assert [list(program) for program in apart.programs] == [[a for c in row for a in parts(c)] for row in cells]
        before, after = simulate(paired, costs), simulate(apart, costs)
        assert after.makespan <= before.makespan + 1e-9
        assert after.peak_activations == before.peak_activations
    assert simulate(schedules.dualpipev(2, 8)).makespan == 50
    assert simulate(unpair(schedules.dualpipev(2, 8))).makespan == 49


def test_pairs_apart_of_some_stages() -> None:
    schedule = schedules.dualpipev(2, 8)
    assert unpair(schedule, [0]) is schedule  # its pairs are with stage 3
    some = unpair(schedule, [0, 3])
    assert not any(isinstance(cell, Pair) for cell in some.programs[0])
    assert some.programs[1] == schedule.programs[1]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_overlap_keeps_the_bubble(p: int, v: int) -> None:
    for m in range(1, 3 * p + 1):
        plain, paired = schedules.interleaved(p, m, v), schedules.interleaved_overlap(p, m, v)
        check(paired)
        before, after = simulate(plain), simulate(paired)
        assert after.makespan == before.makespan
        assert after.peak_activations == tuple(min(m * v, peak + 1) for peak in before.peak_activations)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize(("b", "w", "pair"), [(1, 1, 3), (1, 0.5, 2.5), (1, 1, 2), (1, 0.5, 1.5)])
def test_dualpipe_formula(p: int, b: float, w: float, pair: float) -> None:
    costs = Costs(1, b, w, pair=pair)
    for m in (2 * p, 2 * p + 2, 3 * p):
        schedule = schedules.dualpipe(p, m)
        check(schedule)
        timeline = simulate(schedule, costs)
        assert max(timeline.idle) == pytest.approx((p / 2 - 1) * (pair + b + w - 3 * w))
        assert timeline.peak_activations == (p + 1,) * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("b", "w", "pair"), [(1, 1, 3), (1, 0.5, 2.5), (1, 1, 2)])
def test_dualpipev_formula(p: int, b: float, w: float, pair: float) -> None:
    costs = Costs(1, b, w, pair=pair)
    for m in (2 * p, 2 * p + 1, 3 * p):
        schedule = schedules.dualpipev(p, m)
        check(schedule)
        timeline = simulate(schedule, costs)
        assert max(timeline.idle) == pytest.approx((p - 1) * (pair + b + w - 3 * w))
        assert timeline.peak_activations == (2 * p + 1,) * p


def test_the_formulas_are_those_of_the_rank_that_idles_most() -> None:
    """Where pairs gain, ranks idle less at dualpipe's ends and at dualpipev's beginning, as the docs say."""
    gain = Costs(pair=2.5)
    assert set(simulate(schedules.dualpipe(8, 24)).idle) == {6}
    assert simulate(schedules.dualpipe(8, 24), gain).idle == (3.5, 4, 4.5, 4.5, 4.5, 4.5, 4, 3.5)
    assert simulate(schedules.dualpipev(4, 12), gain).idle == (3.5, 4, 4.5, 4.5)


def test_dualpipe_has_two_routes_over_replicas() -> None:
    schedule = schedules.dualpipe(4, 8)
    assert schedule.routes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [schedule.placement[stage] for stage in schedule.routes[1]] == [3, 2, 1, 0]
    assert schedule.route_of == (0,) * 4 + (1,) * 4
    assert any(isinstance(cell, Pair) for program in schedule.programs for cell in program)


@pytest.mark.parametrize(
    ("p", "m", "words"),
    [(3, 8, "nearest: 2 or 4"), (4, 6, "nearest: 8"), (4, 9, "nearest: 8 or 10"), (1, 4, "nearest: 2")],
)
def test_dualpipe_refuses(p: int, m: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        schedules.dualpipe(p, m)


def test_dualpipev_refuses() -> None:
    with pytest.raises(UsageError, match="nearest: 8"):
        schedules.dualpipev(4, 7)


def test_table_at_eight_ranks() -> None:
    assert simulate(schedules.dualpipe(8, 24)).makespan == 78
    assert simulate(schedules.dualpipev(8, 24)).makespan / 2 == 79
    assert simulate(schedules.dualpipev(8, 24), Costs(5, 6, 4, 1)).makespan == 874


@pytest.mark.parametrize(
    ("share", "figures"), [(0.3, (77.7, 78.3, 79.4, 75.7)), (0.5, (61.5, 61.8, 61.3, 58.6))], ids=["x=.3", "x=.5"]
)
def test_all_to_all_behind_pairs(share: float, figures: tuple[float, ...]) -> None:
    """p=8 m=32, all-to-all share x of F and I, F = I = 1, W = 1 - x, full-rank units."""
    full = Costs(1, 1, 1 - share, all_to_all=share)
    made = (
        (schedules.dualpipe(8, 32), 1),
        (schedules.dualpipev(8, 32), 2),
        (schedules.interleaved_overlap(8, 32, 2), 2),
        (schedules.interleaved_overlap(8, 32, 4), 4),
    )
    for (schedule, chunks), expected in zip(made, figures, strict=True):
        assert simulate(schedule, full.resized(1 / chunks)).makespan == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize("p", [4, 6])
def test_chimera_bubbles(p: int) -> None:
    schedule = schedules.chimera(p, p)
    check(schedule)
    assert max(simulate(schedule, Costs(1, 0.5, 0.5)).idle) == (p / 2 - 1) * 2
    assert max(simulate(schedule, Costs(1, 1, 1)).idle) == 2 * (p - 2)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 13, 24])
def test_chimera_any_m(p: int, m: int) -> None:
    schedule = schedules.chimera(p, m)
    check(schedule)
    assert max(simulate(schedule).peak_activations) <= (p if m <= p else 3 * p / 2)
    assert schedule.route_of == tuple(mb % 2 for mb in range(m))


@pytest.mark.parametrize(("p", "words"), [(3, "nearest: 2 or 4"), (1, "nearest: 2")])
def test_chimera_refuses_odd_ranks(p: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        schedules.chimera(p, 4)


def test_hanayo_one_wave() -> None:
    schedule = schedules.hanayo(4, 4)
    check(schedule)
    assert max(simulate(schedule, Costs(1, 1, 1)).idle) == 12
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_any_m(p: int, waves: int) -> None:
    for m in (1, 2, p, 2 * p + 1, 4 * p):
        schedule = schedules.hanayo(p, m, waves)
        check(schedule)
        assert schedule.chunks == 2 * waves
        assert max(simulate(schedule).peak_activations) <= min(2 * waves * m, 4 * p * waves)
        kinds = {action.kind for program in schedule.programs for cell in program for action in parts(cell)}
        assert kinds == {"F", "B"}
