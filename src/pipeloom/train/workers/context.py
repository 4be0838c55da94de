"""A worker's place in its run, the requests that it has received, and the facts that all workers must agree on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.config import Layout
from pipeloom.errors import DistributedError
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.schedule.files import names_a_file
from pipeloom.schedule.functions import source_file
from pipeloom.train.workers.failures import STORE, RankLog
from pipeloom.train.workers.network import refuse_connections

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


STOP, INTERRUPT, SAVE = 1, 2, 4  # bits: SIGTERM, SIGINT, SIGUSR1


def together(flags: Iterable[float]) -> int:
    """Return the bits that any rank has set."""
    return reduce(or_, map(int, flags), 0)


@dataclass
class Requests:
    """The requests of one worker, as bits. The first signal that ends the run decides its exit code."""

    flags: int = 0

    @property
    def ends(self) -> bool:
        """Return whether the run is to end."""
        return bool(self.flags & (STOP | INTERRUPT))

    def note(self, number: int) -> None:
        """Record a signal."""
        if number == signal.SIGUSR1:
            self.flags |= SAVE
        elif not self.ends:
            self.flags |= INTERRUPT if number == signal.SIGINT else STOP

    def watch(self, *numbers: int) -> None:
        """Take these signals as requests from now on, also those that were received while they were blocked."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, lambda number, frame: self.note(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


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
        """Return the requests that this worker has received, as bits: STOP, INTERRUPT, SAVE."""
        return self.requests.flags


# -- agreement ---------------------------------------------------------------------------------------------------------

# The paths of the data may differ from machine to machine: their content is compared. Only rank 0 uses the folder of logs.
MAY_DIFFER = frozenset(
    {"data.source", "data.validation", "data.tokenizer", "data.cache", "log.dir"}
    | {"train.device", "train.devices", "train.timeout"}
)
_SAMPLED_BYTES = 64 * 2**20  # takes at most a second to read, and covers most texts in full
_SAMPLES = 64


def require_agreement(layouts: Sequence[Layout], context: WorkerContext, data: Mapping[str, str] | None = None) -> None:
    """Raise DistributedError, on every worker, if two workers differ; it names the differences. Collective over the run.

    Compared are the versions, Pipeloom's source, the configuration except for MAY_DIFFER, the files of a user's schedule and
    classes, and the data: of texts the `fingerprint`, of tokens the digests of the files and settings they were made from.

    Args:
        data: name -> digest that must be equal on all workers.
    """
    if context.world_size == 1:
        return
    # Imported here, because launchers import this module too, and torch takes them seconds.
    import torch.distributed as dist

    from pipeloom.parallel.exchange import all_gather_json
    from pipeloom.runtime.health.handshake import differences, source_facts

    mine: dict[str, Any] = source_facts()
    for number, layout in enumerate(layouts):
        where = f"layout {number}, " if len(layouts) > 1 else ""
        mine |= {f"{where}{key}": value for key, value in _settings(layout).items()}
    mine |= data or {}
    with context.waiting("what the other workers are about to train", "start-up"):
        disagreements = differences(all_gather_json(mine, dist.group.WORLD))
    if disagreements:
        raise DistributedError("the ranks disagree:\n" + "\n".join(f"  {line}" for line in disagreements))


def fingerprint(data: bytes | memoryview) -> str:
    """Return the size and the SHA-256 of `data`; of more than 64 MiB, the SHA-256 of 64 samples of 1 MiB at fixed offsets."""
    view = memoryview(data).cast("B")
    hasher = hashlib.sha256()
    if len(view) <= _SAMPLED_BYTES:
        hasher.update(view)
    else:
        piece = _SAMPLED_BYTES // _SAMPLES
        for number in range(_SAMPLES):
            start = (len(view) - piece) * number // (_SAMPLES - 1)
            hasher.update(view[start : start + piece])
    return f"{len(view)} bytes, SHA-256 {hasher.hexdigest()[:16]}"


def _settings(layout: Layout) -> dict[str, Any]:
    """Return section.key -> value, as JSON holds it, and the fingerprints of a user's code."""
    dumped = layout.config.model_dump(mode="json")
    settings = {f"{section}.{key}": value for section, table in dumped.items() for key, value in table.items()}
    settings = {key: value for key, value in settings.items() if key not in MAY_DIFFER}
    if names_a_file(layout.config.schedule.name):
        del settings["schedule.name"]  # the schedules are compared, which hosts may have from files of other names
    if layout.code is not None:
        settings["code of the schedule"] = fingerprint(Path(layout.code).read_bytes())
    for key in layout.classes:
        file = source_file(getattr(layout.config.model, key))
        if file is not None:
            settings[f"code of model.{key}"] = fingerprint(Path(file).read_bytes())
    return settings
