"""A worker's place in its run, its watchdog and its log, as the start of the worker hands them to the program that it runs."""

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
from pipeloom.train.signals import Requests

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its run.

    Attributes:
        rank: global rank; rank 0 writes to the terminal.
        world_size: number of workers of the run.
        local_rank: number of this worker on its machine.
        device: device on which this worker computes.
        store: key-value store that all workers share.
        requests: requests received by signals.
        watchdog: this worker's watchdog; None if it is the only worker.
        log: copy of this worker's output, to be opened in the run's folder; None: there is none.
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
        """Report to the watchdog a wait for `what` outside of steps, with the time limit of `phase`."""
        if self.watchdog is None:
            yield
            return
        status = self.watchdog.status
        with status.during(phase):
            status.wait_between(what)
            yield
            status.leave()

    def close_to_strangers(self) -> None:
        """Close gloo's sockets to new connections, once the process groups exist; only under Pipeloom's own launcher."""
        if STORE in os.environ:
            refuse_connections()

    @property
    def flags(self) -> int:
        """Return the requests that this worker has received, as bits of `train.signals`."""
        return self.requests.flags
