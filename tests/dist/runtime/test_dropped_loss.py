"""Losses under way when the pipeline that sends or takes them is dropped, of several pipelines in one process group."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from pipeloom import schedules as S
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.loss import LossBroadcast, LossSum
from processes import run_ranks



def losses(rank: int, dropped: str) -> list[float]:
    """The losses that this rank waits for, of two that rank 1 sends, 0.0 and 1.0; the first of them is dropped.

    dropped: "sender": rank 1 drops it before rank 0 takes it; "receiver": rank 0 does so before rank 1 sends it.
    """
    schedule, mesh, taken = S.one_f_one_b(2, 2), Mesh.resolve(None), []
    for loss in (0.0, 1.0):
        broadcast = LossBroadcast(mesh, schedule, torch.device("cpu"), FailureReporter(Status(rank)))
        first = 0 if dropped == "receiver" and not loss else 1
        if rank != first:
            dist.barrier()
        pending = broadcast.start(LossSum(torch.tensor(loss)) if rank == 1 else LossSum())
        if loss or (dropped == "sender" and rank == 0):
            taken.append(float(pending.wait()))
        del pending, broadcast
        gc.collect()
        if rank == first:
            dist.barrier()
    return taken


@pytest.mark.parametrize("dropped", ["sender", "receiver"])
def test_a_dropped_pipeline_still_sends_and_takes_its_loss(dropped: str) -> None:
    assert run_ranks(losses, 2, dropped, timeout=120.0) == [[0.0, 1.0] if dropped == "sender" else [1.0], [1.0]]
