"""Tabu search over words: the best move along a critical path, again and again, never straight back.

The neighbourhood and the estimate are those of job-shop scheduling (Nowicki and Smutnicki 1996; Balas and Vazacopoulos
1998), here with a limit on the memory of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pipeloom.solver.evaluation import Evaluation, evaluate
from pipeloom.solver.moves import Move, State, critical_blocks, estimate, neighbours
from pipeloom.solver.problem import EPS, Problem, Words

PATIENCE = 2000
KICKS = 6
TENURE = (15, 25)
CALL_EVERY = 16

CarryOn = Callable[[Words, float, int], bool]


class Trail:
    """A walk through words that fit the room, from `words` on; it can be walked in several stretches.

    Attributes:
        best: the best words so far.
        value: their makespan or largest span.

    Raises:
        ValueError: the words have a cycle.
    """

    def __init__(self, problem: Problem, words: Words, random: Random) -> None:
        found = evaluate(problem, words)
        if found is None:
            raise ValueError("the words that the search starts from have a cycle")
        self.problem, self.random = problem, random
        self.state, self.found = State(problem, words), found
        self.best, self.value = [list(row) for row in words], found.value
        self.tabu: dict[tuple[int, int], int] = {}
        self.step = self.quiet = 0

    def walk(self, moves: int, goal: float = 0.0, carry_on: CarryOn = lambda words, value, done: True) -> None:
        """Walks until `moves` are made, the value is `goal`, or `carry_on(best, value, moves made)` says no.

        After `PATIENCE` moves without progress it goes back to the best and makes a few random moves there.
        """
        done = 0
        while done < moves:
            if done % CALL_EVERY == 0 and not (self.value > goal + EPS and carry_on(self.best, self.value, done)):
                break
            self._once()
            done += 1
        carry_on(self.best, self.value, done)

    def _once(self) -> None:
        self.step += 1
        self.quiet += 1
        move = self._choose() if self.quiet <= PATIENCE else None
        if move is None:
            self._again()
            return
        row = self.state.words[move.rank]
        moved, passed = row[move.source], row[move.target]
        self.state.apply(move)
        since = (self.found, move.rank, min(move.source, move.target))
        after = evaluate(self.problem, self.state.words, since)
        # the order that was there before is forbidden for a while; also where the move turned out to make a cycle
        order = (moved, passed) if move.source < move.target else (passed, moved)
        self.tabu[order if after is not None else order[::-1]] = (
            self.step + TENURE[0] + self.random.randrange(TENURE[1])
        )
        if after is None:
            self.state.undo(move)
            return
        self.found = after
        if after.value < self.value - EPS:
            self.best, self.value, self.quiet = [list(row) for row in self.state.words], after.value, 0

    def _choose(self) -> Move | None:
        """The move with the least estimate that is allowed, or that promises a new best; any one if all are forbidden."""
        state, found = self.state, self.found
        moves = list(neighbours(state, critical_blocks(state, found, self.random)))
        if not moves:
            return None
        tail = found.tails(state.problem)
        self.random.shuffle(moves)
        chosen, least = None, math.inf
        for move in moves:
            length = estimate(state, found, tail, move)
            if length >= least:
                continue
            row = state.words[move.rank]
            first, second = row[move.source], row[move.target]
            new_order = (second, first) if move.source < move.target else (first, second)
            if length >= self.value - EPS and self.tabu.get(new_order, 0) > self.step:
                continue
            chosen, least = move, length
        return chosen or moves[0]

    def _again(self) -> None:
        """Back to the best, and a few random moves from there that keep the words free of cycles."""
        state = self.state = State(self.problem, self.best)
        self.tabu.clear()
        self.quiet = 0
        found = evaluate(self.problem, state.words)
        left = KICKS
        for _ in range(20 * KICKS):
            rank = self.random.randrange(len(state.words))
            at = self.random.randrange(len(state.words[rank]) - 1)
            move = Move(rank, at, at + 1)
            if not state.allows(move):
                continue
            state.apply(move)
            after: Evaluation | None = evaluate(self.problem, state.words)
            if after is None:
                state.undo(move)
                continue
            found = after
            left -= 1
            if not left:
                break
        assert found is not None  # the best words have no cycle
        self.found = found
