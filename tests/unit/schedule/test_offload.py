"""Copies of what forwards save to host memory and back: cells, what `check` demands, times, memory and the transform."""

from __future__ import annotations

from random import Random

import pytest

import pipeloom as pl
from batch_walk import check_batches
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.channels import traffic
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.model import parts
from pipeloom.schedule.offload import with_copies
from pipeloom.schedule.simulate import worst_peaks
from pipeloom.schedule.transforms import transformed

CELLS = ("0F0", "0O0", "0F1", "0O1", "0L0", "0B0", "0L1", "0B1")


def test_copies_of_what_is_kept_need_a_recomputation() -> None:
    with pytest.raises(
        UsageError, match="nothing is recomputed in an action of its own; put the transform recompute=wh"
    ):
        transformed(build("1f1b", 2, 4), ["recompute", "offload=kept"])


def one(*cells: str, microbatches: int = 1) -> Schedule:
    return Schedule.of([cells], placement=[0], microbatches=microbatches)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["0F0", "0O0", "0B0"], "0B0 needs what is saved .*; 0F0 or 0R0 or 0L0 makes it"),
        (["0F0", "0L0", "0B0"], "0L0 needs what is saved on the host .*; 0O0 makes it"),
        (["0F0", "0O0", "0L0", "0L0", "0B0"], "0L0 appears twice"),
        (["0F0", "0B0", "0O0"], "0O0 needs what is saved of"),
    ],
)
def test_an_order_that_cannot_run(cells: list[str], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check(one(*cells))


def test_times_and_memory_by_hand() -> None:
    """A copy takes 6 bytes / 4, is issued with the computation before it and waits for its F; each way is a queue."""
    costs = Costs(2, 1, 1, host_bandwidth=4, bytes={"saved": 6, "params": 10})
    timeline = simulate(one(*CELLS, microbatches=2), costs)
    assert timeline.starts == ((0, 2, 2, 4, 3.5, 5, 5.5, 7),)
    assert timeline.ends == ((2, 3.5, 4, 5.5, 5, 7, 7, 9),)
    assert timeline.peak_bytes == {"device": (22,), "host": (12,)}
    assert timeline.peak_activations == (2,)
    assert timeline.busy == (8,)
    assert timeline.idle_by_cause[0] == {
        "dependency": 0, "message": 0, "memory": 1, "end of step": 0, "overhead": 0
    }  # fmt: skip
    free = simulate(one(*CELLS, microbatches=2), Costs(activation=3, kept=1 / 3, host_bandwidth=4))
    assert free.ends[0][1] - free.starts[0][1] == 0.5


def test_what_is_kept_travels_by_its_own_cells() -> None:
    """A copy of 2 bytes / 4 each way; R needs what is kept, and while it is in host memory the device holds nothing of it."""
    schedule = one("0F0", "0OKEPT0", "0F1", "0LKEPT0", "0R0", "0B0", "0R1", "0B1", microbatches=2)
    check(schedule)
    assert from_json(to_json(schedule)) == from_csv(to_csv(schedule), "custom") == schedule
    costs = Costs(2, 1, 1, host_bandwidth=4, bytes={"kept": 2, "saved": 6, "params": 10})
    timeline = simulate(schedule, costs)
    assert timeline.starts == ((0, 2, 2, 2.5, 4, 6, 8, 10),)
    assert timeline.ends == ((2, 2.5, 4, 3, 6, 8, 10, 12),)
    assert timeline.peak_bytes == {"device": (20,), "host": (2,)}
    assert simulate(schedule, Costs(activation=4, kept=0.5, host_bandwidth=4)).ends[0][1] == 1.5
    with pytest.raises(ScheduleError, match=r"0R0 needs what is kept .*; 0F0 or 0LKEPT0 makes it"):
        check(one("0F0", "0OKEPT0", "0R0", "0B0", "0LKEPT0"))


def test_slices_recomputed_from_host_memory_take_no_more_of_the_device_for_longer_sequences() -> None:
    """At slices of one size, 4 or 16 a sequence; without copies, each slice more is held until its backward."""
    peaks = {}
    for slices in (4, 16):
        costs = Costs(bytes={"kept": slices, "saved": 10 * slices})  # of a micro-batch
        recomputed = transformed(pl.schedules.seq1f1b(2, 4, slices), ["recompute=whole"])
        copied = transformed(recomputed, ["offload=kept"], costs)
        check(copied)
        peaks[slices] = [simulate(each, costs).peak_bytes for each in (recomputed, copied)]
    assert peaks[16][1]["device"] == peaks[4][1]["device"]
    assert peaks[16][0]["device"][0] - peaks[4][0]["device"][0] == 12
    assert peaks[16][1]["host"][0] > peaks[4][1]["host"][0]


def test_slots() -> None:
    """With one slot the second forward waits for the first copy, and the copy back for the second forward's."""
    schedule = one(*CELLS, microbatches=2).with_slots({"saved": 1})
    check(schedule)
    timeline = simulate(schedule, Costs(2, 1, 1, host_bandwidth=2, bytes={"saved": 3}))
    assert timeline.starts == ((0, 2, 3.5, 5.5, 7, 8.5, 10.5, 12),)
    assert timeline.peak_bytes == {"device": (3,), "host": (6,)}
    assert from_json(to_json(schedule)) == schedule
    with pytest.raises(
        ScheduleError, match="at most 1 of what is saved, which the CSV form cannot say; write it as JSON"
    ):
        to_csv(schedule)
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(one("0F0", "0F1", *CELLS[1:2], *CELLS[3:], microbatches=2).with_slots({"saved": 1}))
    with pytest.raises(ScheduleError, match="slots of 'saved': 0; give a number of at least 1"):
        schedule.with_slots({"saved": 0})


@pytest.mark.parametrize(("name", "parts_of", "peaks"), [("1f1b", 2, (3, 2, 1)), ("interleaved", 1, (8, 6, 4))])
def test_the_most_that_is_alive_at_any_times(name: str, parts_of: int, peaks: tuple[int, ...]) -> None:
    """Copies that are slow on one rank bring it there, and no times drawn at random go beyond; slots keep it lower."""
    slotted = pl.schedules.offload(build(name, 3, 6), Costs(host_bandwidth=1), parts_of, parts_of)
    schedule, random = slotted.with_slots({}), Random(0)
    most = [0] * 3
    for turn in range(9):
        times = [[10 ** random.uniform(-2, 2) for _ in range(schedule.stages)] for _ in range(3)]
        saved = [1e4 if stage % 3 == turn else 10 ** random.uniform(-2, 2) for stage in range(schedule.stages)]
        timeline = simulate(schedule, Costs(*times, host_bandwidth=1, bytes={"saved": saved}))
        most = [max(pair) for pair in zip(most, timeline.peak_activations, strict=True)]
    assert worst_peaks(schedule) == tuple(most) == peaks
    assert worst_peaks(slotted) == simulate(slotted).peak_activations < peaks


def test_the_most_on_one_rank_is_with_quick_copies_on_the_others() -> None:
    """With slow ones everywhere rank 0 would hold 6."""
    schedule = pl.schedules.offload(build("dualpipev", 3, 6), Costs(host_bandwidth=1)).with_slots({})
    assert worst_peaks(schedule) == (7, 6, 7)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_offloaded(name: str) -> None:
    """It passes `check`, does the same work in the same order, keeps its text, takes hardly longer and holds no more."""
    plain, costs = build(name, 4, 8), Costs(host_bandwidth=1)
    schedule = pl.schedules.offload(plain, costs)
    check(schedule)
    check_batches(traffic(schedule))
    assert from_json(to_json(schedule)) == schedule
    without = schedule.with_slots({})
    if len(schedule.routes) == 1:
        assert from_csv(to_csv(without)).codes == schedule.codes
    rest = [[cell for cell in program if parts(cell)[0].kind not in "OL"] for program in schedule.programs]
    assert schedule.with_programs(rest).codes == plain.codes
    before, after = simulate(plain, costs), simulate(schedule, costs)
    assert after.makespan <= 1.011 * before.makespan
    assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations, strict=True))
    assert sum(after.peak_activations) < sum(before.peak_activations)


@pytest.mark.parametrize(("ranks", "copy", "peak"), [(4, 1.0, 2), (8, 1.0, 2), (8, 0.5, 2), (8, 1.5, 2), (8, 2.0, 3)])
def test_1f1b_holds_two_micro_batches_whatever_the_ranks(ranks: int, copy: float, peak: int) -> None:
    """Beyond copies of a forward's time, forwards of the warm-up wait for earlier copies, at no lost time."""
    plain, costs = pl.schedules.one_f_one_b(ranks, 4 * ranks), Costs(host_bandwidth=1 / copy)
    timeline = simulate(transformed(plain, ["offload"], costs), costs)
    assert timeline.makespan == simulate(plain).makespan
    assert max(timeline.peak_activations) == peak
    assert timeline.schedule.slots == (("saved", peak),)


def test_what_is_used_at_once_or_recomputed_stays() -> None:
    last = pl.schedules.one_f_one_b(1, 4)
    for costs in (Costs(host_bandwidth=1), Costs()):
        assert pl.schedules.offload(last, costs) == last
    blocks = transformed(pl.schedules.one_f_one_b(2, 4), ["recompute"])
    assert pl.schedules.offload(blocks) == blocks


def test_parts_by_hand() -> None:
    """Half is copied while its forward runs the other half, and is back when half of the backward has passed."""
    cells = ["0F0", "0O0:1/2", "0O0:2/2", "0F1", "0L0:2/2", "0L0:1/2", "0B0", "0B1"]
    schedule = one(*cells, microbatches=2)
    check(schedule)
    assert from_csv(to_csv(schedule)).programs == schedule.programs
    timeline = simulate(schedule, Costs(2, 2, 2, host_bandwidth=1 / 3))
    assert timeline.starts == (
        (0, 1, 2.5, 2, 4, 5.5, 5.5, 9.5),
    )  # the backward's second half would wait from 7.5 on, until 7
    assert timeline.ends == ((2, 2.5, 4, 4, 5.5, 7, 9.5, 13.5),)
    late = simulate(schedule, Costs(2, 1, 1, host_bandwidth=1 / 3))
    assert late.ends[0][6] == 7 + 1  # it waits for the part from 6.5 on
    assert timeline.memory_curve[0][1:5] == ((2, 2), (2.5, 1.5), (4, 1), (4, 1.5))
    with pytest.raises(ScheduleError, match=r"nothing frees what is saved on the host:1/2 .* which 0O0:1/2 leaves"):
        check(one("0F0", "0O0:1/2", "0B0"))


@pytest.mark.parametrize(("ranks", "count", "peak"), [(4, 4, 1.25), (8, 4, 1.25), (4, 8, 1.125)])
@pytest.mark.parametrize("copy", [0.5, 1.0, 2.0])
def test_1f1b_in_parts_holds_one_micro_batch_and_a_part(ranks: int, count: int, peak: float, copy: float) -> None:
    plain, costs = pl.schedules.one_f_one_b(ranks, 2 * ranks), Costs(host_bandwidth=1 / copy)
    timeline = simulate(transformed(plain, [f"offload={count}/{count}"], costs), costs)
    assert timeline.makespan == simulate(plain).makespan
    assert max(timeline.peak_memory) == peak


def test_a_share() -> None:
    """Half of what each of 3 micro-batches saves stays, and all of the last, which is used at once."""
    schedule = transformed(pl.schedules.gpipe(1, 4), ["offload=1/2"], Costs(host_bandwidth=4))
    assert {str(cell).partition(":")[2] for cell in schedule.programs[0] if parts(cell)[0].kind[0] in "OL"} == {"1/2"}
    assert simulate(schedule, Costs(host_bandwidth=4)).peak_memory == (2.5,)
    for word in ("offload=3/2", "offload=half", "offload=2"):
        with pytest.raises(UsageError, match=r"give 1/2 for the first of two equal parts|2"):
            transformed(schedule, [word])


@pytest.mark.parametrize("cells", [("0O0", "0L0", "0R0:norms"), ("0R0:norms", "0O0", "0L0")], ids=" ".join)
def test_a_part_that_is_recomputed_does_not_travel(cells: tuple[str, ...]) -> None:
    costs = Costs(4, bytes={"saved": 100, "saved:norms": 30, "kept": 4}, host_bandwidth=1000)
    schedule = one("0F0", *cells, "0B0")
    check(schedule)
    timeline = simulate(schedule, costs)
    (device,), (host,) = timeline.bytes_curves["device"], timeline.bytes_curves["host"]
    assert (max(level for _, level in device), device[-1][1]) == (104, 0)
    assert max(level for _, level in host) == 70
    assert 34 in [level for _, level in device]  # while the copy is on the host
    ends = zip(schedule.programs[0], timeline.starts[0], timeline.ends[0], strict=True)
    assert {str(cell): end - start for cell, start, end in ends if str(cell) in ("0O0", "0L0")} == pytest.approx(
        {"0O0": 0.07, "0L0": 0.07}
    )


SHARED = [["0F0", "0O0", "0L0", "0B0"], ["1F0", "1O0", "1L0", "1B0"]]


@pytest.mark.parametrize(
    ("beside", "links", "first", "second"),
    [
        (2.0, (), ((1, 3), (3, 5)), ((2, 4), (4, 6))),  # a link for each rank
        (2.0, (7, 8), ((1, 3), (3, 5)), ((2, 4), (4, 6))),
        (1.0, (7, 7), ((1, 3), (3, 5)), ((2, 4), (4, 6))),
        (2.0, (7, 7), ((1, 4), (4, 7)), ((2, 5), (5, 8))),  # half alone, half beside the other; each way apart
        (1.5, (7, 7), ((1, 3.5), (3.5, 6)), ((2, 4.5), (4.5, 7))),
    ],
)
def test_copies_of_two_ranks_on_one_link(
    beside: float, links: tuple[int, ...], first: tuple[object, ...], second: tuple[object, ...]
) -> None:
    schedule = Schedule.of(SHARED, placement=[0, 1], microbatches=1)
    timeline = simulate(schedule, Costs(host_bandwidth=0.5, host_links=links, beside=beside))
    for rank, expected in enumerate((first, second)):
        times = list(zip(timeline.starts[rank], timeline.ends[rank], strict=True))
        assert tuple(times[1:3]) == expected


def test_three_copies_on_one_link() -> None:
    """Each of three that begin and end together takes 1 + 2 (beside - 1) times as long; a fourth rank's own link is free."""
    programs = [["0F0", "0O0", "0L0", "0B0"]] + [[f"{s}F0", f"{s}O0", f"{s}L0", f"{s}B0"] for s in (1, 2, 3)]
    schedule = Schedule.of(programs, placement=[0, 1, 2, 3], microbatches=1)
    costs = Costs((1, 0, 0, 0), host_bandwidth=0.5, host_links=(0, 0, 0, 1), beside=1.5)
    timeline = simulate(schedule, costs)
    assert [(timeline.starts[rank][1], timeline.ends[rank][1]) for rank in range(4)] == [(1, 5)] * 3 + [(1, 3)]


def test_links_of_their_own_change_no_time() -> None:
    plain = build("interleaved", 4, 4)
    for share in ((1, 1), (3, 4)):
        copied = with_copies(plain, Costs(host_bandwidth=1), range(plain.stages), *share)
        alone, apart = Costs(p2p=0.3, host_bandwidth=0.7), Costs(p2p=0.3, host_bandwidth=0.7, host_links=(0, 1, 2, 3))
        assert simulate(copied, apart).ends == simulate(copied, alone).ends


def test_offload_on_a_shared_link_takes_no_longer() -> None:
    """Two copies of 1.8 every 3 do not fit on one link: with the links known fewer travel, and no forward waits for them."""
    plain = pl.schedules.one_f_one_b(4, 8)
    costs = Costs(host_bandwidth=1 / 1.8, host_links=(0, 0, 1, 1))
    unaware = pl.schedules.offload(plain, Costs(host_bandwidth=1 / 1.8))
    assert simulate(unaware, costs).makespan > 1.05 * simulate(plain, costs).makespan
    assert simulate(pl.schedules.offload(plain, costs), costs).makespan <= 1.01 * simulate(plain, costs).makespan


def test_links_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="host_links has 2 values and the schedule 4 ranks: give 4"):
        simulate(pl.schedules.one_f_one_b(4, 4), Costs(host_links=(0, 0)))
    with pytest.raises(UsageError, match=r"beside is 0\.5; a copy beside another takes at least 1 times as long"):
        Costs(beside=0.5)
