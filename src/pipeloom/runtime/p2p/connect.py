"""Connections of one rank to the other ranks of its pipeline."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.errors import ConfigError
from pipeloom.limits import usable_cores
from pipeloom.parallel.mesh import Mesh, group_of_members
from pipeloom.runtime.health.links import run_store
from pipeloom.runtime.health.status import machine
from pipeloom.runtime.options import NOTHING_TO_TURN_OFF, RuntimeOptions
from pipeloom.runtime.p2p.base import BatchQueue, BufferPool, InProcessTransport, Transport
from pipeloom.runtime.p2p.shared_memory import SharedLinks, SharedMemoryTransport
from pipeloom.runtime.p2p.torch_p2p import CoupledTransport, Links, TorchTransport
from pipeloom.runtime.program import RankProgram
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.channels import Channel, Message


class P2PConnections:
    """Connections of one rank. Every rank of the mesh constructs one at the same time; `open` is collective over the pipeline.

    Attributes:
        pool: receive buffers.
        shared: connections through shared memory, if all ranks of the pipeline have them.
        run_control: a gloo group of all ranks of the run; None for one process.
        leave: as of `CoupledTransport`; None: sends do not wait.
    """

    def __init__(self, mesh: Mesh, specs: ShapeCache, device: torch.device, options: RuntimeOptions) -> None:
        self.pool = BufferPool(device)
        self.shared: SharedLinks | None = None
        self._mesh = mesh
        self._specs = specs
        self._device = device
        self._options = options
        self._links: Links | None = None
        self.run_control: Any = None
        self.leave: Callable[[dict[Message, float]], object] | None = None

    def open(self, prefix: str, program: RankProgram) -> None:
        """Connect this rank with the others.

        Args:
            prefix: prefix of the run's keys in the store.
            program: the program of a training step, which determines the channels.
        """
        if self._mesh.pipeline.group is not None:
            batched = self._options.transport == "batched"
            rank = self._mesh.pipeline.rank
            ours = [each for each in program.channels if rank in (each.source, each.destination)]
            self.shared = share_memory(self._mesh, self._device, self._options, ours, prefix)
            self._links = Links(self._mesh.pipeline, program.channels, self._device, batched)
        everyone = self._mesh.everyone
        if everyone.size == len(self._mesh.pipeline.ranks):
            self.run_control = self.control
        elif "gloo" in str(dist.get_backend_config(everyone.group)):
            self.run_control = everyone.group
        else:
            self.run_control = group_of_members(everyone.ranks, backend="gloo")

    @property
    def control(self) -> Any:
        """A gloo group for small CPU messages between the pipeline's ranks; None for one process."""
        return None if self._links is None else self._links.control

    @property
    def sums(self) -> Any:
        """A group for messages on this pipeline's device; None for one process."""
        return self.control if self._device.type == "cpu" else self._mesh.pipeline.group

    def transport(self, program: RankProgram) -> Transport:
        """Return the transport for one run of `program`."""
        if self._links is None:
            return InProcessTransport({})
        if self.shared is not None:
            return SharedMemoryTransport(self.shared, self.pool)
        batches = None if program.batches is None else BatchQueue(program.batches)
        transport = TorchTransport(
            self._links, program.releases_sends, self._specs, self.pool, batches, self._options.checksum
        )
        return transport if self.leave is None else CoupledTransport(transport, self.leave)

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()


def memory_here() -> str | None:
    """Return an identifier that is equal for processes that can share memory; None if the system cannot."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    here = machine("mnt", "user")  # sockets are files, and the peer's user is checked
    return f"{here} {os.getuid()}" if here else None


def share_memory(
    mesh: Mesh, device: torch.device, options: RuntimeOptions, channels: Sequence[Channel], prefix: str
) -> SharedLinks | None:
    """Return connections through shared memory, if the options allow them and all ranks of this pipeline can use them.

    All ranks decide alike; another pipeline of the mesh may be on another machine. A rank spins briefly before it sleeps only
    if every rank of the mesh has its own core.

    Raises ConfigError if the transport is "shared" and some rank is on another machine or not on a CPU, and if messages
    would go through shared memory while the options turn `overlap_p2p` off.
    """
    if options.transport not in ("auto", "shared"):
        return None
    store = run_store(options.start_seconds)
    here = memory_here() if device.type == "cpu" else None
    line_prefix = f"{prefix}/pipeline {mesh.dp.index} {mesh.tp.index}"
    line = mesh.pipeline
    places = store.exchange(f"{line_prefix}/machine", line.rank, len(line.ranks), here)
    if here is None or set(places) != {here}:
        if options.transport == "shared":
            raise ConfigError('transport "shared" needs all ranks on the CPUs of one Linux machine; use "individual"')
        return None
    if options.overlap_p2p is False:
        raise ConfigError(NOTHING_TO_TURN_OFF)
    spin = mesh.everyone.size <= usable_cores()
    return SharedLinks(store, line_prefix, line.rank, channels, options.start_seconds, spin)
