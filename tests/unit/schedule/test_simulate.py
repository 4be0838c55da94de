"""`simulate` and its timeline: times, idle by phase, memory, the critical path, period and bounds."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, Timeline, lower_bound, period, simulate
from pipeloom.schedule.actions import TIMES as NAMES_OF_TIMES
from pipeloom.schedule.costs import StageCosts
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.simulate import Makespans
from pipeloom.schedule.slices import cut_sequences
from pipeloom.schedule.transforms import transformed, unpair


def test_figures_of_a_small_timeline() -> None:
    timeline = simulate(schedules.one_f_one_b(2, 2), Costs(1, 1, 1))
    assert timeline.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert timeline.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert (timeline.makespan, timeline.busy, timeline.idle, timeline.spans) == (9, (6, 6), (3, 3), (9, 6))
    assert timeline.bubble_ratio == 0.5
    assert timeline.bubble_rate == pytest.approx(1 / 3)
    assert timeline.span_bubble_rate == pytest.approx(1 / 3)
    assert [tuple(idle) for idle in timeline.idle_by_phase] == [(2, 0, 1), (1, 0, 2)]


def test_peaks_and_held_share() -> None:
    schedule = Schedule.of([["0F0", "0F1", "0I0", "0I1", "0F2", "0W0", "0W1", "0B2"]], placement=[0], microbatches=3)
    assert simulate(schedule).peak_activations == (3,)
    costs = Costs(activation=10, held=0.25)
    timeline = simulate(schedule, costs)
    assert timeline.peak_memory == (20,)
    levels = [level for _, level in timeline.memory_curve[0]]
    assert levels == [10, 20, 12.5, 5, 15, 12.5, 10, 0]
    assert simulate(schedule, Costs(activation=10, held=2)).peak_memory == (50,)  # both I, and F2


def test_a_pair_holds_both_micro_batches() -> None:
    schedule = Schedule.of([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]], placement=[0], microbatches=2)
    timeline = simulate(schedule)
    assert timeline.peak_activations == (2,)
    assert timeline.memory_curve[0] == ((0, 1), (1, 2), (4, 1), (6, 0))


def test_a_hop_takes_what_its_direction_does() -> None:
    """Activations travel 0 -> 1 -> 2, gradients back; each link's two directions differ, and no two links are alike."""
    p2p = ((0.0, 2.0, 64.0), (16.0, 0.0, 4.0), (64.0, 32.0, 0.0))
    schedule = schedules.one_f_one_b(3, 1)
    for overlap in (True, False):
        timeline = simulate(schedule, Costs(1, 1, 0, p2p), overlap_p2p=overlap)
        assert timeline.starts == ((0.0, 59.0), (3.0, 42.0), (8.0, 9.0))
        assert timeline.critical_path == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert lower_bound(schedule, Costs(1, 1, 0, p2p), split_backward=False) == timeline.makespan == 60


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_micro_batch_makes_its_message_larger(factor: float) -> None:
    """Equal factors too: the same as costs that are larger to begin with."""
    schedule = schedules.one_f_one_b(4, 6)
    costs = Costs(2, 3, 1, 1, message=8.0, bandwidth=4.0)
    larger = Costs(2 * factor, 3 * factor, factor, 1, message=8.0 * factor, bandwidth=4.0)
    factors = Costs(2, 3, 1, 1, message=8.0, bandwidth=4.0, microbatch=(factor,) * 6)
    assert simulate(schedule, factors).ends == simulate(schedule, larger).ends != simulate(schedule, costs).ends
    assert lower_bound(schedule, factors) == lower_bound(schedule, larger) <= simulate(schedule, factors).makespan


def test_pair_times() -> None:
    fused = Schedule.of([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]], placement=[0], microbatches=2)
    split = Schedule.of([["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0B1"]], placement=[0], microbatches=2)
    for costs, whole, half in (
        (Costs(2, 3, 1), 6, 5),
        (Costs(2, 3, 1, pair=4), 4, 3),
        (Costs(2, 3, 1, pair=2), 2, 2),
        (Costs(2, 3, 1, all_to_all=0.5), 3.5, 2.5),
        (Costs(2, 3, 1, all_to_all=0.8), 4, 4),
    ):
        for schedule, expected in ((fused, whole), (split, half)):
            timeline = simulate(schedule, costs)
            assert timeline.ends[0][1] - timeline.starts[0][1] == pytest.approx(expected)


def test_a_waiting_receiver_by_hand() -> None:
    schedule = Schedule.of(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], placement=[0, 1], microbatches=2
    )
    assert simulate(schedule, Costs(p2p=0.5)).starts[1] == (1.5, 2.5, 3.5, 5.5)
    assert simulate(schedule, Costs(p2p=0.5), overlap_p2p=False).starts[1] == (1.5, 3.0, 4.0, 6.0)


def test_a_schedule_that_cannot_run() -> None:
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(schedules.interleaved(4, 5, 3, rounds="paper"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Costs(forward=-1), "forward is -1"),
        (lambda: Costs(input_grad=math.nan), "^input_grad is nan"),
        (lambda: Costs(weight_grad=(1.0, math.inf)), "weight_grad is inf"),
        (lambda: Costs(kept=1.5), "kept is 1.5; it is a share"),
        (lambda: Costs(recompute=1e101), "recompute is 1e\\+101; the largest cost is 1e\\+100"),
        (lambda: Costs(parts={"norms": (1.0, 1e101)}), r"parts\['norms'\] is 1e\+101; the largest cost is 1e\+100"),
        (
            lambda: Costs(bytes={"saved": "x"}),
            r"bytes\['saved'\] is 'x'; it must be a number, or a tuple with one number",
        ),
        (lambda: Costs(tensors={"skip": (1, 2)}), r"tensors\['skip'\] is \(1, 2\); it must be a number$"),
        (lambda: Costs(pools={"saved": 3}), r"pools\['saved'\] is 3; it must be the name of a pool"),
        (lambda: Costs(bytes={3: 1}), "bytes is {3: 1}; it must give each name its value"),
        (lambda: Costs(bytes=3), "bytes is 3; it must give each name its value"),
        (lambda: Costs(all_to_all=(0.5, 2)), "all_to_all"),
        (lambda: Costs(pair=-2), "pair is -2"),
        (lambda: Costs(bandwidth=0), "bandwidth is 0"),
        (lambda: Costs(forward="x"), "forward is 'x'; it must be a number, or a tuple with one number for each stage"),
        (lambda: Costs(weight_grad=(1.0, "x")), "weight_grad is .*; it must be a number, or a tuple"),
        (lambda: Costs(input_grad=((1.0,),)), "input_grad is .*; it must be a number, or a tuple"),
        (lambda: Costs(forward=None), "forward is None; it must be a number"),
        (lambda: Costs(forward=True), "forward is True; it must be a number"),
        (lambda: Costs(message=(1.0,)), "message is .*; it must be a number"),
        (lambda: Costs(p2p=(1.0, 2.0)), "p2p is .*; it must be a number, or a matrix"),
        (lambda: Costs(pair=((1.0, 2.0), 3.0)), "pair is .*; it must be a number, .*, or a matrix"),
        (lambda: Costs(microbatch=2.0), "microbatch is 2.0; it must be a tuple with one number for each micro-batch"),
        (
            lambda: simulate(schedules.gpipe(3, 2), Costs(forward=(1, 2))),
            "forward has 2 values and the schedule 3 stages",
        ),
        (lambda: simulate(schedules.gpipe(3, 2), Costs(p2p=((0, 1), (1, 0)))), "p2p is not a 3 x 3 matrix"),
    ],
)
def test_costs_refuse(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]


def test_costs_of_stages_have_each_time_that_a_kind_names() -> None:
    times = {name: (at + 1.0, at + 2.0) for at, name in enumerate(("backward", "gather", "scores", "combine"))}
    spread = StageCosts(Costs((1, 2), 3, 4, **times), 2)
    assert vars(spread).keys() == {*NAMES_OF_TIMES, "parts"}
    assert {name: spread.time_of(name) for name in times} == times
    assert (spread.forward, spread.input_grad, spread.recompute_backward) == ((1, 2), (3, 3), (2, 4))


def test_costs_of_slices_and_of_mean_micro_batches() -> None:
    costs = Costs((1, 2), 3, 4, 0.5, message=8, microbatch=(1, 3), slice_times=(0.25, 0.75), slice_sizes=(0.5, 0.5))
    assert costs.even(0.5) == Costs((0.5, 1), 1.5, 2, 0.5, message=4, activation=0.5)


def test_resized_costs() -> None:
    half = Costs((1, 2), 3, 4, 0.5, activation=8, pair=6, parts={"norms": (2, 4)}, bytes={"saved": 6}).resized(0.5)
    assert half == Costs((0.5, 1), 1.5, 2, 0.5, activation=4, pair=3, parts={"norms": (1, 2)}, bytes={"saved": 3})


NO_TIMES: dict[str, Any] = {
    **dict.fromkeys(("microbatch", "slice_times", "slice_sizes", "host_links", "tensors", "pools"), ()),
    **{"parts": {"norms": 0.7}, "bytes": {"saved": 3, "kept": 1, "params": 2, "grads": 5}, "beside": 2.0},
    **{"held": 0.5, "kept": 0.25, "all_to_all": 0.4, "message": 3.0, "activation": 4.0},
    **{"bandwidth": 5.0, "host_bandwidth": 7.0, "collective_bandwidth": 11.0, "sends": "free"},
}
# Every other field, those of later versions included, is a time: each is given, and each another one.
TIMES = {spec.name: 1.3 + 0.1 * at for at, spec in enumerate(fields(Costs)) if spec.name not in NO_TIMES}
OPTIONAL = {spec.name: None for spec in fields(Costs) if spec.default is None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *((), ("recompute=whole", "offload=kept"), ("recompute=norms", "reduce-gradients"), ("offload", "shard=1")),
        ("vocabulary=two", "embedding"),
    ],
    ids=",".join,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_time_is_scaled(name: str, words: tuple[str, ...]) -> None:
    """Busy times and the step are those of a machine as slow, whichever times are given, and memory stays."""
    schedule = build(name, 4, 8)
    if schedule.has_pairs and words:
        schedule = unpair(schedule)
    if len(schedule.routes) > 1 and "embedding" in words:
        return  # a vocabulary is spread along one route
    assert_scaled(transformed(schedule, words))


def test_a_pair_with_a_split_backward_is_scaled() -> None:
    cells = ["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0B1"]
    assert_scaled(Schedule.of([cells], placement=[0], microbatches=2))


def assert_scaled(schedule: Schedule) -> None:
    for times in (TIMES, TIMES | OPTIONAL):
        costs = Costs(**times | NO_TIMES)
        before, after = simulate(schedule, costs), simulate(schedule, costs.scaled(3.0))
        assert after.busy == pytest.approx([3 * busy for busy in before.busy])
        assert after.makespan == pytest.approx(3 * before.makespan)
        assert after.peak_memory == before.peak_memory
        assert after.peak_bytes == before.peak_bytes


def test_a_rank_waits_for_the_shortest_micro_batch_in_the_bound() -> None:
    """Rank 1 starts after a forward of micro-batch 0 at the earliest, and works for (1 + 3) 3."""
    assert lower_bound(schedules.one_f_one_b(2, 2), Costs(microbatch=(1.0, 3.0))) == 1 + 12


def test_lower_bound_is_reached() -> None:
    schedule = schedules.one_f_one_b(4, 8)
    assert lower_bound(schedule, split_backward=False) == simulate(schedule).makespan == 33
    assert lower_bound(schedules.zb_h2(4, 8)) == simulate(schedules.zb_h2(4, 8)).makespan == 27


def test_a_period_of_ranks_that_move_alike_takes_one_walk() -> None:
    assert period(build("1f1b", 1, 4), limit=1) == 12
    assert period(build("gpipe", 2, 3), Costs(1, 2, 3, 0.5), limit=2) == period(
        build("gpipe", 2, 3), Costs(1, 2, 3, 0.5)
    )


def test_a_pair_takes_the_time_of_its_own_micro_batches() -> None:
    """Micro-batch 2 is three times as long; the pairs F1|B0 and F2|B1 gain as much as their smaller factor allows."""
    programs = [["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2"]]
    schedule = Schedule.of(programs, placement=[0], microbatches=3)
    timeline = simulate(schedule, Costs(2, 2, 1, pair=4.0, microbatch=(1.0, 1.0, 3.0)))
    assert timeline.ends == ((2.0, 6.0, 6.0 + 3 * 2 + 3 - 1, 14.0 + 3 * 3),)


@pytest.mark.parametrize(("name", "expected"), [("1f1b", 93), ("zb-h1", 79), ("zb-h2", 72), ("gpipe", 93)])
def test_period_literals(name: str, expected: float) -> None:
    assert period(build(name, 8, 24)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_period_lies_between_work_and_makespan(name: str) -> None:
    timeline = simulate(build(name, 4, 8), Costs(1, 1.25, 0.75, 0.2))
    steps = period(timeline.schedule, timeline.costs)
    assert max(timeline.busy) - 1e-9 <= steps <= timeline.makespan + 1e-9


def test_figures_of_a_measured_timeline_that_starts_late_and_ends_early() -> None:
    """Rank 0 runs from 5 to 15, rank 1 from 7 to 18: no clock starts at 0, and no rank is as long as both together."""
    schedule = Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]], placement=[0, 1], microbatches=1)
    starts, ends = ((5.0, 13.0), (7.0, 9.0)), ((7.0, 15.0), (9.0, 18.0))
    timeline = Timeline(schedule, Costs(), starts, ends, source="measured")
    assert timeline.makespan == 13
    assert timeline.spans == (10, 11)
    assert timeline.busy == (4, 11)
    assert timeline.span_bubble_rate == 0
    assert timeline.bubble_rate == pytest.approx((9 + 2) / 26)
    ends = ((7.0, 15.0), (8.0, 18.0))
    assert Timeline(schedule, Costs(), starts, ends).span_bubble_rate == pytest.approx(1 - 10 / 11)


HOPS = Costs((1, 2, 1, 3), 1.5, (0.5, 0.2, 0.7, 1), p2p=0.25, message=3, bandwidth=10)


@pytest.mark.parametrize(
    ("schedule", "costs"),
    [
        *(
            (build(name, 4, 8), Costs(0.5, 1.0, 0.75))
            for name in ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved", "dualpipev")
        ),
        (build("zb-h1", 4, 9), HOPS),
        (build("zb-h1", 4, 9), replace(HOPS, sends="rendezvous")),
        (cut_sequences(build("1f1b", 4, 5), 2), Costs(p2p=0.25)),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_makespans_are_those_of_timelines(schedule: Schedule, costs: Costs) -> None:
    makespans = Makespans(schedule, costs)
    for seed in range(3):
        numbers = random.Random(seed)
        factors = [numbers.uniform(0.1, 3) for _ in range(schedule.microbatches)]
        expected = simulate(schedule, replace(costs, microbatch=tuple(factors))).makespan
        assert makespans.of(factors) == makespans.of(factors, expected) == pytest.approx(expected, rel=1e-12)
        assert makespans.of(factors, 0.999 * expected) == math.inf
        assert makespans.timeline(factors).makespan == expected
