"""Senders that wait: what their calls hold, against a second simulator, and what deadlocks with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeloom import Costs, Schedule, check, lower_bound, schedules, simulate
from pipeloom.draw.figures import assumptions
from pipeloom.draw.html import html
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.interop.systems import sends_of
from pipeloom.schedule import Action, Pair
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.families import build
from pipeloom.schedule.simulate import run_once
from pipeloom.schedule.transforms import transformed
from pipeloom.traces.timelines import costs_dict, costs_of_dict

SENDS = ("free", "rendezvous", "coupled")


def actions_of(cell: Action | Pair) -> tuple[Action, ...]:
    return (cell,) if isinstance(cell, Action) else (cell.forward, cell.backward)


class SecondSimulator:
    """Starts raised until no rule is broken, from the programs of computations of one route."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        alone = simulate(schedule, replace(costs, sends="free", p2p=0.0, message=0.0))
        self.lasts = [
            [e - s for s, e in zip(*rows, strict=True)] for rows in zip(alone.starts, alone.ends, strict=True)
        ]
        self.starts = [[0.0] * len(program) for program in schedule.programs]
        self.schedule, self.costs, self.rank_of = schedule, costs, schedule.placement
        self.place = {
            ("F" if action.kind == "F" else "I", action.stage, action.microbatch): (rank, at)
            for rank, program in enumerate(schedule.programs)
            for at, cell in enumerate(program)
            for action in actions_of(cell)
            if action.kind != "W"
        }

    def ended(self, rank: int, at: int) -> float:
        return self.starts[rank][at] + self.lasts[rank][at] if at >= 0 else 0.0

    def other_end(self, action: Action, sent: bool) -> tuple[str, int, int] | None:
        """The action that receives what this one sends, or that sends what it receives."""
        step = 1 if (action.kind == "F") == sent else -1
        key = "F" if action.kind == "F" else "I", action.stage + step, action.microbatch
        return key if action.kind != "W" and key in self.place else None

    def least(self, rank: int, at: int) -> float:
        """The earliest start of an entry, from the others' as they stand."""
        sends = self.costs.sends
        own = self.ended(rank, at - 1)
        moments = [own]
        for action in actions_of(self.schedule.programs[rank][at]):
            if (key := self.other_end(action, sent=False)) is not None:
                source = self.place[key]
                hop = self.costs.hop(source[0], rank)
                moments += [self.ended(*source) + hop, own + (hop if sends != "free" else 0.0)]
        for action in actions_of(self.schedule.programs[rank][at - 1]) if at and sends != "free" else ():
            if (key := self.other_end(action, sent=True)) is not None and self.place[key][0] != rank:
                receiver, behind = self.place[key]
                hop = self.costs.hop(rank, receiver) if sends == "coupled" else 0.0
                moments += [self.ended(receiver, behind - 1) + hop, own + hop]
        return max(moments)

    def run(self) -> list[list[float]]:
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.starts):
                for at, start in enumerate(program):
                    later = self.least(rank, at)
                    if later > start + 1e-12:
                        program[at], moved = later, True
            assert max(map(max, self.starts)) < 1e4, "it does not end"
        return self.starts


@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "gis", "1f1b-overlap", "interleaved-overlap"])
def test_calls_against_a_second_simulator(name: str, sends: Any) -> None:
    schedule = build(name, 4, 8, None)
    links = tuple(tuple((3 * here + 5 * there) % 7 / 8 for there in range(4)) for here in range(4))
    costs = Costs(1, 1.3, 0.8, p2p=links, message=2.0, bandwidth=8.0, sends=sends)
    timeline = simulate(schedule, costs)
    for starts, others in zip(timeline.starts, SecondSimulator(schedule, costs).run(), strict=True):
        assert starts == pytest.approx(others)
    assert lower_bound(schedule, costs) <= timeline.makespan + 1e-9
    assert [sum(row.values()) for row in timeline.idle_by_cause] == pytest.approx(timeline.idle)
    assert all(row["overhead"] == 0 for row in timeline.idle_by_cause)
    path = timeline.critical_path  # no gap but messages
    gaps = [timeline.starts[r][at] - timeline.ends[q][b] for (q, b), (r, at) in zip(path, path[1:], strict=False)]
    assert all(-1e-9 <= gap <= 1 + 1e-9 for gap in gaps)
    assert timeline.starts[path[0][0]][path[0][1]] == 0


@pytest.mark.parametrize(
    ("sends", "starts"),
    [
        ("free", [[0, 1, 2], [1.5, 4.5, 7.5]]),
        ("rendezvous", [[0, 1, 4.5], [1.5, 5, 8.5]]),  # F2 waits for rank 1, which posts the receive of F1 at 4.5
        ("coupled", [[0, 1.5, 5], [1.5, 5, 8.5]]),  # both wait: rank 0 for a late partner, then both for the message
    ],
)
def test_both_ends_are_held_where_the_partner_arrives_late(sends: Any, starts: list[list[float]]) -> None:
    costs = Costs(forward=(1, 3), p2p=0.5, sends=sends)
    timeline = simulate(schedules.gpipe(2, 3), costs)
    assert [list(row[:3]) for row in timeline.starts] == starts


def test_a_call_that_both_sides_use_takes_the_slower_direction_once() -> None:
    # rank 0 sends F1 and receives B0 in one call, of which rank 1 has the other ends
    costs = Costs(forward=1, input_grad=1, weight_grad=1, p2p=((0, 2), (3, 0)), sends="coupled")
    timeline = simulate(schedules.one_f_one_b(2, 3), costs)
    reached = timeline.ends[1][1]
    assert timeline.starts[0][2] == timeline.starts[1][2] == reached + 3


def test_a_rank_that_both_neighbours_wait_for() -> None:
    # rank 1's call behind F0 has a send to rank 2 and a receive from rank 0: both ranks wait for the one moment
    costs = Costs(forward=(1, 5, 1), sends="coupled")
    timeline = simulate(schedules.gpipe(3, 3), costs)
    assert timeline.starts[0][:3] == (0, 1, 6)
    assert timeline.starts[2][:3] == (6, 11, 16)


def test_one_call_that_two_ranks_wait_for() -> None:
    # rank 0 behind F1 and rank 2 behind I0 wait until rank 1 reaches the call before its pair
    rows = """0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
1F0,(1F1;1I0)OVERLAP_F_B,1F2,1I1,1I2,1W0,1W1,1W2
2F0,2I0,2W0,2F1,2I1,2W1,2F2,2I2,2W2"""
    timeline = simulate(from_csv(rows), Costs(forward=(1, 2, 3), sends="coupled"))
    assert (timeline.starts[0][2], timeline.starts[2][2], timeline.starts[1][1]) == (3, 7, 7)


def test_calls_begin_with_the_step() -> None:
    assert simulate(schedules.gpipe(2, 1), Costs(forward=0.1, sends="coupled")).starts[1][0] == 0.1
    # and where a rank begins later than another, at its own beginning
    later = run_once(schedules.gpipe(2, 2), Costs(p2p=0.5, sends="coupled"), clocks=[0.0, 7.0])
    assert later.starts[0][:2] == [0.0, 7.5]
    assert later.starts[1][0] == 7.5


def test_copies_run_beside_calls() -> None:
    schedule = transformed(schedules.one_f_one_b(3, 6), ["offload"])
    plain, coupled = (
        simulate(schedule, Costs(p2p=0.5, host_bandwidth=8, sends=sends)) for sends in ("free", "coupled")
    )
    alone = simulate(schedules.one_f_one_b(3, 6), Costs(p2p=0.5, sends="coupled"))
    assert plain.makespan < coupled.makespan == pytest.approx(alone.makespan)


@pytest.mark.parametrize("sends", SENDS[1:])
def test_check_names_what_deadlocks(sends: Any) -> None:
    schedule = schedules.zbv(3, 6)
    check(schedule)
    with pytest.raises(ScheduleError, match=f"deadlocks with {sends} sends; the shortest cycle:\n  rank 1 is at"):
        check(schedule, sends=sends)
    with pytest.raises(ScheduleError, match=f"with {sends} sends"):
        simulate(schedule, Costs(sends=sends))


def test_check_of_what_runs_with_calls_and_not_in_their_absence_is_as_ever() -> None:
    check(schedules.one_f_one_b(4, 8), sends="coupled")
    codes = [row[::-1] for row in schedules.gpipe(2, 2).codes]
    with pytest.raises(ScheduleError, match="deadlocks; the shortest"):
        check(replace(schedules.gpipe(2, 2), codes=tuple(codes)), sends="coupled")


def test_a_family_and_a_transform_choose_their_order_as_if_no_sender_waited() -> None:
    free, held = Costs(p2p=0.5), Costs(p2p=0.5, sends="coupled")
    make: Callable[[Costs], Schedule] = lambda costs: build("zb-auto", 3, 6, None, {}, costs)  # noqa: E731
    assert make(free).codes == make(held).codes
    words = ["split-cooldown"]
    assert transformed(make(free), words, free).codes == transformed(make(free), words, held).codes


def test_sends_of_other_systems() -> None:
    one, looped, twice = schedules.one_f_one_b(2, 4), schedules.interleaved(2, 4, 2), schedules.gpipe(2, 4)
    table = {
        system: [sends_of(system, each) for each in (one, looped, twice)]
        for system in ("pipeloom", "megatron", "torchtitan")
    }
    assert table == {
        "pipeloom": ["free", "free", "free"],
        "megatron": ["coupled", "free", "coupled"],
        "torchtitan": ["coupled", "free", "free"],
    }


def test_costs_keep_and_refuse_sends() -> None:
    costs = Costs(sends="coupled")
    assert costs_of_dict(json.loads(json.dumps(costs_dict(costs))), "here") == costs
    assert costs.scaled(2).sends == costs.resized(2).sends == "coupled"
    for value, words in (("couple", "did you mean 'coupled'"), (3, "must be one of free, rendezvous, coupled")):
        with pytest.raises(UsageError, match=f"sends is .*{words}"):
            Costs(sends=value)  # type: ignore[arg-type]


def test_the_page_says_how_senders_wait_and_does_not_simulate_them() -> None:
    timeline = simulate(schedules.one_f_one_b(2, 4), Costs(p2p=0.5, sends="coupled"))
    assert assumptions(timeline).endswith("; coupled sends")
    assert '"still":{' in html(timeline)
    assert '"still":null' in html(simulate(schedules.one_f_one_b(2, 4), Costs(p2p=0.5)))
