"""gpipe, 1f1b, interleaved with all its rounds, looped-bfs: every literal and formula of the specification."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families.interleaved import chunk_order, round_sizes

EQUAL = Costs(forward=1, input_grad=0.5, weight_grad=0.5)  # f = B = 1
DOUBLE = Costs(forward=1, input_grad=1, weight_grad=1)  # f = 1, B = 2


def figures(schedule: Schedule, costs: Costs) -> tuple[float, set[float], tuple[int, ...]]:
    check(schedule)
    timeline = simulate(schedule, costs)
    return timeline.makespan, set(timeline.idle), timeline.peak_activations


def test_interleaved_divisible() -> None:
    schedule = schedules.interleaved(4, 8, chunks=2)
    assert figures(schedule, EQUAL) == (38, {6}, (11, 9, 7, 5))
    assert figures(schedule, DOUBLE) == (57, {9}, (11, 9, 7, 5))


@pytest.mark.parametrize("rounds", ["balanced", "tail"])
def test_interleaved_nine_microbatches(rounds: str) -> None:
    schedule = schedules.interleaved(4, 9, chunks=2, rounds=rounds)
    assert figures(schedule, EQUAL) == (42, {6}, (12, 10, 8, 6))
    assert figures(schedule, DOUBLE)[:2] == (63, {9})


def test_interleaved_head_has_the_uniform_bubble() -> None:
    assert figures(schedules.interleaved(4, 9, chunks=2, rounds="head"), EQUAL)[:2] == (42, {6})


def test_paper_rounds_cost_bubbles() -> None:
    schedule = schedules.interleaved(4, 9, chunks=2, rounds="paper")
    assert figures(schedule, EQUAL)[:2] == (48, {12})
    assert figures(schedule, DOUBLE)[:2] == (74, {20})
    assert figures(schedules.interleaved(4, 5, chunks=2, rounds="paper"), EQUAL)[1] == {11}


@pytest.mark.parametrize(("p", "v", "m"), [(4, 3, 5), (5, 2, 7)])
def test_paper_rounds_deadlock_and_check_says_why(p: int, v: int, m: int) -> None:
    with pytest.raises(
        ScheduleError, match=r"(?s)deadlocks; the shortest cycle:.*rank 0 is at .*which waits for"
    ) as caught:
        check(schedules.interleaved(p, m, chunks=v, rounds="paper"))
    assert caught.value.exit_code == 3


def test_schedule_table() -> None:
    order = chunk_order(round_sizes(2, 5, group_size=3), 2)
    assert [mb for mb, _ in order] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in order] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_one_f_one_b_figures() -> None:
    timeline = simulate(schedules.one_f_one_b(4, 8), DOUBLE)
    assert timeline.makespan == 33
    assert timeline.bubble_ratio == pytest.approx(0.375)
    assert timeline.bubble_rate == pytest.approx(0.2727, abs=5e-5)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 1, 0.5), (1, 3, 2)])
def test_flat_families(p: int, m: int, f: float, i: float, w: float) -> None:
    costs = Costs(f, i, w)
    bubble = pytest.approx((p - 1) * (f + i + w))
    for make, peaks in (
        (schedules.gpipe, (m,) * p),
        (schedules.one_f_one_b, tuple(min(m, p - r) for r in range(p))),
    ):
        schedule = make(p, m)
        check(schedule)
        timeline = simulate(schedule, costs)
        assert timeline.idle == tuple([bubble] * p)
        assert timeline.peak_activations == peaks


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 9])
def test_looped_bfs(p: int, v: int, m: int) -> None:
    schedule = schedules.looped_bfs(p, m, chunks=v)
    check(schedule)
    timeline = simulate(schedule)
    assert set(timeline.idle) == {(p - 1) * 3 + (v - 1) * max(0, p - m) * 3}
    assert timeline.peak_activations == (v * m,) * p


def balanced_holds(p: int, v: int, m: int) -> None:
    """Idle of every rank exactly (p-1)(f+B), (v-1)(p-m)(f+B) more for m < p; peaks by the formula; no deadlock."""
    schedule = schedules.interleaved(p, m, chunks=v)
    check(schedule)
    timeline = simulate(schedule, Costs(1, 1, 1))
    assert set(timeline.idle) == {3 * (p - 1) + 3 * (v - 1) * max(0, p - m)}, (p, v, m)
    largest = max(round_sizes(p, m))
    assert timeline.peak_activations == tuple(min(m * v, 2 * (p - r - 1) + (v - 1) * largest + 1) for r in range(p)), (
        p,
        v,
        m,
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_balanced_sample(p: int) -> None:
    for v in (1, 2, 3, 5):
        for m in {1, p // 2 or 1, p, p + 1, 2 * p - 1, 2 * p + 1, 4 * p - 1, 4 * p}:
            balanced_holds(p, v, m)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_group_sizes_share_the_bubble(p: int, v: int) -> None:
    for m in range(p, 3 * p + 2):
        peaks = []
        for size in range(p, m + 1):
            schedule = schedules.interleaved(p, m, chunks=v, group_size=size)
            check(schedule)
            timeline = simulate(schedule)
            assert set(timeline.idle) == {3 * (p - 1)}, (p, v, m, size)
            peaks.append(max(round_sizes(p, m, group_size=size)))
        assert peaks[-1] == m
        assert all(size <= m for size in peaks)


@pytest.mark.parametrize(("size", "m", "nearest"), [(3, 9, 4), (10, 9, 9), (1, 4, 4)])
def test_group_size_out_of_range_names_the_nearest(size: int, m: int, nearest: int) -> None:
    with pytest.raises(UsageError, match=f"nearest: {nearest}"):
        schedules.interleaved(4, m, group_size=size)


def test_round_sizes() -> None:
    assert round_sizes(4, 11) == [6, 5]
    assert round_sizes(4, 11, "tail") == [4, 7]
    assert round_sizes(4, 11, "head") == [7, 4]
    assert round_sizes(4, 11, "paper") == [4, 4, 3]
    assert round_sizes(4, 3, "paper") == [3]
    assert round_sizes(4, 13, group_size=5) == [5, 8]
    assert round_sizes(4, 14, group_size=5) == [5, 5, 4]
    for m in range(1, 40):
        sizes = round_sizes(4, m)
        assert sum(sizes) == m
        assert all(left >= right for left, right in pairwise(sizes))


def test_unknown_rounds() -> None:
    with pytest.raises(UsageError, match="rounds is 'balance'; it must be one of 'balanced'"):
        schedules.interleaved(4, 8, rounds="balance")  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "v", "g", "m"), [(4, 2, 2, 8), (4, 2, 4, 8), (5, 3, 3, 6), (8, 4, 5, 10), (1, 3, 1, 4)])
def test_gis_figures(p: int, v: int, g: int, m: int) -> None:
    idle = 2 * (p - 1) + (v - 1) * (p - g)
    peaks = tuple((v - 1) * g + p - r for r in range(p))
    assert figures(schedules.gis(p, m, v, group_size=g), DOUBLE) == (3 * v * m + idle, {idle}, peaks)


def test_gis_with_copies() -> None:
    """Figures of the paper's PO-H and PO-F: those without copies in a half and a quarter of the memory, at any m."""
    costs = Costs(host_bandwidth=1)
    for chunks, peak in ((0, 12), (1, 6), (2, 3)):
        timeline = simulate(schedules.gis(8, 24, offload_chunks=chunks, costs=costs), costs)
        assert (timeline.makespan, max(timeline.peak_memory)) == (162, peak)
        copied = {a.stage // 8 for program in timeline.schedule.programs for a in program if a.kind == "O"}
        assert copied == set(range(chunks))
    for m in range(1, 12):
        check(schedules.gis(5, m, 3, offload_chunks=2))
    for name, value, nearest in (("group_size", 3, 4), ("group_size", 9, 8), ("offload_chunks", 3, 2)):
        with pytest.raises(UsageError, match=f"{name} is {value}; .* nearest: {nearest}"):
            schedules.gis(8, 8, **{name: value})
