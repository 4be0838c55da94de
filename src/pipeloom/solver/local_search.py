"""Tabu search over words: the best move along a critical path, again and again, never straight back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pipeloom.solver.evaluation import Evaluation, evaluate
from pipeloom.solver.moves import Move, State, critical_blocks, estimate, neighbours
from pipeloom.solver.problem import EPS, Problem, Words

PATIENCE = 400
KICKS = 6


def improve(
    problem: Problem,
    words: Words,
    random: Random,
    iterations: int,
    goal: float = 0.0,
    carry_on: Callable[[Words, float, int], bool] = lambda words, value, done: True,
) -> tuple[Words, float]:
    """The best words found from `words` (which fit the room and have no cycle), and their value.

    After `PATIENCE` moves without progress it starts again from the best, with a few random moves. It ends after
    `iterations` moves, at a value of `goal` or less, or when `carry_on(best words, value, moves)`, asked every few moves,
    says no.
    """
    state = State(problem, words)
    found = evaluate(problem, state.words)
    if found is None:
        raise ValueError("the words that the search starts from have a cycle")
    best, value = [list(row) for row in words], found.value
    tabu: dict[tuple[int, int], int] = {}
    quiet = step = 0
    for step in range(iterations):
        if step % 16 == 0 and not (value > goal + EPS and carry_on(best, value, step)):
            break
        move = _choose(state, found, tabu, step, value, random)
        if move is None or quiet > PATIENCE:
            state = State(problem, best)
            _kick(state, random)
            found = evaluate(problem, state.words)
            assert found is not None
            tabu.clear()
            quiet = 0
            continue
        node = state.words[move.rank][move.source]
        passed = state.words[move.rank][move.target]
        state.apply(move)
        after = evaluate(problem, state.words)
        tabu[(node, passed) if move.source < move.target else (passed, node)] = step + 8 + random.randrange(16)
        quiet += 1
        if after is None:
            state.undo(move)
            continue
        found = after
        if found.value < value - EPS:
            best, value, quiet = [list(row) for row in state.words], found.value, 0
    else:
        step = iterations
    carry_on(best, value, step)
    return best, value


def _choose(
    state: State, found: Evaluation, tabu: dict[tuple[int, int], int], step: int, value: float, random: Random
) -> Move | None:
    """The move with the least estimate that is not forbidden or would give a new best; any if all are forbidden."""
    moves = list(neighbours(state, critical_blocks(state, found, random)))
    if not moves:
        return None
    tail = found.tails(state.problem)
    random.shuffle(moves)
    chosen, least = None, float("inf")
    for move in moves:
        length = estimate(state, found, tail, move)
        if length >= least:
            continue
        row = state.words[move.rank]
        pair = (row[move.source], row[move.target])
        # a forward move puts what is at `target` before what is at `source`
        new_order = pair[::-1] if move.source < move.target else pair
        if tabu.get(new_order, -1) > step and length >= value - EPS:
            continue
        chosen, least = move, length
    return chosen or moves[0]


def _kick(state: State, random: Random) -> None:
    """A few random moves that keep the words free of cycles."""
    done = 0
    for _ in range(20 * KICKS):
        found = evaluate(state.problem, state.words)
        assert found is not None
        rank = random.randrange(len(state.words))
        at = random.randrange(len(state.words[rank]) - 1)
        move = Move(rank, at, at + 1)
        if not state.allows(move):
            continue
        state.apply(move)
        if evaluate(state.problem, state.words) is None:
            state.undo(move)
            continue
        done += 1
        if done == KICKS:
            return
