"""Values of all ranks of a run: gathered, summed or maximised. Collective: all ranks call these in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import DistributedError
from pipeloom.parallel.collectives import Tag, carrier_of
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.runtime.health.report import plain_words, timed_out


def from_every_rank(pipeline: Pipeline, value: Any, what: str, phase: str | None = None) -> list[Any]:
    """Return the values of all ranks of the run, as JSON holds them. `what` and `phase` are for `Pipeline.waiting`."""
    if pipeline.mesh.everyone.size == 1:
        return [value]
    with pipeline.waiting(what, phase):
        return all_gather_json(value, pipeline.run_control)


def gather(pipeline: Pipeline, values: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank of the run, in rank order, in fp64."""
    return _gather(pipeline, values, pipeline.mesh.everyone.group)


def maxima(pipeline: Pipeline, values: Sequence[float]) -> list[float]:
    """Return the largest of each number over the ranks of the run."""
    return [max(column) for column in zip(*gather(pipeline, values), strict=True)]


def sums(pipeline: Pipeline | LocalPipeline, values: Sequence[float]) -> list[float]:
    """Return the sum of each number over the ranks of this pipeline, in fp64; the same bits on every rank."""
    return [sum(column) for column in zip(*_gather(pipeline, values, pipeline.group), strict=True)]


def _gather(pipeline: Pipeline | LocalPipeline, values: Sequence[float], group: Any) -> list[list[float]]:
    numbers = torch.tensor(values, dtype=torch.float64, device=carrier_of(pipeline.device, group))
    if group is None:
        return [numbers.tolist()]
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    with pipeline.waiting("the other ranks' numbers"):
        dist.all_gather(rows, numbers, group=group)
        return [row.tolist() for row in rows]  # under NCCL the host waits here


class NumberGather:
    """One exchange. All ranks of the run create their exchanges in the same order, with the same number of numbers.

    The receives are opened before anything is sent, so no send waits for a later action of another rank.
    """

    def __init__(self, pipeline: Pipeline, numbers: Sequence[float]) -> None:
        self._pipeline = pipeline
        self._own = torch.tensor(numbers, dtype=torch.float64)
        self._group = pipeline.run_control
        self._rank, ranks = pipeline.mesh.everyone.index, pipeline.mesh.everyone.size
        self._rows: list[Tensor] = [torch.empty_like(self._own) for _ in range(ranks)]
        self._rows[self._rank] = self._own
        self._known: tuple[tuple[float, ...], ...] | None = None
        others = [rank for rank in range(ranks) if rank != self._rank]
        self._receipts: list[tuple[int, Any]] = [
            (rank, self._group.recv([self._rows[rank]], rank, Tag.NUMBERS)) for rank in others
        ]
        self._sends: list[tuple[int, Any]] = [
            (rank, self._group.send([self._own], rank, Tag.NUMBERS)) for rank in others
        ]

    def wait(self) -> tuple[tuple[float, ...], ...]:
        """Wait for the numbers of every rank, and return them in rank order, with the same bits on every rank.

        Raises DistributedError if a rank has exited, or does not send them in time.
        """
        if self._known is None:
            with self._pipeline.waiting("the other ranks' parts of the gradient norm"):
                _complete(self._receipts)
            self._known = tuple(tuple(row.tolist()) for row in self._rows)
        return self._known

    def finish(self) -> None:
        """Wait until the other ranks have this rank's numbers. Raises DistributedError if a rank has exited."""
        with self._pipeline.waiting("the other ranks to take the gradient norm"):
            _complete(self._sends)
        self._sends = []


def _complete(works: Sequence[tuple[int, Any]]) -> None:
    for rank, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            lost = "did not send its part of the gradient norm in time" if timed_out(error) else "is gone"
            raise DistributedError(f"rank {rank} {lost}: {plain_words(error)}") from None
