"""Tabu search: the best move of a neighbourhood, again and again, never straight back; what the moves are is left open."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

from pipeloom.solver.problem import EPS, Words

TENURE = (15, 25)
CALL_EVERY = 16

CarryOn = Callable[[Words, float, int], bool]
Order = tuple[int, ...]
M = TypeVar("M")


class Tabu(ABC, Generic[M]):
    """A walk through rows (a rank's nodes or blocks, in order), from `rows` on; it can be walked in several stretches.

    After `patience` moves without progress it goes back to the best and makes `kicks` random moves there.

    Attributes:
        best: the best rows so far.
        value: their makespan or largest span.

    Raises:
        ValueError: the rows have a cycle.
    """

    patience: int
    kicks: int

    def __init__(self, rows: Words, random: Random) -> None:
        self.random = random
        self._enter(rows)
        found = self._measure(None)
        if found is None:
            raise ValueError("what the search starts from has a cycle")
        self.found = found
        self.best, self.value = [list(row) for row in rows], found.value
        self.tabu: dict[Order, int] = {}
        self.step = self.quiet = 0

    @abstractmethod
    def _enter(self, rows: Words) -> None:
        """Makes these the present rows."""

    @abstractmethod
    def _rows(self) -> Words:
        """The present rows."""

    @abstractmethod
    def _measure(self, move: M | None) -> Any:
        """Times and `value` of the present rows, after `move` from those of `found` if one is given; None: a cycle."""

    @abstractmethod
    def _apply(self, move: M) -> Callable[[], object]:
        """Makes a move; returns what takes it back."""

    @abstractmethod
    def _moves(self) -> list[M]:
        """The neighbourhood."""

    @abstractmethod
    def _estimator(self) -> Callable[[M], float]:
        """What says how long the rows may be after a move."""

    @abstractmethod
    def _orders(self, move: M) -> tuple[Order, Order]:
        """(the order that the move makes, the one that it breaks)."""

    @abstractmethod
    def _random_move(self) -> M | None:
        """Any move that the memory allows; None when the draw was no such move."""

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
        move = self._choose() if self.quiet <= self.patience else None
        if move is None:
            self._again()
            return
        makes, breaks = self._orders(move)
        undo = self._apply(move)
        after = self._measure(move)
        # what was lost is forbidden for a while; where the move turned out to make a cycle, the move itself
        self.tabu[breaks if after is not None else makes] = self.step + TENURE[0] + self.random.randrange(TENURE[1])
        if after is None:
            undo()
            return
        self.found = after
        if after.value < self.value - EPS:
            self.best, self.value, self.quiet = [list(row) for row in self._rows()], after.value, 0

    def _choose(self) -> M | None:
        """The move with the least estimate that is allowed, or that promises a new best; any one if all are forbidden."""
        moves = self._moves()
        if not moves:
            return None
        self.random.shuffle(moves)
        estimate = self._estimator()
        chosen, least = None, math.inf
        for move in moves:
            length = estimate(move)
            if length >= least:
                continue
            if length >= self.value - EPS and self.tabu.get(self._orders(move)[0], 0) > self.step:
                continue
            chosen, least = move, length
        return chosen or moves[0]

    def _again(self) -> None:
        """Back to the best, and a few random moves from there that keep the rows free of cycles."""
        self._enter(self.best)
        self.tabu.clear()
        self.quiet = 0
        found = self._measure(None)
        left = self.kicks
        for _ in range(20 * self.kicks):
            move = self._random_move()
            if move is None:
                continue
            undo = self._apply(move)
            after = self._measure(None)
            if after is None:
                undo()
                continue
            found = after
            left -= 1
            if not left:
                break
        assert found is not None  # the best rows have no cycle
        self.found = found
