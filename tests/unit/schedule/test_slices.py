"""Slices of sequences: their cells, their order, their codes, times and memory."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from batch_walk import check_batches
from pipeloom import schedules
from pipeloom.draw import html, svg
from pipeloom.draw.terminal import terminal
from pipeloom.errors import ArgumentError, ScheduleError, UsageError
from pipeloom.schedule.channels import message_counts, message_sizes, traffic
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.slices import balanced_cuts, even_cuts, longer_than_whole

TWO = [
    ["0F0.0", "0F0.1", "0F1.0", "0B0.1", "0B0.0", "0F1.1", "0I1.1", "0W1.1", "0B1.0"],
    ["1F0.0", "1F0.1", "(1F1.0;1B0.1)OVERLAP_F_B", "1B0.0", "1F1.1", "1R1.1", "1B1.1", "(1R1.0;1B1.0)"],
]


def of(programs: list[list[str]], slices: int = 2) -> pl.Schedule:
    return pl.Schedule.of(programs, placement=[0, 1], microbatches=2, slices=slices)


def test_cells_survive_every_form_and_the_schedule_is_sound() -> None:
    schedule = of(TWO)
    pl.check(schedule)
    check_batches(traffic(schedule))
    assert [[str(cell) for cell in program] for program in schedule.programs] == TWO
    assert from_json(to_json(schedule)) == schedule
    with pytest.raises(
        ScheduleError, match="cuts sequences into 2 slices, which the CSV form cannot say; write it as J"
    ):
        to_csv(schedule)
    with pytest.raises(
        ScheduleError, match=r"x:1:5: 0F0.1 names a slice, which the CSV form cannot say; write it as J"
    ):
        from_csv("0B0,0F0.1", source="x")
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
    assert (
        pl.lower_bound(schedule, costs) == 1 + 0.25 + 8 * 0.375 / 2 + 2
    )  # F and B of a micro-batch behind the least ramp
    assert timeline.idle_by_cause[1]["message"] == 8 * 0.625 / 2
    assert timeline.waited_for(1, 1) == (1, 0)  # not for the message of slice 1, which arrives at 2.5


@pytest.mark.parametrize(
    ("shares", "words"),
    [((0.5, 0.4), "shares add up to 1"), ((0.5, 0.25, 0.25), "has 3 values and the schedule 2 slices")],
)
def test_shares_of_slices_are_checked(shares: tuple[float, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pl.simulate(of(TWO), pl.Costs(slice_times=shares))


# -- families and transforms ---------------------------------------------------------------------------------------------


def published(ranks: int, microbatches: int, slices: int) -> pl.Schedule:
    """Seq1F1B as its paper gives it, written out."""
    programs = []
    for r in range(ranks):
        units = [f"{mb}.{part}" for mb in range(microbatches) for part in range(slices)]
        mirrored = [f"{mb}.{slices - 1 - part}" for mb in range(microbatches) for part in range(slices)]
        forwards, backwards = [f"{r}F{unit}" for unit in units], [f"{r}B{unit}" for unit in mirrored]
        warmup = min(ranks - r - 2 + slices, len(units))
        program = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            program += [forward, backward]
        programs.append(program + backwards[len(units) - warmup :])
    return pl.Schedule.of(programs, placement=range(ranks), microbatches=microbatches, slices=slices)


@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_seq1f1b_is_never_longer_than_the_published_order(slices: int) -> None:
    for ranks, microbatches, attention in [
        (2, 1, 0.6),
        (2, 5, 0.0),
        (3, 4, 0.3),
        (4, 2, 0.6),
        (4, 8, 0.6),
        (8, 8, 0.9),
    ]:
        ours = schedules.seq1f1b(ranks, microbatches, slices)
        pl.check(ours)
        for cuts in (balanced_cuts(2**14, slices, attention), even_cuts(2**14, slices, attention)):
            theirs = pl.simulate(published(ranks, microbatches, slices), cuts.costs()).makespan
            assert pl.simulate(ours, cuts.costs()).makespan <= theirs + 1e-9


@pytest.mark.parametrize(("slices", "peak"), [(2, 4.64), (4, 3.03), (8, 2.16)])
def test_balanced_cuts_give_the_makespan_and_the_peak_of_the_formulas(slices: int, peak: float) -> None:
    schedule = schedules.seq1f1b(8, 16, slices)
    even = pl.simulate(schedule)
    assert even.peak_memory[0] == pytest.approx(1 + 7 / slices)
    timeline = pl.simulate(schedule, balanced_cuts(2**20, slices, 0.6).costs())
    assert timeline.makespan == pytest.approx(3 * (16 + 7 / slices), rel=1e-5)
    assert timeline.peak_memory[0] == pytest.approx(peak, abs=0.005)
    assert timeline.peak_activations[0] == 7 + slices


def test_even_cuts_of_attention_lose() -> None:
    whole, cut = schedules.one_f_one_b(4, 8), schedules.build("1f1b", 4, 8, options={"slices": 4})
    even, balanced = even_cuts(2**15, 4, 0.6).costs(), balanced_cuts(2**15, 4, 0.6).costs()
    assert [round(pl.simulate(*pair).makespan, 1) for pair in ((cut, even), (whole, None), (cut, balanced))] == [
        36.7,
        33,
        26.3,
    ]
    assert longer_than_whole(cut, whole, balanced) is None
    assert "4 slices of unequal time take 36.7 and whole sequences 33" in (longer_than_whole(cut, whole, even) or "")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_cut_in_place(name: str) -> None:
    whole = schedules.build(name, 4, 8)
    for slices in (2, 3):
        cut = schedules.cut_sequences(whole, slices)
        pl.check(cut)
        assert pl.simulate(cut).makespan <= pl.simulate(whole).makespan + 1e-9
        assert max(pl.simulate(cut).peak_memory) <= max(pl.simulate(whole).peak_memory) + 1e-9
    transformed = schedules.transformed(whole, ["slices=3"])
    assert (transformed, transformed.microbatches, transformed.options) == (cut, 8, whole.options)


@pytest.mark.parametrize(
    ("name", "chunks", "peak"),
    [
        ("1f1b", 1, 1.75),
        ("interleaved", 2, 3.5),
        ("zb-h1", 1, 1.75),
        ("interleaved-zb", 2, 2.75),
        ("1f1b-overlap", 1, 2.75),
    ],
)
def test_the_order_of_slices_holds_less_in_the_same_time(name: str, chunks: int, peak: float) -> None:
    """Peaks of micro-batches per chunk: with 4 slices the warm-up of whole micro-batches is one of slices, and 3 slices more."""
    cut = schedules.build(name, 4, 8, chunks, {"slices": 4})
    in_place = schedules.cut_sequences(schedules.build(name, 4, 8, chunks), 4)
    assert pl.simulate(cut).makespan == pytest.approx(pl.simulate(in_place).makespan)
    assert pl.simulate(cut).peak_memory[0] == peak < pl.simulate(in_place).peak_memory[0]


def test_copies_are_cut_in_the_order_of_the_slices_and_take_the_time_of_their_bytes() -> None:
    offloaded = schedules.offload(schedules.one_f_one_b(4, 8), pl.Costs(host_bandwidth=1))
    cut = schedules.cut_sequences(offloaded, 2)
    pl.check(cut)
    assert [str(cell) for cell in cut.programs[0][:4]] == ["0F0.0", "0F0.1", "0O0.0", "0O0.1"]
    assert (offloaded.slots, cut.slots) == ((("saved", 2.0),), (("saved", 4.0),))
    timeline = pl.simulate(cut, pl.Costs(host_bandwidth=1, slice_times=(0.25, 0.75), slice_sizes=(0.625, 0.375)))
    assert (timeline.starts[0][2], timeline.ends[0][2]) == (0.25, 0.25 + 0.625)


def test_two_routes_are_found_complete_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("pipeloom.schedule.check")
    monkeypatch.setattr(module, "_diagnose", lambda schedule: pytest.fail(f"no fault in {schedule}"))
    pl.check(schedules.cut_sequences(schedules.build("chimera", 4, 8), 2))


def test_a_v_takes_the_shift_that_keeps_its_rhythm() -> None:
    assert pl.simulate(schedules.build("v-half", 4, 8, None, {"slices": 4})).makespan == 52.75


def test_a_family_plans_with_the_costs_and_the_memory_of_slices() -> None:
    """Two micro-batches are eight slices, and three more are held because backwards come later."""
    timeline = pl.simulate(schedules.build("zb-auto", 4, 8, None, {"slices": 4, "memory": 2}))
    assert timeline.peak_memory == (2.75,) * 4


def test_weights_of_the_last_micro_batch_are_those_of_its_slices() -> None:
    deferred = schedules.transformed(schedules.seq1f1b(2, 3, 2), ["defer-last-stage-weights=1"])
    assert [str(cell) for cell in deferred.programs[1][-4:]] == ["1I2.1", "1W2.1", "1I2.0", "1W2.0"]


def test_a_file_of_too_few_actions_for_its_slices_is_refused_before_they_are_laid_out() -> None:
    form = to_json(of(TWO)).replace('"slices": 2', '"slices": 1000000')
    with pytest.raises(ScheduleError, match="are too few"):
        from_json(form)


@pytest.mark.parametrize("form", ["fused", "two"])
def test_a_spread_vocabulary_is_cut_in_place(form: str) -> None:
    spread = schedules.transformed(schedules.one_f_one_b(4, 8), [f"vocabulary={form}"])
    cut = schedules.cut_sequences(spread, 2)
    pl.check(cut)
    assert pl.simulate(cut).makespan < pl.simulate(spread).makespan
    last = [str(cell) for cell in cut.programs[3]]
    assert all(last[last.index(f"7{kind}0.0") + 1] == f"7{kind}0.1" for kind in ("BROADCAST", "S", "T"))


def test_transforms_behind_slices_keep_them() -> None:
    schedule = schedules.build("interleaved", 2, 3, 2, {"slices": 2, "cooldown": "split"})
    words = ["recompute", "shard=2"]
    timeline = pl.simulate(schedules.transformed(schedule, words), pl.Costs(kept=0.125))
    pl.check(timeline.schedule)
    assert timeline.schedule.slices == 2
    assert max(timeline.peak_memory) < max(pl.simulate(schedule).peak_memory)
    offloaded = schedules.offload(schedules.seq1f1b(4, 8, 2), pl.Costs(host_bandwidth=1))
    pl.check(offloaded)
    assert "0O0.0" in map(str, offloaded.programs[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: schedules.build("chimera", 4, 8, None, {"slices": 2}),
            "would take different routes; the transform slices=2 cuts it in place",
        ),
        (
            lambda: schedules.build("v-half", 6, 2, None, {"slices": 4}),
            "would take longer than in place; use the transform",
        ),
        (lambda: schedules.build("gis", 4, 8, 2, {"slices": 2, "offload_chunks": 1}), "actions beside the computation"),
        (
            lambda: schedules.build("1f1b", 4, 8, None, {"slices": 0}),
            "slices is 0; it must be a whole number of at least 1",
        ),
        (
            lambda: schedules.by_slices(schedules.one_f_one_b(2, 5), 2),
            "its 5 micro-batches are no multiple; nearest: 4",
        ),
        (lambda: schedules.by_slices(schedules.seq1f1b(2, 2), 2), "it is cut into 4 already"),
        (lambda: schedules.build("zzzzzzzzz", 2, 2), "seq1f1b"),
        (lambda: schedules.cut_sequences(schedules.seq1f1b(2, 2), 2), "is cut into 4 slices already"),
        (
            lambda: balanced_cuts(100, 4, 0.5, 16),
            "100 tokens cannot be cut into 4 slices of multiples of 16 tokens; nearest",
        ),
        (lambda: even_cuts(32, 4, 0.5, 16), "nearest length: 64"),
        (lambda: balanced_cuts(64, 4, 1.5), "attention is 1.5; it is a share between 0 and 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        make()


@given(
    slices=st.integers(1, 9),
    blocks=st.integers(0, 200),
    multiple=st.sampled_from([1, 2, 16]),
    attention=st.floats(0, 1),
)
@settings(max_examples=50, deadline=None)
def test_balanced_cuts_are_even_in_time_up_to_a_multiple(
    slices: int, blocks: int, multiple: int, attention: float
) -> None:
    length = (slices + blocks) * multiple
    cuts = balanced_cuts(length, slices, attention, multiple)
    assert (cuts.positions[0], cuts.positions[-1], len(cuts.positions)) == (0, length, slices + 1)
    assert all(after - before >= multiple and before % multiple == 0 for before, after in pairwise(cuts.positions))
    assert sum(cuts.times) == pytest.approx(1)
    assert cuts.sizes == pytest.approx([(b - a) / length for a, b in pairwise(cuts.positions)])
    if (
        blocks > 20 * slices
    ):  # a block's cost is at most (1 + attention) / blocks, and each border is off by half of one
        assert max(cuts.times) - min(cuts.times) <= 2 * (1 + attention) / (slices + blocks) + 1e-9


def test_drawings_label_slices() -> None:
    timeline = pl.simulate(schedules.seq1f1b(2, 2, 2))
    assert ">1.1</text>" in svg([timeline], 960)
    assert "F0.1" in terminal(timeline, width=400)
    assert "2 micro-batches, 2 slices" in terminal(timeline, width=400)
    assert '"slices":2' in html([timeline])
