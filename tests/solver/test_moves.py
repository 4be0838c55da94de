"""The tight loops against the plain simulator, and the moves against their own rules."""

from __future__ import annotations

from random import Random

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.moves import Move, State, critical_blocks, neighbours
from pipeloom.solver.problem import Problem
from pipeloom.solver.seeds import cut, merge, words_of

COSTS = [Costs(), Costs(10, 12, 8, 1), Costs((1.0, 2.0, 3.0, 4.0), 1.5, (0.0, 1.0, 2.0, 0.5), 0.25, held=0.5)]


def problem_of(name: str, costs: Costs, room: float = 99) -> tuple[Problem, list[list[int]]]:
    made = build(name, 4, 6) if "zb" in name and "v" not in name else build(name, 2, 6)
    problem = Problem(made.placement, 6, costs, room)
    return problem, words_of(problem, made)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["zb-h1", "interleaved", "zbv", "hanayo"])
def test_evaluation_is_the_simulation(name: str, costs: Costs) -> None:
    problem, words = problem_of(name, costs)
    found = evaluate(problem, words)
    timeline = simulate(problem.schedule_of(words), costs)
    assert found is not None
    assert found.value == pytest.approx(timeline.makespan)
    tails = found.tails(problem)
    longest = [found.start[node] + tails[node] for node in range(problem.nodes)]
    assert max(longest) == pytest.approx(found.value)
    spans = evaluate(Problem(problem.placement, 6, costs, 99, "span"), words)
    assert spans is not None
    assert spans.value == pytest.approx(max(timeline.spans))


@pytest.mark.parametrize("seed", range(10))
def test_random_moves_agree_with_the_simulator(seed: int) -> None:
    """Every allowed move keeps the memory within the room; the evaluation says a cycle where, and only where, `simulate` does."""
    random = Random(seed)
    costs = random.choice(COSTS)
    problem, words = problem_of(random.choice(["zb-h1", "zbv", "interleaved"]), costs, room=8)
    state = State(problem, words)
    for _ in range(60):
        rank = random.randrange(problem.ranks)
        source, target = (random.randrange(len(words[rank])) for _ in range(2))
        move = Move(rank, source, target)
        if source == target or not state.allows(move):
            continue
        before = [list(row) for row in state.words]
        state.apply(move)
        assert problem.fits(state.words)
        assert all(state.words[problem.tables.rank[n]][state.place[n]] == n for n in range(problem.nodes))
        found = evaluate(problem, state.words)
        schedule = problem.schedule_of(state.words)
        if found is None:
            with pytest.raises(ScheduleError):
                simulate(schedule, costs)
            state.undo(move)
            assert state.words == before
        else:
            timeline = simulate(schedule, costs)
            assert found.value == pytest.approx(timeline.makespan)
            assert max(timeline.peak_memory) <= 8 + 1e-9


def test_a_block_is_on_one_critical_path() -> None:
    problem, words = problem_of("zb-h1", Costs(10, 12, 8, 1), room=4)
    found, state = evaluate(problem, words), State(problem, words)
    assert found is not None
    tail = found.tails(problem)
    blocks = critical_blocks(state, found, Random(1))
    assert blocks
    for rank, low, high in blocks:
        for at in range(low, high + 1):
            node = words[rank][at]
            assert found.start[node] + tail[node] == pytest.approx(found.value)
    assert all(state.allows(move) for move in neighbours(state, blocks))


def test_cut_does_the_same_work_in_the_same_time() -> None:
    costs = Costs((1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 1.0, 2.0), 1.0, 0.5, held=(1.0, 0.5, 0.25, 0.0))
    whole = build("1f1b", 2, 5)
    finer = cut(whole, 2)
    assert finer.placement == (0, 0, 1, 1)
    coarse, fine = simulate(whole, merge(costs, 4, 2)), simulate(finer, costs)
    assert fine.busy == coarse.busy
    assert fine.makespan <= coarse.makespan
    assert max(fine.peak_memory) <= max(coarse.peak_memory)


@pytest.mark.parametrize("seed", range(6))
def test_evaluation_from_a_change_on_is_the_whole_evaluation(seed: int) -> None:
    random = Random(seed)
    problem, words = problem_of(random.choice(["zb-h1", "zbv", "interleaved"]), random.choice(COSTS))
    state, found = State(problem, words), evaluate(problem, words)
    compared = 0
    for _ in range(80):
        rank = random.randrange(problem.ranks)
        move = Move(rank, *random.sample(range(len(words[rank])), 2))
        if not state.allows(move):
            continue
        state.apply(move)
        assert found is not None
        part = evaluate(problem, state.words, (found, rank, min(move.source, move.target)))
        whole = evaluate(problem, state.words)
        if whole is None:
            assert part is None
            state.undo(move)
            continue
        assert part is not None
        assert (part.start, part.end, part.value) == (whole.start, whole.end, whole.value)
        assert sorted(part.order) == list(range(problem.nodes))
        found, compared = part, compared + 1
    assert compared > 2
