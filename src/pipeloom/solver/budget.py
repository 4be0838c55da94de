"""Budget of a search: the moves and seconds that remain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class BudgetParameters:
    """Division of a search's moves and time."""

    # Warm starts that tabu search improves in turns: more of them give more diversity, but fewer moves to each.
    starts: int = 4
    # Nodes evaluated if neither moves nor seconds are given: about ten seconds.
    work: int = 8_000_000
    # The fewest moves where no limit is given, so that large instances get some too.
    fewest_moves: int = 100
    # Seconds of a proof without a time limit.
    proof_seconds: float = 120.0
    # The share of the time for warm starts and tabu search if a proof follows: a good incumbent shortens the proof.
    search_share_before_proof: float = 0.25
    # The shortest turn of one start, in seconds: below that, switching costs more than it balances.
    shortest_turn: float = 0.05


BUDGET = BudgetParameters()


class Worker(Protocol):
    """A search that counts its work, in nodes evaluated."""

    work: int


class Budget:
    """The remaining budget of a search: moves, seconds, or both."""

    def __init__(self, size: int, time_limit: float | None, iterations: int | None, prove: bool) -> None:
        self.begin = time.monotonic()
        self.proof_end = self.begin + (time_limit if time_limit is not None else BUDGET.proof_seconds) if prove else 0.0
        share = BUDGET.search_share_before_proof if prove else 1.0  # of the time, for the starts and the local search
        self.deadline = math.inf if time_limit is None else self.begin + share * time_limit
        self.timed = iterations is None and time_limit is not None
        default_moves = 10**9 if self.timed else max(BUDGET.fewest_moves, int(share * BUDGET.work) // size)
        self.allowed = iterations if iterations is not None else default_moves
        self.used = 0
        self.slice_end = math.inf
        self.size = size
        self.periodic, self.periodic_end = 0.0, self.begin

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def over(self) -> bool:
        return self.used >= self.allowed or time.monotonic() >= self.deadline

    def slice(self) -> int:
        """Return the number of moves in the next turn of one start; with a time limit only, set the end of the turn instead."""
        if self.timed:
            self.slice_end = time.monotonic() + max(
                BUDGET.shortest_turn, (self.deadline - self.begin) / (4 * BUDGET.starts)
            )
            return 10**9
        return min(self.allowed - self.used, max(1, self.allowed // (4 * BUDGET.starts)))

    def in_time(self) -> bool:
        now = time.monotonic()
        return now < self.deadline and now < self.slice_end

    def grant(self, share: float) -> None:
        """Give a share of the moves, or of the time that is left, to the search for a period."""
        now = time.monotonic()
        self.periodic = share * self.allowed * self.size
        self.periodic_end = now + share * (self.deadline - now)

    def periodic_slice(self, worker: Worker, share: float) -> Callable[[], bool]:
        """Return a function that is true while `worker` has not spent `share` of the remaining budget for one period."""
        begin = time.monotonic()
        end = min(self.deadline, begin + max(0.0, share * (self.periodic_end - begin)))
        if self.timed:
            return lambda: time.monotonic() < end
        most = worker.work + share * self.periodic
        return lambda: worker.work < most and time.monotonic() < end
