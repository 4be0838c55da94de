"""A few numbers gathered, summed or maximised over ranks. Collective: all ranks call these functions in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.parallel.collectives import carrier_of
from pipeloom.runtime import LocalPipeline, Pipeline


def gather(pipeline: Pipeline, values: Sequence[float]) -> list[list[float]]:
    """Return the values of every rank of the run, in rank order, in fp64."""
    everyone = pipeline.mesh.everyone
    local = torch.tensor(values, dtype=torch.float64, device=carrier_of(pipeline.device, everyone.group))
    if everyone.group is not None:
        rows = [torch.empty_like(local) for _ in range(everyone.size)]
        with pipeline.waiting("the other ranks' numbers"):
            dist.all_gather(rows, local, group=everyone.group)
            return [row.tolist() for row in rows]  # under NCCL the host waits here
    return [local.tolist()]


def maxima(pipeline: Pipeline, values: Sequence[float]) -> list[float]:
    """Return the largest of each value over the ranks of the run."""
    return _reduce(pipeline, values, dist.ReduceOp.MAX, pipeline.mesh.everyone.group)


def sums(pipeline: Pipeline | LocalPipeline, values: Sequence[float]) -> list[float]:
    """Return the sum of each value over the ranks of this pipeline, in fp64; the same bits on every rank."""
    return _reduce(pipeline, values, dist.ReduceOp.SUM, pipeline.group)


def _reduce(
    pipeline: Pipeline | LocalPipeline, values: Sequence[float], operation: dist.ReduceOp.RedOpType, group: Any
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=carrier_of(pipeline.device, group))
    if group is not None:
        with pipeline.waiting("the other ranks' numbers"):
            dist.all_reduce(tensor, operation, group=group)
            tensor = tensor.cpu()  # under NCCL the host waits here
    return [float(value) for value in tensor.tolist()]
