"""Slices of sequences: their cells, their order, their codes, times and memory."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.errors import ArgumentError, ScheduleError
from pipeloom.schedule.channels import message_counts, message_sizes, traffic
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.json_form import from_json, to_json

TWO = [
    ["0F0.0", "0F0.1", "0F1.0", "0B0.1", "0B0.0", "0F1.1", "0I1.1", "0W1.1", "0B1.0"],
    ["1F0.0", "1F0.1", "(1F1.0;1B0.1)OVERLAP_F_B", "1B0.0", "1F1.1", "1R1.1", "1B1.1", "(1R1.0;1B1.0)"],
]


def of(programs: list[list[str]], slices: int = 2) -> pl.Schedule:
    return pl.Schedule.of(programs, placement=[0, 1], microbatches=2, slices=slices)


def test_cells_survive_every_form_and_the_schedule_is_sound() -> None:
    schedule = of(TWO)
    pl.check(schedule, transport="batched")
    assert [[str(cell) for cell in program] for program in schedule.programs] == TWO
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), name="custom") == schedule
    assert (schedule.units, schedule.unit_names) == (4, ("0.0", "0.1", "1.0", "1.1"))


@pytest.mark.parametrize(
    ("rank", "first", "second", "words"),
    [
        (
            0,
            "0F0.0",
            "0F0.1",
            "rank 0: 0F0.1 stands before slice 0 of its stage and micro-batch; a forward needs the keys",
        ),
        (
            0,
            "0B1.0",
            "0I1.1",
            "rank 0: 0B1.0 stands before slice 1 of its stage and micro-batch; a backward needs the grad",
        ),
    ],
)
def test_slices_out_of_order_are_named(rank: int, first: str, second: str, words: str) -> None:
    swap = {first: second, second: first}
    rows = [["0F0.0", "0F0.1", "0B0.1", "0B0.0", "0F1.0", "0F1.1", "0I1.1", "0B1.0", "0W1.1"]]
    rows = [[swap.get(cell, cell) for cell in row] for row in rows]
    schedule = pl.Schedule.of(rows, placement=[0], microbatches=2, slices=2)
    with pytest.raises(ScheduleError, match=words):
        pl.check(schedule)


@pytest.mark.parametrize(
    ("cell", "slices", "words"),
    [
        ("0F0.2", 2, r"rank 0, action 0: 0F0.2 names slice 2 of 2 \(0..1\)"),
        ("0F0.1", 1, r"0F0.1 names slice 1 of 1 \(0..0\)"),
        ("0F0", 2, "0F0 names no slice of 2; nearest: 0F0.0"),
        ("0F0.", 2, "'0F0.' is not an action"),
        ("0UNSHARD.1", 2, "'0UNSHARD.1' is not an action"),
        ("0F0.0", 0, "slices is 0; a micro-batch has a whole number of at least 1"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused(cell: str, slices: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        of([[cell], []], slices)


def test_a_missing_slice_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1 micro-batch 1 slice 0 \(rank 1\) has no backward: 1B1.0 \(or"):
        pl.check(of([TWO[0], TWO[1][:-1]]))


def test_slices_share_a_micro_batchs_time_memory_and_messages() -> None:
    rows = [["0F0.0", "0F0.1", "0B0.1", "0B0.0"], ["1F0.0", "1F0.1", "1B0.1", "1B0.0"]]
    schedule = pl.Schedule.of(rows, placement=[0, 1], microbatches=1, slices=2)
    costs = pl.Costs(slice_times=(0.25, 0.75), slice_sizes=(0.625, 0.375), message=8, bandwidth=2)
    timeline = pl.simulate(schedule, costs)
    # slice 0 arrives at 0.25 + 8 * 0.625 / 2, slice 1 at 1 + 8 * 0.375 / 2
    assert timeline.starts[1] == (2.75, 3.0, 3.75, 5.25)
    assert [level for _, level in timeline.memory_curve[1]] == [0.625, 1.0, 0.625, 0.0]
    assert message_sizes(schedule, costs) == {
        pl.schedule.channels.Channel(0, 1, "activation"): 8.0,
        (1, 0, "gradient"): 8.0,
    }
    assert set(message_counts(schedule).values()) == {2}
    assert [message.words for entry in traffic(schedule)[1] for message in entry.receives] == [
        f"the output of stage 0 micro-batch 0 slice {part}" for part in range(2)
    ]
    measured = pl.Timeline.measured(schedule, timeline.starts, timeline.ends).costs
    assert (measured.forward, measured.slice_times) == ((1.0, 1.0), (0.25, 0.75))
    assert pl.simulate(schedule).makespan == 3 + 3 / 2
    assert pl.lower_bound(schedule, costs) <= timeline.makespan


@pytest.mark.parametrize(
    ("shares", "words"),
    [((0.5, 0.4), "shares add up to 1"), ((0.5, 0.25, 0.25), "has 3 values and the schedule 2 slices")],
)
def test_shares_of_slices_are_checked(shares: tuple[float, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pl.simulate(of(TWO), pl.Costs(slice_times=shares))
