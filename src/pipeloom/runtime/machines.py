"""Are all ranks of a pipeline on one machine, so that messages can go through its memory?"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeloom.errors import ConfigError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.life import machine
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.shared_memory import SharedLinks
from pipeloom.schedule.channels import Channel


def memory_here() -> str | None:
    """What two processes must have in common to share memory here; None where the system cannot."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    here = machine("net")
    return f"{here} {os.getuid()}" if here else None


def share_memory(
    mesh: Mesh, device: torch.device, options: RuntimeOptions, channels: Sequence[Channel], prefix: str
) -> SharedLinks | None:
    """Connections through shared memory, where the options want them and all ranks of this pipeline can.

    They all decide alike; another pipeline of the mesh may be on another machine. A rank spins a moment before it sleeps
    only where every rank of the mesh has a core of its own.
    Raises ConfigError when the transport is "shared" and some rank is on another machine or not on a CPU.
    """
    if options.transport not in ("auto", "shared"):
        return None
    store = dist.distributed_c10d._get_default_store()
    here = memory_here() if device.type == "cpu" else None
    own = f"{prefix}/pipeline {mesh.place.dp} {mesh.place.tp}"
    line = mesh.pipeline
    store.set(f"{own}/machine/{line.rank}", str(here))
    places = {store.get(f"{own}/machine/{rank}").decode() for rank in range(len(line.ranks))}
    if places != {str(here)} or here is None:
        if options.transport == "shared":
            raise ConfigError('transport "shared" needs all ranks on the CPUs of one Linux machine; use "individual"')
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spin = mesh.everyone.size <= cores
    return SharedLinks(store, own, line.rank, channels, min(options.timeout, 60.0), spin)
