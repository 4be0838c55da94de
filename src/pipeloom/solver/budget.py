"""Budget of a search: the moves and seconds that remain."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetParameters:
    """Division of a search's moves and time."""

    # Nodes evaluated if neither moves nor seconds are given: about ten seconds.
    work: int = 8_000_000
    # The fewest moves where no limit is given, so that large instances get some too.
    fewest_moves: int = 100
    # Seconds of a proof without a time limit.
    proof_seconds: float = 120.0
    # The share of the time for warm starts and tabu search if a proof follows: a good incumbent shortens the proof.
    search_share_before_proof: float = 0.25


BUDGET = BudgetParameters()


class Budget:
    """The remaining budget of a search: moves, seconds, or both."""

    def __init__(self, size: int, time_limit: float | None, iterations: int | None, prove: bool) -> None:
        self.begin = time.monotonic()
        self.proof_end = self.begin + (time_limit if time_limit is not None else BUDGET.proof_seconds) if prove else 0.0
        share = BUDGET.search_share_before_proof if prove else 1.0  # of the time, for the starts and the local search
        self.deadline = math.inf if time_limit is None else self.begin + share * time_limit
        default_moves = 10**9 if time_limit is not None else max(BUDGET.fewest_moves, int(share * BUDGET.work) // size)
        self.allowed = iterations if iterations is not None else default_moves
        self.used = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    @property
    def over(self) -> bool:
        return self.used >= self.allowed or not self.in_time
