"""Values of all ranks of a run: gathered, summed or maximised. Collective: all ranks call these in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.parallel.collectives import carrier_of
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.train.workers.context import WorkerContext


def from_every_worker(context: WorkerContext, value: Any, what: str, phase: str) -> list[Any]:
    """Return the values of all workers, as JSON holds them, also before there is a pipeline; `what`: as for `waiting`."""
    if context.world_size == 1:
        return [value]
    with context.waiting(what, phase):
        return all_gather_json(value, dist.group.WORLD)


def from_every_rank(pipeline: Pipeline, value: Any, what: str, phase: str | None = None) -> list[Any]:
    """Return the values of all ranks of the run, as JSON holds them. `what` and `phase` are for `Pipeline.waiting`."""
    if pipeline.mesh.everyone.size == 1:
        return [value]
    with pipeline.waiting(what, phase):
        return all_gather_json(value, pipeline._run_control)


def agreed(exchange: Callable[[Any], list[Any]], work: Callable[[], Any]) -> list[Any]:
    """Call `work` on every rank, and return the results of all; where it fails on any, raise the first error on every rank.

    Args:
        exchange: returns the values of all ranks, given that of this one.
        work: returns a value that JSON can hold; the errors passed on are CheckpointError and ConfigError.
    """
    result, kind, problem = None, "", ""
    try:
        result = work()
    except (CheckpointError, ConfigError) as error:
        kind, problem = type(error).__name__, str(error)
    answers = exchange([result, kind, problem])
    for _, kind, problem in answers:
        if kind:
            raise (ConfigError if kind == "ConfigError" else CheckpointError)(problem)
    return [value for value, *_ in answers]


def gather(pipeline: Pipeline, values: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank of the run, in rank order, in fp64."""
    return _gather(pipeline, values, pipeline.mesh.everyone.group)


def maxima(pipeline: Pipeline, values: Sequence[float]) -> list[float]:
    """Return the largest of each number over the ranks of the run."""
    return [max(column) for column in zip(*gather(pipeline, values), strict=True)]


def sums(pipeline: Pipeline | LocalPipeline, values: Sequence[float]) -> list[float]:
    """Return the sum of each number over the ranks of this pipeline, in fp64; the same bits on every rank."""
    return [sum(column) for column in zip(*_gather(pipeline, values, pipeline._group), strict=True)]


def _gather(pipeline: Pipeline | LocalPipeline, values: Sequence[float], group: Any) -> list[list[float]]:
    numbers = torch.tensor(values, dtype=torch.float64, device=carrier_of(pipeline.device, group))
    if group is None:
        return [numbers.tolist()]
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    with pipeline.waiting("the other ranks' numbers"):
        dist.all_gather(rows, numbers, group=group)
        return [row.tolist() for row in rows]  # under NCCL the host waits here


class NumberGather:
    """A gather of numbers that is under way. All ranks of the run start theirs in the same order, with as many numbers each."""

    def __init__(self, pipeline: Pipeline, numbers: Sequence[float]) -> None:
        self._pipeline = pipeline
        row = torch.tensor(numbers, dtype=torch.float64)
        self._rows: list[Tensor] = [row]
        self._work: Any = None
        if pipeline.mesh.everyone.size > 1:
            self._rows = [torch.empty_like(row) for _ in range(pipeline.mesh.everyone.size)]
            self._work = dist.all_gather(self._rows, row, group=pipeline._run_control, async_op=True)

    def wait(self) -> list[list[float]]:
        """Wait for the numbers of every rank, and return them in rank order, with the same bits on every rank."""
        if self._work is not None:
            with self._pipeline.waiting("the other ranks' parts of the gradient norm"):
                self._work.wait()
            self._work = None
        return [each.tolist() for each in self._rows]
