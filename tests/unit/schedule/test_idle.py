"""Why a rank idles: every gap has its cause, and the causes add up to the idle time."""

from __future__ import annotations

from dataclasses import replace

import pipeloom as pl
from pipeloom.schedule.timeline import Gap


def test_each_cause_of_1f1b() -> None:
    """Ranks 0 to 2 stop after their warm-up for memory; the last one waits for its first input, then for the end."""
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=3, microbatches=4), pl.Costs(p2p=0.5))
    first, _, last = timeline.gaps
    assert first[0] == Gap(3.0, 9.0, "memory", 3)
    assert last[:2] == (Gap(0.0, 2.5, "dependency", 0), Gap(2.5, 3.0, "message", 0))
    assert last[-1].cause == "end of step"
    assert last[-1].end == timeline.makespan
    assert timeline.idle_by_cause[2]["memory"] == 0


def test_a_schedule_that_has_room_waits_for_a_dependency_and_not_for_memory() -> None:
    timeline = pl.simulate(pl.schedules.gpipe(ranks=3, microbatches=4))
    assert [gap.cause for gap in timeline.gaps[0]] == ["dependency"]
    assert sum(row["memory"] for row in timeline.idle_by_cause) == 0


def test_a_forward_that_there_is_room_for_does_not_wait_for_memory() -> None:
    """Rank 0 holds two micro-batches later on, so that it could take the second one while it waits for the first."""
    schedule = pl.Schedule.of(
        [["0F0", "0B0", "0F1", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]],
        placement=[0, 1],
        microbatches=3,
    )
    assert {gap.cause for gap in pl.simulate(schedule).gaps[0]} == {"dependency"}


def test_a_rank_without_actions_idles_for_the_whole_step() -> None:
    programs, routes = [["0F0", "0B0"], []], [[0], [1]]
    timeline = pl.simulate(pl.Schedule.of(programs, placement=[0, 1], microbatches=1, routes=routes, route_of=[0]))
    assert [sum(phases) for phases in timeline.idle_by_phase] == [0.0, 3.0]
    assert timeline.gaps == ((), (Gap(0.0, 3.0, "end of step", 0),))


def test_memory_begins_when_the_forward_could_have_run() -> None:
    """Rank 1's next forward has its input 2 after the gap begins: until then the rank waits for a dependency."""
    schedule = pl.Schedule.of(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], placement=[0, 1], microbatches=2
    )
    timeline = pl.simulate(schedule, pl.Costs(forward=(1, 1), input_grad=(1, 3)))
    assert [gap.cause for gap in timeline.gaps[1]] == ["dependency", "end of step"]
    deep = pl.Schedule.of(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"], ["2F0", "2B0", "2F1", "2B1"]],
        placement=[0, 1, 2],
        microbatches=2,
    )
    gaps = pl.simulate(deep, pl.Costs(forward=(3, 1, 1))).gaps[1]
    assert gaps[:3] == (Gap(0.0, 3.0, "dependency", 0), Gap(4.0, 6.0, "dependency", 1), Gap(6.0, 7.0, "memory", 1))


def test_what_is_there_and_does_not_run_is_overhead() -> None:
    timeline = pl.simulate(pl.schedules.gpipe(ranks=1, microbatches=2))
    late = replace(
        timeline,
        starts=(tuple(s + i for i, s in enumerate(timeline.starts[0])),),
        ends=(tuple(e + i for i, e in enumerate(timeline.ends[0])),),
    )
    assert [(gap.cause, gap.end - gap.start) for gap in late.gaps[0]] == [("overhead", 1.0)] * 3


def test_a_message_that_is_there_already_is_waited_for_no_longer() -> None:
    """Rank 1 is free at 3, has had the second input since 2, and begins at 5."""
    schedule = pl.Schedule.of([["0F0", "0F1"], ["1F0", "1F1"]], placement=[0, 1], microbatches=2)
    timeline = pl.Timeline(schedule, pl.Costs(), ((0.0, 1.0), (1.0, 5.0)), ((1.0, 2.0), (3.0, 6.0)), "measured")
    assert timeline.gaps[1] == (Gap(0.0, 1.0, "dependency", 0), Gap(3.0, 5.0, "overhead", 1))


def test_a_receiver_that_waits_for_the_whole_hop() -> None:
    timeline = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=1), pl.Costs(p2p=2), overlap_p2p=False)
    assert timeline.gaps[1][:2] == (Gap(0.0, 1.0, "dependency", 0), Gap(1.0, 3.0, "message", 0))
