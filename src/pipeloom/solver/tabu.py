"""Tabu search (Glover 1989): repeatedly make the best move of the neighbourhood that is not forbidden.

A move destroys an order of two operations, or a pair; moves that create it again are then forbidden for a number of moves, the
tenure (Nowicki and Smutnicki 1996).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences
from pipeloom.solver.neighbourhood import (
    Move,
    SequenceState,
    TabuParameters,
    critical_blocks,
    estimate,
    neighbours,
    random_move,
)

CarryOn = Callable[[Sequences, float, int], bool]


WITHOUT_PAIRS = TabuParameters()
# Where a B takes less than I and W.
WITH_WHOLE = TabuParameters(whole=True)
# A move costs several times as much with pairs, so the search restarts earlier and perturbs less.
WITH_PAIRS = TabuParameters(pairs=True, whole=True, reach=8, sampled_positions=24, patience=600, perturbations=4)


class TabuSearch:
    """A walk through sequences that fit the memory limit, starting from `sequences`; each call of `walk` continues it.

    After `patience` moves without progress it returns to the best sequences and makes `perturbations` random moves there.

    Attributes:
        best: the best sequences so far.
        value: their makespan or largest span.

    Raises:
        ValueError: the sequences have a cycle.
    """

    def __init__(
        self, instance: Instance, sequences: Sequences, random: Random, parameters: TabuParameters = WITHOUT_PAIRS
    ) -> None:
        self.instance, self.random, self.parameters = instance, random, parameters
        self.state = SequenceState(instance, sequences)
        evaluation = evaluate(instance, sequences)
        if evaluation is None:
            raise ValueError("the initial schedule of the search has a cycle")
        self.evaluation = evaluation
        self.best, self.value = [list(sequence) for sequence in sequences], evaluation.value
        self.tabu: dict[tuple[int, ...], int] = {}
        self.step = self.stalled = 0

    def walk(self, moves: int, goal: float = 0.0, carry_on: CarryOn = lambda sequences, value, done: True) -> None:
        """Walk until `moves` are made, the value reaches `goal`, or `carry_on(best, value, moves made)` returns false."""
        done = 0
        while done < moves:
            if done % self.parameters.poll_interval == 0 and not (
                self.value > goal + TIME_TOLERANCE and carry_on(self.best, self.value, done)
            ):
                break
            self._iterate()
            done += 1
        carry_on(self.best, self.value, done)

    def _iterate(self) -> None:
        self.step += 1
        self.stalled += 1
        move = self._choose() if self.stalled <= self.parameters.patience else None
        if move is None:
            self._restart()
            return
        back = self.state.apply(move)
        after = evaluate(self.instance, self.state.sequences, (self.evaluation, move.rank, move.low))
        # Forbid what the move destroyed for the tenure; if the move turned out to make a cycle, forbid the move itself.
        tenure = self.parameters.tenure + self.random.randrange(self.parameters.tenure_range)
        self.tabu[move.breaks if after is not None else move.makes] = self.step + tenure
        if after is None:
            self.state.apply(back)
            return
        self.evaluation = after
        if after.value < self.value - TIME_TOLERANCE:
            self.best, self.value, self.stalled = [list(sequence) for sequence in self.state.sequences], after.value, 0

    def _choose(self) -> Move | None:
        """Return the move with the least estimate that is not forbidden, or promises a new best; if there is none, any move.

        None if there are no moves.
        """
        blocks = critical_blocks(self.state, self.evaluation, self.random)
        moves = list(neighbours(self.state, blocks, self.random, self.parameters))
        if not moves:
            return None
        self.random.shuffle(moves)
        tail = self.evaluation.tails(self.instance)
        best, least = None, math.inf
        for move in moves:
            length = estimate(self.state, self.evaluation, tail, move)
            if length >= least:
                continue
            if length >= self.value - TIME_TOLERANCE and self.tabu.get(move.makes, 0) > self.step:
                continue
            best, least = move, length
        return best or moves[0]

    def _restart(self) -> None:
        """Return to the best sequences, and make a few random moves there that keep them free of cycles."""
        self.state = SequenceState(self.instance, self.best)
        self.tabu.clear()
        self.stalled = 0
        evaluation = evaluate(self.instance, self.best)
        left = self.parameters.perturbations
        for _ in range(self.parameters.draws * self.parameters.perturbations):
            move = random_move(self.state, self.random, self.parameters)
            if move is None:
                continue
            back = self.state.apply(move)
            after = evaluate(self.instance, self.state.sequences)
            if after is None:
                self.state.apply(back)
                continue
            evaluation = after
            left -= 1
            if not left:
                break
        assert evaluation is not None  # the best sequences have no cycle
        self.evaluation = evaluation
