"""The tight loops against the plain simulator, and the moves against their own rules."""

from __future__ import annotations

from random import Random

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import cut_stages
from pipeloom.solver.construct import merge_stage_costs, sequences_of
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance
from pipeloom.solver.neighbourhood import (
    SequenceState,
    TabuParameters,
    critical_blocks,
    estimate,
    neighbours,
    shift,
)
from pipeloom.solver.tabu import TabuSearch

COSTS = [Costs(), Costs(10, 12, 8, 1), Costs((1.0, 2.0, 3.0, 4.0), 1.5, (0.0, 1.0, 2.0, 0.5), 0.25, held=0.5)]


def instance_of(name: str, costs: Costs, memory_limit: float = 99) -> tuple[Instance, list[list[int]]]:
    made = build(name, 4, 6) if "zb" in name and "v" not in name else build(name, 2, 6)
    instance = Instance(made.placement, 6, costs, memory_limit)
    return instance, sequences_of(instance, made)


@pytest.mark.parametrize("seed", range(10))
def test_random_moves_agree_with_the_simulator(seed: int) -> None:
    """Every allowed move keeps the memory within the room; the evaluation says a cycle where, and only where, `simulate` does."""
    random = Random(seed)
    costs = random.choice(COSTS)
    name = random.choice(["zb-h1", "zbv", "interleaved"])
    loose, sequences = instance_of(name, costs)
    memory_limit = max(simulate(loose.schedule_of(sequences), costs).peak_memory)  # all of it is needed
    instance, _ = instance_of(name, costs, memory_limit)
    state = SequenceState(instance, sequences)
    for _ in range(200):
        rank = random.randrange(instance.ranks)
        source, target = (random.randrange(len(sequences[rank])) for _ in range(2))
        move = shift(state, rank, source, target) if source != target else None
        if move is None:
            continue
        before = [list(sequence) for sequence in state.sequences]
        back = state.apply(move)
        assert instance.fits(state.sequences)
        assert all(state.sequences[instance.table.rank[n]][state.place[n]] == n for n in range(instance.nodes))
        evaluation = evaluate(instance, state.sequences)
        schedule = instance.schedule_of(state.sequences)
        if evaluation is None:
            with pytest.raises(ScheduleError):
                simulate(schedule, costs)
            state.apply(back)
            assert state.sequences == before
        else:
            timeline = simulate(schedule, costs)
            assert evaluation.value == pytest.approx(timeline.makespan)
            assert max(timeline.peak_memory) <= memory_limit + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_the_estimate_of_a_swap_is_its_value(seed: int) -> None:
    """Two neighbours that change places: the longest path through them is known from the times before, hops included."""
    random = Random(seed)
    instance, sequences = instance_of(random.choice(["zb-h1", "zbv", "interleaved"]), Costs(10, 12, 8, 3))
    state, compared = SequenceState(instance, sequences), 0
    for _ in range(200):
        evaluation = evaluate(instance, state.sequences)
        assert evaluation is not None
        tail = evaluation.tails(instance)
        rank = random.randrange(instance.ranks)
        at = random.randrange(len(sequences[rank]) - 1)
        move = shift(state, rank, *random.choice([(at, at + 1), (at + 1, at)]))
        if move is None:
            continue
        length = estimate(state, evaluation, tail, move)
        back = state.apply(move)
        after = evaluate(instance, state.sequences)
        if after is None:
            state.apply(back)
        elif length >= evaluation.value:
            assert length == pytest.approx(after.value)
            compared += 1
        else:
            assert after.value <= evaluation.value + 1e-9
    assert compared > 10


def test_a_block_is_on_one_critical_path() -> None:
    instance, sequences = instance_of("zb-h1", Costs(10, 12, 8, 1), memory_limit=4)
    evaluation, state = evaluate(instance, sequences), SequenceState(instance, sequences)
    assert evaluation is not None
    tail = evaluation.tails(instance)
    blocks = critical_blocks(state, evaluation, Random(1))
    assert blocks
    for rank, low, high in blocks:
        for at in range(low, high + 1):
            node = sequences[rank][at]
            assert evaluation.start[node] + tail[node] == pytest.approx(evaluation.value)
    moves = list(neighbours(state, blocks, Random(1), TabuParameters()))
    ends = {index for _, low, high in blocks for index in (low, high)}
    assert moves
    assert all(move.low in ends or move.high in ends or move.high == move.low + 1 for move in moves)
    paths = [critical_blocks(state, evaluation, Random(seed)) for seed in range(10)]
    assert any(len({rank for rank, _, _ in path}) > 1 for path in paths)  # it follows messages to other ranks


def test_cut_does_the_same_work_in_the_same_time() -> None:
    costs = Costs((1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 1.0, 2.0), 1.0, 0.5, held=(1.0, 0.5, 0.25, 0.0))
    whole = build("1f1b", 2, 5)
    finer = cut_stages(whole, 2)
    assert finer.placement == (0, 0, 1, 1)
    coarse, fine = simulate(whole, merge_stage_costs(costs, 4, 2)), simulate(finer, costs)
    assert fine.busy == coarse.busy
    assert fine.makespan <= coarse.makespan
    assert max(fine.peak_memory) <= max(coarse.peak_memory)


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_keeps_the_best_that_it_has_seen(seed: int) -> None:
    """Its value is that of its best sequences, is never above that of the start, and here falls below it."""
    instance, sequences = instance_of("interleaved", Costs(10, 12, 8, 3), memory_limit=12)
    start = evaluate(instance, sequences)
    assert start is not None
    tabu_search = TabuSearch(instance, sequences, Random(seed))
    tabu_search.walk(60)
    evaluation = evaluate(instance, tabu_search.best)
    assert evaluation is not None
    assert instance.fits(tabu_search.best)
    assert tabu_search.value == evaluation.value < start.value
