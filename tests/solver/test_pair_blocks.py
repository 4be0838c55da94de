"""Blocks: the same times as the simulator, moves that keep a schedule valid, and starts that fit."""

from __future__ import annotations

from random import Random

import pytest

from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.model import parts
from pipeloom.schedule.segments import LayerSegments, SegmentCosts
from pipeloom.solver.pair_blocks import Blocks, Rows, times_of
from pipeloom.solver.pair_fuse import fused
from pipeloom.solver.pair_moves import critical_stretches, estimate, neighbours
from pipeloom.solver.pair_seeds import FIRST, OTHERS, starts_of
from pipeloom.solver.pair_state import PairState
from pipeloom.solver.problem import EPS, Problem

MODEL = SegmentCosts.uniform(LayerSegments(dispatch=1.5, combine=1.5)).costs(p2p=0.25, held=0.5)
COSTS = [
    Costs(weight_grad=0.7, all_to_all=0.3),
    Costs(1, 1.5, 0.5, 0.3, all_to_all=0.6, held=0.5),
    Costs(pair=2.0),
    MODEL,
]
FAMILIES = ["1f1b", "zb-h1", "1f1b-overlap", "interleaved", "interleaved-overlap", "zbv", "dualpipev"]


def problem_of(schedule: Schedule, costs: Costs, objective: str = "makespan") -> Problem:
    room = max(simulate(schedule, costs).peak_memory)
    return Problem(schedule.placement, schedule.microbatches, costs, room, objective)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_times_are_the_simulators(name: str, costs: Costs, objective: str) -> None:
    schedule = build(name, 3, 6)
    before = simulate(schedule, costs)
    problem = problem_of(schedule, costs, objective)
    blocks = Blocks(problem)
    rows = blocks.rows_of(schedule)
    found = times_of(blocks, rows)
    assert found is not None
    assert blocks.fits(rows)
    made = blocks.schedule_of(rows)
    check(made)
    after = simulate(made, costs)
    assert found.value == pytest.approx(after.makespan if objective == "makespan" else max(after.spans))
    assert after.makespan <= before.makespan + EPS
    assert max(after.peak_memory) <= max(before.peak_memory) + EPS
    for row, starts in zip(rows, after.starts, strict=True):
        assert [found.start[blocks.first[block]] for block in row] == pytest.approx(list(starts))
    tails = found.tails(blocks)
    through = [found.start[blocks.first[block]] + tails[blocks.first[block]] for row in rows for block in row]
    assert max(through) == pytest.approx(found.value)


def test_a_backward_that_is_cheaper_in_one_stays_one() -> None:
    schedule = build("1f1b-overlap", 2, 4)
    blocks = Blocks(problem_of(schedule, MODEL))
    kinds = {len(blocks.nodes[block]) for row in blocks.rows_of(schedule) for block in row}
    assert kinds == {1, 2, 3}  # F; B; F|B
    apart = Blocks(problem_of(schedule, COSTS[0]))
    assert {len(apart.nodes[block]) for row in apart.rows_of(schedule) for block in row} == {1, 2}


def actions_of(blocks: Blocks, rows: Rows) -> list[list[int]]:
    return [sorted(node for block in row for node in blocks.nodes[block]) for row in rows]


@pytest.mark.parametrize("name", ["1f1b-overlap", "interleaved-overlap", "dualpipev", "zbv"])
@pytest.mark.parametrize("costs", COSTS)
def test_a_long_walk_of_moves_stays_valid(name: str, costs: Costs) -> None:
    """Memory, order on the rank, the actions themselves; the way back; times from the moved place on."""
    random = Random(3)
    schedule = build(name, 3, 6)
    blocks = Blocks(problem_of(schedule, costs))
    state = PairState(blocks, blocks.rows_of(schedule))
    held = actions_of(blocks, state.rows)
    found = times_of(blocks, state.rows)
    made = 0
    for step in range(60):
        assert found is not None
        moves = list(neighbours(state, critical_stretches(state, found, random), random))
        move = random.choice(moves)
        before = [list(row) for row in state.rows]
        guess = estimate(state, found, found.tails(blocks), move)
        assert guess > 0
        back = state.apply(move)
        after = times_of(blocks, state.rows, (found, move.rank, move.low))
        again = times_of(blocks, state.rows)
        assert (after is None) == (again is None)
        if after is None or again is None:
            state.apply(back)
            assert state.rows == before
            continue
        assert after.value == again.value
        assert after.end[: blocks.none] == again.end[: blocks.none]
        firsts = [blocks.first[block] for row in state.rows for block in row]
        assert [after.start[node] for node in firsts] == [again.start[node] for node in firsts]
        found = after
        made += 1
        if step % 5:
            continue
        assert actions_of(blocks, state.rows) == held
        assert blocks.fits(state.rows)
        for rank, row in enumerate(state.rows):
            assert state.levels[rank] == pytest.approx(
                [p - blocks.rise[b] for p, b in zip(blocks.peaks(row), row, strict=True)]
            )
            assert all(state.place[n] == at for at, block in enumerate(row) for n in blocks.nodes[block])
    assert made > 30
    final = blocks.schedule_of(state.rows)
    check(final)
    assert simulate(final, costs).makespan == pytest.approx(found.value if found else 0)


def test_mutations_that_are_not_allowed() -> None:
    """One rank: letters out of order, W before its I, a pair of a micro-batch with itself, more than the memory holds."""
    problem = Problem((0,), 3, Costs(weight_grad=0.5, all_to_all=0.5), 2.0)
    blocks = Blocks(problem)
    f, i, w = (list(range(at, at + 3)) for at in (0, 3, 6))
    state = PairState(
        blocks, [[f[0], blocks.pair(f[1], i[0], False), w[0], blocks.pair(f[2], i[1], False), w[1], i[2], w[2]]]
    )
    assert times_of(blocks, state.rows) is not None
    assert state.allows(0, 0, tuple(state.rows[0]))
    refused = {
        "order": (0, (f[1], blocks.pair(f[0], i[0], False))),
        "W first": (1, (w[0], blocks.pair(f[1], i[0], False))),
        "itself": (0, (blocks.pair(f[0], i[0], False), f[1])),
        "I before F": (3, (i[1], w[1], i[2], f[2], w[2])),
        "memory": (0, (f[0], f[1], i[0], f[2], w[0], i[1], w[1])),
    }
    for low, new in refused.values():
        assert not state.allows(0, low, new)
    assert Blocks(Problem((0,), 3, Costs(), 3.0)).fits([[f[0], f[1], i[0], f[2], w[0], i[1], w[1], i[2], w[2]]])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "interleaved-overlap", "zbv", "v-half"])
@pytest.mark.parametrize("costs", [COSTS[0], COSTS[1], MODEL])
def test_starts_fit_and_run(name: str, costs: Costs) -> None:
    schedule = build(name, 4, 8)
    problem = problem_of(schedule, costs)
    blocks = Blocks(problem)
    rows = blocks.rows_of(schedule)
    held = actions_of(blocks, rows)
    values = []
    for start in starts_of(blocks, rows, (*FIRST, *OTHERS), (0.0, 0.5, 1.0)):
        found = times_of(blocks, start)
        assert found is not None
        assert actions_of(blocks, start) == held
        assert blocks.fits(start)
        check(blocks.schedule_of(start))
        values.append(found.value)
    assert len(values) >= 3


def test_pairs_form_where_a_schedule_had_none() -> None:
    """interleaved with memory to spare, p = 8 v = 2: a quarter of it is gone once its forwards and backwards are paired."""
    costs = Costs(0.5, 0.5, 0.35, all_to_all=0.3)
    schedule = build("interleaved", 8, 32, 2)
    blocks = Blocks(Problem(schedule.placement, 32, costs, 24.0))
    rows = blocks.rows_of(schedule)
    values = [found.value for start in starts_of(blocks, rows) if (found := times_of(blocks, start)) is not None]
    assert min(values) < 0.85 * simulate(schedule, costs).makespan
    best = next(start for start in starts_of(blocks, rows) if times_of(blocks, start).value == min(values))  # type: ignore[union-attr]
    cells = [cell for program in blocks.schedule_of(best).programs for cell in program]
    assert sum(len(parts(cell)) > 1 for cell in cells) > 300


@pytest.mark.parametrize("name", ["1f1b", "interleaved-overlap", "dualpipev", "zb-h1"])
@pytest.mark.parametrize("costs", [COSTS[0], MODEL])
def test_weights_go_back_where_that_costs_nothing(name: str, costs: Costs) -> None:
    schedule = build(name, 4, 8)
    blocks = Blocks(problem_of(schedule, costs))
    rows = blocks.rows_of(schedule)
    before, made = times_of(blocks, rows), fused(blocks, rows)
    after = times_of(blocks, made)
    assert before is not None
    assert after is not None
    assert after.value <= before.value + EPS
    assert actions_of(blocks, made) == actions_of(blocks, rows)
    assert blocks.fits(made)
    assert sum(map(len, made)) < sum(map(len, rows)) or costs is MODEL
    check(blocks.schedule_of(made))
