"""Tabu search over words: letters move along a critical path.

The neighbourhood and the estimate are those of job-shop scheduling (Nowicki and Smutnicki 1996; Balas and Vazacopoulos
1998), here with a limit on the memory of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from pipeloom.solver.evaluation import Evaluation, evaluate
from pipeloom.solver.moves import Move, State, critical_blocks, estimate, neighbours
from pipeloom.solver.problem import Problem, Words
from pipeloom.solver.tabu import Order, Tabu


class Trail(Tabu[Move]):
    """A walk through words that fit the room."""

    patience = 2000
    kicks = 6

    def __init__(self, problem: Problem, words: Words, random: Random) -> None:
        self.problem = problem
        super().__init__(words, random)

    def _enter(self, rows: Words) -> None:
        self.state = State(self.problem, rows)

    def _rows(self) -> Words:
        return self.state.words

    def _measure(self, move: Move | None) -> Evaluation | None:
        since = (self.found, move.rank, min(move.source, move.target)) if move is not None else None
        return evaluate(self.problem, self.state.words, since)

    def _apply(self, move: Move) -> Callable[[], object]:
        self.state.apply(move)
        return partial(self.state.undo, move)

    def _moves(self) -> list[Move]:
        return list(neighbours(self.state, critical_blocks(self.state, self.found, self.random)))

    def _estimator(self) -> Callable[[Move], float]:
        return partial(estimate, self.state, self.found, self.found.tails(self.problem))

    def _orders(self, move: Move) -> tuple[Order, Order]:
        row = self.state.words[move.rank]
        moved, passed = row[move.source], row[move.target]
        breaks = (moved, passed) if move.source < move.target else (passed, moved)
        return breaks[::-1], breaks

    def _random_move(self) -> Move | None:
        rank = self.random.randrange(len(self.state.words))
        at = self.random.randrange(len(self.state.words[rank]) - 1)
        move = Move(rank, at, at + 1)
        return move if self.state.allows(move) else None
