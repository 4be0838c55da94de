"""Small sums and maxima over the ranks of a pipeline. Collective: every rank calls them in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeloom.runtime import Pipeline


def gather(pipeline: Pipeline, values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, in rank order, in fp64."""
    own = torch.tensor(values, dtype=torch.float64, device=pipeline.device)
    rows = [torch.empty_like(own) for _ in range(pipeline.ranks)] if pipeline.group is not None else [own]
    if pipeline.group is not None:
        dist.all_gather(rows, own, group=pipeline.group)
    return [row.tolist() for row in rows]


def sums(pipeline: Pipeline, values: Sequence[float]) -> list[float]:
    """The sum over the ranks of each value, in fp64; the same bits on every rank."""
    return _reduce(pipeline, values, dist.ReduceOp.SUM)


def maxima(pipeline: Pipeline, values: Sequence[float]) -> list[float]:
    """The largest over the ranks of each value."""
    return _reduce(pipeline, values, dist.ReduceOp.MAX)


def _reduce(pipeline: Pipeline, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=pipeline.device)
    if pipeline.group is not None:
        dist.all_reduce(tensor, operation, group=pipeline.group)
    return [float(value) for value in tensor.tolist()]
