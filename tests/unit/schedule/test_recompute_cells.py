"""Recomputation in schedules: its cells, what `check` demands, times, memory by value, and the transform."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest

import pipeloom as pl
from batch_walk import check_batches
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.actions import Action, equal_part, parse_cell
from pipeloom.schedule.channels import traffic
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import cut_stages, recompute, transformed, unpair


def one(*cells: str, microbatches: int = 1) -> Schedule:
    return Schedule.of([cells], placement=[0], microbatches=microbatches)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_recomputed(name: str, whole: bool) -> None:
    """It passes `check`, does the same work, keeps its text, and holds at most a stage-micro-batch more than it must."""
    plain = build(name, 4, 8)
    schedule = recompute(plain, whole)
    check(schedule)
    check_batches(traffic(schedule))
    assert from_json(to_json(schedule)) == schedule
    if len(schedule.routes) == 1:
        assert from_csv(to_csv(schedule)).codes == schedule.codes

    def work(schedule: Schedule) -> list[list[Action]]:
        actions = ([a for cell in program for a in parts(cell)] for program in schedule.programs)
        return [[a._replace(kind=a.kind[-1]) for a in program if a.kind != "R"] for program in actions]

    assert work(schedule) == work(plain)
    before, after = simulate(plain), simulate(schedule)
    again = [sum(action.kind in "BI" for action in program) for program in work(plain)]
    assert after.busy == tuple(busy + count for busy, count in zip(before.busy, again, strict=True))
    assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations, strict=True))
    kept = simulate(schedule, Costs(kept=1 / 8))
    levels = [[level for _, level in curve] for curve in kept.memory_curve]
    assert min(map(min, levels)) == 0
    assert [row[-1] for row in levels] == [0] * 4
    assert tuple(map(max, levels)) == kept.peak_memory


def test_cells() -> None:
    assert parse_cell("2R0") == Action("R", 2, 0)
    assert parse_cell("(2R0;2B0)") == Action("RB", 2, 0)
    assert str(parse_cell("(2R0;2I0)")) == "(2R0;2I0)"
    assert str(parse_cell("(0F5; 3R1; 3B1)OVERLAP_F_B")) == "(0F5;3R1;3B1)OVERLAP_F_B"
    assert parse_cell("2R0:norms") == Action("R:norms", 2, 0)
    assert str(parse_cell("2R0:3/4")) == "2R0:3/4"
    with pytest.raises(ScheduleError, match="'2F0:norms': F has no parts; R or O or L may name one"):
        parse_cell("2F0:norms")
    wrong = ["2R0:", "2R0:Norms", "2R0:0/4", "2R0norms", "(2R0:norms;2B0)", "(2R0;1B0)", "(2R0;2B1)", "2R0;2B0", "2RB0"]
    for text in (*wrong, "(2R0;2W0)", "(0F5;3R1)", "(2B0;2R0)"):
        with pytest.raises(ScheduleError, match="is not an action"):
            parse_cell(text)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            ["0R0", "0F0", "0B0"],
            "action 0: 0R0 needs what is kept of stage 0 micro-batch 0, .*; 0F0 or 0LKEPT0 makes it",
        ),
        (["0F0", "0R0", "(0R0;0B0)"], r"action 2: \(0R0;0B0\) makes what is saved a second time; 0R0 has made it"),
        (["0F0", "0B0", "0R0"], "action 1: 0B0 needs what is saved .*; 0F0 or 0R0 or 0L0 makes it"),
        (["0F0", "0I0", "0R0", "0W0"], "action 1: 0I0 needs what is saved"),
        (["0F0", "0R0", "0R0", "0B0"], "0R0 appears twice"),
        (["0F0", "(0R0;0B0)", "0B0"], "has its backward twice"),
        (["0F0", "0B0", "0R0:norms"], "action 2: 0R0:norms needs what is kept .*; 0F0 or 0LKEPT0 makes it"),
        (["0F0", "0I0", "0W0", "0R0:norms"], "action 3: 0R0:norms needs what is kept"),
        (["0F0", "0R0:norms", "0R0", "0B0"], "action 2: 0R0 makes what is saved:norms a second time; 0R0:norms has"),
        (["0F0", "0R0:norms", "(0R0;0B0)"], "makes what is saved:norms a second time; 0R0:norms has made it"),
    ],
)
def test_an_order_that_cannot_run(cells: list[str], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check(one(*cells))


def test_times_and_memory_by_hand() -> None:
    """F keeps 1 of 8; R takes 1.5 and brings the other 7; the block holds them while it runs; I leaves half until W."""
    costs = Costs(2, 3, 1, activation=8.0, kept=1 / 8, held=0.5, recompute=1.5)
    timeline = simulate(one("0F0", "0F1", "0R0", "0B0", "(0R1;0I1)", "0W1", microbatches=2), costs)
    assert timeline.ends == ((2, 4, 5.5, 9.5, 14, 15),)
    assert timeline.memory_curve == (((0, 1), (2, 2), (4, 9), (9.5, 1), (9.5, 8), (14, 4), (15, 0)),)
    assert timeline.peak_memory == (9,)
    assert timeline.peak_activations == (1,)
    pair = one("0F0", "(0F1;0R0;0B0)OVERLAP_F_B", "0B1", microbatches=2)
    assert simulate(pair, costs).ends == ((2, 2 + 2 + 1.5 + 4, 13.5),)
    assert simulate(pair, Costs(2, 3, 1, recompute=1.5, pair=4.0)).ends[0][1] == 2 + 4 + 1.5
    assert simulate(pair, Costs(2, 3, 1, recompute=1.5, all_to_all=0.5)).ends[0][1] == 2 + 1 + 1.5 + 1.5 + 1
    assert simulate(pair, Costs(2, 3, 1, microbatch=(2.0, 1.0), recompute=1.5)).ends[0][1] == 4 + 2 + 2 * (4 + 1.5)


def test_parts_by_hand() -> None:
    """Norms save 30 of 100 and take 0.5 to recompute, before B, or behind I for W alone; the quarter of `mlp` takes R's time."""
    costs = Costs(2, 3, 1, recompute=1.5, parts={"norms": 0.5}, bytes={"saved": 100, "kept": 4, "saved:norms": 30})
    cells = ("0F0", "0F1", "0R0:norms", "0B0", "0I1", "0R1:norms", "0W1")
    schedule = one(*cells, microbatches=2)
    check(schedule)
    assert from_csv(to_csv(schedule)).codes == from_json(to_json(schedule)).codes == schedule.codes
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    costs = replace(costs, bytes={**dict(costs.bytes), "pending": 60})
    timeline = simulate(schedule, costs)
    assert timeline.ends == ((2, 4, 4.5, 8.5, 11.5, 12, 13),)
    assert timeline.bytes_curves["device"] == (
        ((0, 74), (2, 148), (4, 178), (8.5, 74), (11.5, 30), (11.5, 60), (13, 0)),
    )
    assert simulate(schedule, replace(costs, activation=10.0)).peak_memory == (17,)
    both = one("0F0", "0R0:norms", "0R0:mlp", "0R0:1/4", "0B0")
    check(both)
    assert simulate(both, costs).ends == ((2, 2.5, 4, 4.375, 8.375),)
    assert simulate(both, costs).bytes_curves["device"][0][0] == (0, 100 + 4 - 30 - 25)  # no size is known of `mlp`
    assert both._remade == {(0, 0): frozenset({"saved:norms", "saved:mlp", "saved:1/4"})}
    assert [str(cell) for cell in recompute(one("0F0", "0I0", "0W0"), part="mlp").programs[0]] == [
        "0F0",
        "0R0:mlp",
        "0I0",
        "0W0",
    ]


def test_a_forward_that_saves_nothing_holds_something_while_it_runs() -> None:
    """50 in a whole stage, and of norms no more than the 30 that they do not save; also inside a pair."""
    sizes = {"saved": 100, "kept": 4, "saved:norms": 30, "forward": 50}
    costs = Costs(2, 3, 1, activation=20.8, kept=4 / 104, bytes=sizes)
    timeline = simulate(one("0F0", "0F1", "0R1:norms", "0B1", "0R0", "0B0", microbatches=2), costs)
    curve = ((0, 54), (2, 4), (2, 108), (4, 78), (4, 108), (10, 4), (10, 104), (16, 0))
    assert timeline.bytes_curves["device"][0] == curve
    assert timeline.memory_curve[0][2] == (2, pytest.approx(108 / 5))
    pair = one("0F0", "(0F1;0B0)OVERLAP_F_B", "0R1", "0B1", microbatches=2)
    assert simulate(pair, costs).bytes_curves["device"][0][1] == (2, 104 + 54)
    assert simulate(one("0F0", "0B0"), costs).peak_bytes["device"] == (104,)


def test_a_pickled_schedule_names_its_kinds() -> None:
    """The numbers of kinds with parts are those of a process, in the order in which it has first read them."""
    schedule = one("0F0", "0R0:earlier", "0R0:later", "0B0")
    state = schedule.__getstate__()
    names = {"R:earlier": "R:later", "R:later": "R:earlier"}
    state["letters"] = [names.get(letter, letter) for letter in state["letters"]]  # of a process that read them so
    copy = object.__new__(Schedule)
    copy.__setstate__(state)
    assert copy == one("0F0", "0R0:later", "0R0:earlier", "0B0")


def test_a_recomputation_runs_while_the_gradient_is_on_its_way() -> None:
    plain = pl.schedules.one_f_one_b(4, 8)
    block, whole = (simulate(recompute(plain, way)).makespan for way in (False, True))
    assert (simulate(plain).makespan, block, whole) == (33, 44, 41)


def test_some_of_the_actions() -> None:
    schedule = recompute(pl.schedules.one_f_one_b(2, 2), actions=[(0, 1)])
    assert [str(cell) for cell in schedule.programs[0]] == ["0F0", "0F1", "0B0", "(0R1;0B1)"]
    assert schedule._remade == {(0, 1): frozenset({"saved"})}
    check(schedule)
    assert simulate(schedule).peak_activations == (1, 1)


def test_with_other_transforms_and_by_name() -> None:
    plain = pl.schedules.interleaved_overlap(2, 4)
    block = transformed(plain, ["recompute"])
    assert block == recompute(plain)
    assert transformed(plain, ["recompute=whole"]) == recompute(plain, whole=True)
    assert unpair(block) == recompute(unpair(plain))
    assert transformed(plain, ["recompute=norms"]) == recompute(plain, part="norms")
    with pytest.raises(UsageError, match="recompute: 'W hole' is not a part; give block, whole, or a part's name"):
        transformed(plain, ["recompute=W hole"])
    for whole in (False, True):
        check(cut_stages(recompute(pl.schedules.one_f_one_b(2, 3), whole), 2))
    accumulated = recompute(pl.schedules.gpipe(1, 4))  # one rank: gradients accumulated over micro-batches
    check(accumulated)
    assert simulate(accumulated, Costs(kept=0.25)).peak_memory == (1.75,)


def test_bytes_by_value_and_pool() -> None:
    """Parameters all step; 100 saved and 4 kept of a micro-batch, 30 pending; a block holds one layer's 25."""
    costs = Costs(
        bytes={"params": 1000, "saved": 100, "kept": 4, "pending": 30, "layer": 25, "copy": 7, "spool": (5,)},
        pools={"copy": "host", "spool": "host"},
    )
    timeline = simulate(one("0F0", "0F1", "0B0", "(0R1;0I1)", "0W1", microbatches=2), costs)
    assert timeline.bytes_curves["device"] == (
        ((0, 1000), (0, 1104), (1, 1108), (4, 1004), (4, 1030), (6, 1030), (7, 1000)),
    )
    assert timeline.peak_bytes == {"device": (1108,), "host": (12,)}
    assert simulate(one("0F0", "0B0")).peak_bytes == {}
    idle = Schedule.of([["0F0", "0B0"], []], placement=[0, 1], microbatches=1, routes=[[0], [1]], route_of=[0])
    assert simulate(idle, Costs(bytes={"saved": 3})).peak_bytes == {"device": (3, 0)}
    two = simulate(
        pl.schedules.one_f_one_b(2, 3), Costs(bytes={"saved": (10, 20), "grads": (1, 2)}, microbatch=(1, 2, 1))
    )
    assert two.peak_bytes == {"device": (31, 42)}
    assert Costs(bytes={"saved": (10, 20)}).resized(0.5).bytes == (("saved", (5, 10)),)
    for wrong in ({"saved": -1}, {"saved": "much"}, 3, {"saved": ((1.0,),)}):
        with pytest.raises(UsageError, match="bytes"):
            Costs(bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"bytes\['saved'\] has 3 values and the schedule 1 stages"):
        simulate(one("0F0", "0B0"), Costs(bytes={"saved": (1, 2, 3)})).peak_bytes  # noqa: B018


def test_parts_together_have_a_size_of_their_own() -> None:
    """Less than their sum, where one's argument is what the other makes; R of each makes its part of that."""
    schedule = Schedule.of([["0F0", "0R0:norms", "0R0:mlp", "0B0"]], placement=[0], microbatches=1)
    sizes = {"saved": 100, "saved:norms": 30, "saved:mlp": 50}
    summed, joint = (simulate(schedule, Costs(bytes=each)) for each in (sizes, sizes | {"saved:mlp+norms": 40}))
    assert [level for _, level in summed.bytes_curves["device"][0]] == [20, 50, 100, 0]
    assert [level for _, level in joint.bytes_curves["device"][0]] == [60, 75, 100, 0]
    copied = Schedule.of([["0F0", "0O0", "0R0:norms", "0R0:mlp", "0L0", "0B0"]], placement=[0], microbatches=1)
    costs = Costs(bytes=sizes | {"saved:mlp+norms": 40}, host_bandwidth=10)
    assert max(simulate(copied, costs).peak_bytes["host"]) == 60


def test_each_layer_is_in_one_of_equal_parts() -> None:
    for layers, count in product(range(1, 8), range(1, 9)):
        part_of = {at: number for number in range(1, count + 1) for at in equal_part(f"{number}/{count}", layers)}
        assert part_of == {at: at * count // layers + 1 for at in range(layers)}
    assert not equal_part("norms", 3)
