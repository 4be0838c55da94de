"""A worker's place in its run, and its watchdog: what the worker's start hands to the program that it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.train.failures import STORE
from pipeloom.train.listeners import refuse_connections
from pipeloom.train.rank_log import RankLog
from pipeloom.train.requests import Requests

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its run.

    Attributes:
        rank: global rank; 0 writes to the terminal.
        world_size: workers of the run.
        local_rank: among the workers of this machine.
        device: where this worker computes.
        store: key-value store that all workers share.
        requests: what signals have asked for.
        watchdog: of this worker; None where it is the only one.
        log: the copy of what this worker writes, to be opened in the run's folder; None: there is none.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store
    requests: Requests = field(default_factory=Requests)
    watchdog: Watchdog | None = None
    log: RankLog | None = None

    @contextlib.contextmanager
    def waiting(self, what: str, phase: str) -> Iterator[None]:
        """For a communication outside of steps: the watchdog sees that this worker waits for `what`, with that phase's limit."""
        if self.watchdog is None:
            yield
            return
        status = self.watchdog.status
        with status.during(phase):
            status.wait_between(what)
            yield
            status.leave()

    def close_to_strangers(self) -> None:
        """Closes gloo's listening sockets to everybody, once process groups have been made; with a launcher of ours."""
        if STORE in os.environ:
            refuse_connections()

    @property
    def stop_requested(self) -> bool:
        """Return whether this worker was told to stop after the present step. Other workers may not know yet."""
        return self.requests.ends

    @property
    def flags(self) -> int:
        """Return what this worker was asked for, as bits of `train.requests`."""
        return self.requests.flags
