"""What a search may still spend: moves, seconds, or both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

POOL = 4
WORK = 8_000_000
PROOF_SECONDS = 120.0


class Worker(Protocol):
    """Something that counts its work, in nodes looked at."""

    work: int


class Budget:
    """What the search may still spend: moves, seconds, or both."""

    def __init__(self, size: int, time_limit: float | None, iterations: int | None, prove: bool) -> None:
        self.begin = time.monotonic()
        self.proof_end = self.begin + (time_limit if time_limit is not None else PROOF_SECONDS) if prove else 0.0
        share = 0.25 if prove else 1.0  # of the time, for the starts and the local search
        self.deadline = math.inf if time_limit is None else self.begin + share * time_limit
        self.timed = iterations is None and time_limit is not None
        usual = 10**9 if self.timed else max(100, int(share * WORK) // size)
        self.allowed = iterations if iterations is not None else usual
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

    def slice(self, starts: int) -> int:
        """The moves of one start's next turn; where only time counts, its end is set instead."""
        if self.timed:
            self.slice_end = time.monotonic() + max(0.05, (self.deadline - self.begin) / (4 * POOL))
            return 10**9
        return min(self.allowed - self.used, max(1, self.allowed // (4 * POOL)))

    def in_time(self) -> bool:
        now = time.monotonic()
        return now < self.deadline and now < self.slice_end

    def grant(self, share: float) -> None:
        """Gives a share of the moves, or of the time that is left, to the search of one period."""
        now = time.monotonic()
        self.periodic = share * self.allowed * self.size
        self.periodic_end = now + share * (self.deadline - now)

    def periodic_slice(self, worker: Worker, share: float) -> Callable[[], bool]:
        """Whether `worker` may go on: until it has used this share of what is left for the search of one period."""
        begin = time.monotonic()
        end = min(self.deadline, begin + max(0.0, share * (self.periodic_end - begin)))
        if self.timed:
            return lambda: time.monotonic() < end
        most = worker.work + share * self.periodic
        return lambda: worker.work < most and time.monotonic() < end
