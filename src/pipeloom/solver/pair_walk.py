"""Tabu search over blocks: `local_search.Trail`'s walk, with pairs that are made, taken apart and mated anew on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pipeloom.solver.pair_blocks import Blocks, Rows, times_of
from pipeloom.solver.pair_moves import PairState, Stretch, critical_stretches, estimate, neighbours, slide
from pipeloom.solver.problem import EPS

PATIENCE = 600
KICKS = 4
SLIDES = 0.3
TENURE = (15, 25)
CALL_EVERY = 16

CarryOn = Callable[[Rows, float, int], bool]


class PairTrail:
    """A walk through rows that fit the room, from `rows` on; it can be walked in several stretches.

    Attributes:
        best: the best rows so far.
        value: their makespan or largest span.

    Raises:
        ValueError: the rows have a cycle.
    """

    def __init__(self, blocks: Blocks, rows: Rows, random: Random) -> None:
        found = times_of(blocks, rows)
        if found is None:
            raise ValueError("the rows that the search starts from have a cycle")
        self.blocks, self.random = blocks, random
        self.state, self.found = PairState(blocks, rows), found
        self.best, self.value = [list(row) for row in rows], found.value
        self.tabu: dict[tuple[int, ...], int] = {}
        self.step = self.quiet = 0

    def walk(self, moves: int, goal: float = 0.0, carry_on: CarryOn = lambda rows, value, done: True) -> None:
        """Walks until `moves` are made, the value is `goal`, or `carry_on(best, value, moves made)` says no."""
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
        back = self.state.apply(move)
        after = times_of(self.blocks, self.state.rows, (self.found, move.rank, move.low))
        until = self.step + TENURE[0] + self.random.randrange(TENURE[1])
        # what was lost is forbidden for a while; where the move turned out to make a cycle, the move itself
        self.tabu[move.breaks if after is not None else move.makes] = until
        if after is None:
            self.state.apply(back)
            return
        self.found = after
        if after.value < self.value - EPS:
            self.best, self.value, self.quiet = [list(row) for row in self.state.rows], after.value, 0

    def _choose(self) -> Stretch | None:
        """The move with the least estimate that is allowed, or that promises a new best; any one if all are forbidden."""
        state, found = self.state, self.found
        runs = critical_stretches(state, found, self.random)
        moves = list(neighbours(state, runs, self.random))
        if not moves:
            return None
        self.random.shuffle(moves)
        tail = found.tails(self.blocks)
        chosen, least = None, math.inf
        for move in moves:
            length = estimate(state, found, tail, move)
            if length >= least or (length >= self.value - EPS and self.tabu.get(move.makes, 0) > self.step):
                continue
            chosen, least = move, length
        return chosen or moves[0]

    def _again(self) -> None:
        """Back to the best, and a few random moves from there that keep the rows free of cycles."""
        state = self.state = PairState(self.blocks, self.best)
        self.tabu.clear()
        self.quiet = 0
        found = times_of(self.blocks, state.rows)
        left = KICKS
        for _ in range(20 * KICKS):
            move = self._random_move()
            if move is None:
                continue
            back = state.apply(move)
            after = times_of(self.blocks, state.rows)
            if after is None:
                state.apply(back)
                continue
            found = after
            left -= 1
            if not left:
                break
        assert found is not None  # the best rows have no cycle
        self.found = found

    def _random_move(self) -> Stretch | None:
        rank = self.random.randrange(len(self.state.rows))
        row = self.state.rows[rank]
        if self.random.random() < SLIDES:
            low, high = sorted((self.random.randrange(len(row)), self.random.randrange(len(row))))
            return slide(self.state, rank, low, high, self.random.random() < 0.5)
        at = self.random.randrange(len(row))
        ways = list(neighbours(self.state, [(rank, at, min(at + 1, len(row) - 1))], self.random))
        return self.random.choice(ways) if ways else None
