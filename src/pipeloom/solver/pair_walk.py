"""Tabu search over blocks: pairs are made, taken apart and mated anew on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from pipeloom.solver.pair_blocks import Blocks, Rows, Times, times_of
from pipeloom.solver.pair_moves import critical_stretches, estimate, neighbours, slide
from pipeloom.solver.pair_state import PairState, Stretch
from pipeloom.solver.tabu import Order, Tabu

SLIDES = 0.3


class PairTrail(Tabu[Stretch]):
    """A walk through rows of blocks that fit the room."""

    patience = 600
    kicks = 4

    def __init__(self, blocks: Blocks, rows: Rows, random: Random) -> None:
        self.blocks = blocks
        super().__init__(rows, random)

    def _enter(self, rows: Rows) -> None:
        self.state = PairState(self.blocks, rows)

    def _rows(self) -> Rows:
        return self.state.rows

    def _measure(self, move: Stretch | None) -> Times | None:
        since = (self.found, move.rank, move.low) if move is not None else None
        return times_of(self.blocks, self.state.rows, since)

    def _apply(self, move: Stretch) -> Callable[[], object]:
        return partial(self.state.apply, self.state.apply(move))

    def _moves(self) -> list[Stretch]:
        runs = critical_stretches(self.state, self.found, self.random)
        return list(neighbours(self.state, runs, self.random))

    def _estimator(self) -> Callable[[Stretch], float]:
        return partial(estimate, self.state, self.found, self.found.tails(self.blocks))

    def _orders(self, move: Stretch) -> tuple[Order, Order]:
        return move.makes, move.breaks

    def _random_move(self) -> Stretch | None:
        rank = self.random.randrange(len(self.state.rows))
        row = self.state.rows[rank]
        if self.random.random() < SLIDES:
            low, high = sorted((self.random.randrange(len(row)), self.random.randrange(len(row))))
            return slide(self.state, rank, low, high, self.random.random() < 0.5)
        at = self.random.randrange(len(row))
        ways = list(neighbours(self.state, [(rank, at, min(at + 1, len(row) - 1))], self.random))
        return self.random.choice(ways) if ways else None
