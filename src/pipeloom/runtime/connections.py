"""One rank's ways to the other ranks of its pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.alarm import Alarm
from pipeloom.runtime.buffers import BufferPool
from pipeloom.runtime.lowering import RankProgram
from pipeloom.runtime.machines import share_memory
from pipeloom.runtime.monitor import Monitor
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.rank import Rank
from pipeloom.runtime.shared_memory import SharedLinks, SharedMemoryTransport
from pipeloom.runtime.torch_transport import Links, TorchTransport
from pipeloom.runtime.transport import InProcessTransport, Mailroom, Transport


class Connections:
    """Made on every rank of the mesh at once; `open` is collective over the pipeline.

    Attributes:
        pool: receive buffers.
        shared: connections through shared memory, where all ranks of the pipeline have them.
    """

    def __init__(self, mesh: Mesh, rank: Rank, device: torch.device, options: RuntimeOptions) -> None:
        self.pool = BufferPool(device)
        self.shared: SharedLinks | None = None
        self._mesh = mesh
        self._rank = rank
        self._device = device
        self._options = options
        self._links: Links | None = None
        self._run_control: Any = None

    def open(self, prefix: str) -> None:
        """Connects this rank with the others; `prefix`: of the run's keys in the store."""
        program = self._rank.program()
        if self._mesh.pipeline.group is not None:
            batched = self._options.transport == "batched"
            self.shared = share_memory(self._mesh, self._device, self._options, program.channels, prefix)
            self._links = Links(self._mesh.pipeline, program.all_channels, self._device, batched)
        everyone = self._mesh.everyone
        if everyone.size == len(self._mesh.pipeline.ranks):
            self._run_control = self.control
        elif "gloo" in str(dist.get_backend_config(everyone.group)):
            self._run_control = everyone.group
        else:
            self._run_control = dist.new_group(list(everyone.ranks), backend="gloo", use_local_synchronization=True)

    def watch(self, prefix: str, alarm: Alarm) -> None:
        """Starts the watchdog, which looks at this rank's peers in the pipeline and along the other axes."""
        default: Any = dist.distributed_c10d._get_default_store()
        store = default.clone()  # its own connection: the main thread may be inside a wait on the other
        status, everyone, options = self._rank.status, self._mesh.everyone, self._options
        peers = {status.names.number(rank) for channel in self._rank.program().channels for rank in channel[:2]}
        for axis in (self._mesh.dp, self._mesh.tp):  # a ring along each
            peers.add(everyone.ranks.index(axis.ranks[(axis.index + 1) % axis.size]))
        watched = sorted(peers - {status.number})
        alarm.monitor = Monitor(store, prefix, status, watched, everyone.size, options.timeout, options.notice)
        alarm.monitor.start()

    @property
    def control(self) -> Any:
        """A gloo group for small CPU messages between the pipeline's ranks; None for one process."""
        return None if self._links is None else self._links.control

    @property
    def run_control(self) -> Any:
        """The same between all ranks of the run."""
        return self._run_control

    @property
    def sums(self) -> Any:
        """A group for messages on this pipeline's device; None for one process."""
        return self.control if self._device.type == "cpu" else self._mesh.pipeline.group

    def transport(self, program: RankProgram) -> Transport:
        """What carries one run of `program`."""
        if self._links is None:
            return InProcessTransport(Mailroom())
        if self.shared is not None:
            return SharedMemoryTransport(self.shared, self.pool)
        batched = self._options.transport == "batched"
        return TorchTransport(self._links, program.acknowledges, self._rank.book, self.pool, batched)

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
