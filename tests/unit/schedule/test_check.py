"""`check` refuses what a rank could not run, and says why in words."""

from __future__ import annotations

import contextlib
import importlib

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Pair, Schedule, check
from pipeloom.schedule.actions import MOST_KINDS, Action, kinds, parse_action, parse_cell
from pipeloom.schedule.families import FAMILIES, build

GOOD = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def of(programs: list[list[str]], **options: object) -> Schedule:
    return Schedule.of(programs, **({"placement": [0, 1], "microbatches": 2} | options))  # type: ignore[arg-type]


def changed(rank: int, at: int, *cells: str) -> Schedule:
    """GOOD with the entry at that place replaced by `cells`."""
    programs = [list(program) for program in GOOD]
    programs[rank][at : at + 1] = cells
    return of(programs)


def test_good() -> None:
    check(of(GOOD))
    check(changed(0, 2, "0I0", "0W0"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 9), (3, 6)])
def test_families_pass_or_refuse(name: str, p: int, m: int) -> None:
    with contextlib.suppress(UsageError):
        check(build(name, p, m))


def test_no_family_is_searched_for_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast test of completeness tells a sound schedule by itself."""
    module = importlib.import_module("pipeloom.schedule.check")
    monkeypatch.setattr(module, "_diagnose", lambda schedule: pytest.fail(f"no fault in {schedule}"))
    for name in FAMILIES:
        check(build(name, 4, 8))
    check(of([[*row[:2], "0I0", "0W0", "0B1"] if row is GOOD[0] else row for row in GOOD]))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda: changed(0, 1), "stage 0 micro-batch 1 .rank 0. has no forward: 0F1 is missing"),
        (lambda: changed(0, 3), "stage 0 micro-batch 1 .rank 0. has no backward: 0B1 .* is missing"),
        (lambda: changed(0, 3, "0I1"), "stage 0 micro-batch 1 .* has no weight gradient: 0W1 is missing"),
        (lambda: changed(0, 3, "0W1"), "stage 0 micro-batch 1 .* has no input gradient: 0I1 is missing"),
        (lambda: changed(0, 1, "0F1", "0F1"), "rank 0, action 2: 0F1 appears twice"),
        (lambda: changed(0, 1, "0F0"), "rank 0, action 1: 0F0 appears twice"),
        (lambda: changed(0, 3, "0B1", "0W1"), "has its backward twice: 0B1 and 0W1"),
        (lambda: changed(0, 3, "0B1", "0I1", "0W1"), "has its backward twice: 0B1 and 0I1 and 0W1"),
        (
            lambda: changed(0, 1, "0F1", "1F1"),
            "rank 0, action 2: 1F1 is on the wrong rank; stage 1 is placed on rank 1",
        ),
    ],
)
def test_incomplete_doubled_misplaced(schedule: object, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        check(schedule())  # type: ignore[operator]
    assert caught.value.exit_code == 3


def test_out_of_range_is_refused_when_made() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, action 1: 0F7 names micro-batch 7 of 2 \(0..1\)"):
        changed(0, 1, "0F7")
    with pytest.raises(ScheduleError, match=r"names stage 5 of 2 \(0..1\)"):
        changed(0, 1, "5F1")
    stride, pair = 2 * 2, MOST_KINDS * 2 * 2
    assert str(changed(0, 1, pair + stride).programs[0][1]) == "(0F0;0B0)OVERLAP_F_B"  # type: ignore[arg-type]
    # no kind so far, a forward with a forward, a forward with W, something else than a forward with B
    for wrong in (-1, len(kinds()) * stride, pair, pair + 3 * stride, (stride + 1) * pair + stride):
        with pytest.raises(ScheduleError, match=f"rank 0, action 1: the code {wrong} stands for no action"):
            changed(0, 1, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1F0garbage", "F0", "1X0", "", "-1F0", "1F0 ", "0F0;1B0", "(0F0;1F0)", "(0F0;1W0)"])
def test_cells_that_are_none(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_cell(text)


def test_cells() -> None:
    assert parse_action("12B3") == Action("B", 12, 3)
    assert parse_cell("(0F5;3B1)OVERLAP_F_B") == Pair(Action("F", 0, 5), Action("B", 3, 1))
    assert str(parse_cell("(0F5;3I1)")) == "(0F5;3I1)OVERLAP_F_B"
    with pytest.raises(ScheduleError, match="sends and receives are derived"):
        parse_action("0SEND_F1")


def test_weight_gradient_before_its_input_gradient() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 is at W of stage 0 micro-batch 0 \(action 2\), which waits for I"):
        check(of([["0F0", "0F1", "0W0", "0I0", "0B1"], GOOD[1]]))


def test_backward_before_its_forward() -> None:
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(of([GOOD[0], ["1B0", "1F0", "1F1", "1B1"]]))


def test_shortest_cycle_in_words() -> None:
    # Ranks 0 and 1 wait for each other; rank 2 for rank 1. The cycle names the two.
    programs = [
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
        ["2F0", "2B0", "2F1", "2B1"],
    ]
    with pytest.raises(ScheduleError) as caught:
        check(of(programs, placement=[0, 1, 2]))
    lines = str(caught.value).splitlines()
    assert lines == [
        "the schedule deadlocks; the shortest cycle:",
        "  rank 0 is at B of stage 0 micro-batch 0 (action 1), which waits for B of stage 1 micro-batch 0 on rank 1 "
        "(its action 2; that rank has reached action 1)",
        "  rank 1 is at F of stage 1 micro-batch 1 (action 1), which waits for F of stage 0 micro-batch 1 on rank 0 "
        "(its action 2; that rank has reached action 1)",
    ]


def test_pair_that_needs_itself() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 0, action 0: .* depends on itself: 0B0 waits for 0F0 of the same pair"
    ):
        check(Schedule.of([["(0F0;0B0)OVERLAP_F_B"]], placement=[0], microbatches=1))


def test_pairs_of_two_ranks_that_need_each_other() -> None:
    programs = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]]
    with pytest.raises(
        ScheduleError, match=r"(?s)deadlocks.*the pair F of stage 0 micro-batch 1 | B of stage 0 micro-batch 0"
    ):
        check(of(programs))


def test_wrong_route() -> None:
    schedule = schedules.dualpipe(2, 4)
    programs = [[*schedule.programs[0], Action("F", 0, 3)], schedule.programs[1]]
    with pytest.raises(ScheduleError, match="micro-batch 3 takes route 1, which does not pass through stage 0"):
        check(
            Schedule.of(
                programs,
                placement=schedule.placement,
                microbatches=4,
                routes=schedule.routes,
                route_of=schedule.route_of,
            )
        )


def test_receive_depth() -> None:
    # Rank 1 uses micro-batch 1 before micro-batch 0, which then sits in its buffer.
    schedule = of([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    check(schedule)
    check(schedule, receive_depth=2)
    with pytest.raises(
        ScheduleError, match="receive depth 1 deadlocks: rank 1 uses activations from rank 0 out of order"
    ):
        check(schedule, receive_depth=1)


def test_fifty_thousand_actions() -> None:
    schedule = schedules.interleaved(8, 400, 8)
    assert sum(map(len, schedule.codes)) == 51_200
    check(schedule)


def test_a_mutated_large_schedule_is_refused() -> None:
    schedule = schedules.interleaved(8, 400, 8)
    programs = [list(program) for program in schedule.codes]
    programs[3][1000], programs[3][2500] = programs[3][2500], programs[3][1000]
    bad = Schedule.of(programs, placement=schedule.placement, microbatches=400, name="mutated")
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(bad)


def test_two_stages_that_ran_on_each_others_rank() -> None:
    """Complete, once each and in order: only the ranks are wrong."""
    with pytest.raises(ScheduleError, match="rank 0, action 2: 1F0 is on the wrong rank"):
        check(of([["0F0", "0F1", "1F0", "0B0", "0B1"], ["1B0", "1F1", "1B1"]]))


def test_of_two_cycles_the_shorter_one_is_told() -> None:
    """Ranks 0, 2 and 1 wait for each other in a ring of three; ranks 3 and 4 in a ring of two, which is found later."""
    placement = [0, 1, 2, 0, 1, 2, 3, 4]
    rest = [[f"{stage}{kind}{mb}" for mb in (0, 1) for kind in "FB"] for stage in range(8)]
    programs = [
        ["3F0", *(cell for cell in rest[0] + rest[3] if cell != "3F0")],
        rest[1] + rest[4],
        rest[2] + rest[5],
        ["6B0", "6F0", "6F1", "6B1"],
        ["7F1", "7F0", "7B0", "7B1"],
    ]
    with pytest.raises(ScheduleError) as caught:
        check(of(programs, placement=placement))
    told = str(caught.value).splitlines()[1:]
    assert [line.split(" is at")[0].strip() for line in told] == ["rank 3", "rank 4"]
