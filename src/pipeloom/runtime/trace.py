"""What a step took: the measured timeline on the boxes of the simulated one, with the ranks' clocks aligned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.timeline import Timeline

_CLOCK_TAG = 15
_ROUND_TRIPS = 5


def clock_offset(mesh: PipelineMesh, group: Any) -> float:
    """Seconds to subtract from this rank's `time.perf_counter` to get rank 0's, by the quickest of a few round trips.

    Collective over the pipeline. Half the quickest round trip bounds the error (Cristian's algorithm).
    """
    if mesh.group is None:
        return 0.0
    stamp = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, len(mesh.ranks)):
        if mesh.rank == 0:
            for _ in range(_ROUND_TRIPS):
                group.recv([stamp], rank, _CLOCK_TAG).wait()
                stamp[0] = time.perf_counter()
                group.send([stamp], rank, _CLOCK_TAG).wait()
        elif mesh.rank == rank:
            best = (float("inf"), 0.0)
            for _ in range(_ROUND_TRIPS):
                sent = time.perf_counter()
                group.send([stamp], 0, _CLOCK_TAG).wait()
                group.recv([stamp], 0, _CLOCK_TAG).wait()
                back = time.perf_counter()
                best = min(best, (back - sent, (sent + back) / 2 - stamp.item()))
            return best[1]
    return 0.0


def gather_timeline(
    schedule: Schedule, mesh: PipelineMesh, starts: Sequence[float], ends: Sequence[float], offset: float
) -> Timeline:
    """The measured timeline of one step, on every rank, in seconds from its first action; its costs are the measured ones."""
    mine = ([t - offset for t in starts], [t - offset for t in ends])
    everyone: list[Any] = [mine]
    if mesh.group is not None:
        everyone = [None] * len(mesh.ranks)
        dist.all_gather_object(everyone, mine, group=mesh.group)
    origin = min(s[0] for s, _ in everyone)
    all_starts = tuple(tuple(t - origin for t in s) for s, _ in everyone)
    all_ends = tuple(tuple(t - origin for t in e) for _, e in everyone)
    return Timeline(schedule, measured_costs(schedule, all_starts, all_ends), all_starts, all_ends, source="measured")


def measured_costs(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Costs:
    """A stage's mean F, I and W in this timeline, in its unit; a fused B counts half as I and half as W. p2p is 0.

    A pair's time is shared between its parts in equal measure.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for rank, program in enumerate(schedule.programs):
        for cell, start, end in zip(program, starts[rank], ends[rank], strict=True):
            actions = parts(cell)
            for action in actions:
                times.setdefault((action.kind, action.stage), []).append((end - start) / len(actions))

    def mean(kind: str, stage: int) -> float:
        return fmean(times.get((kind, stage), [0.0]))

    stages = range(schedule.stages)
    return Costs(
        forward=tuple(mean("F", s) for s in stages),
        input_grad=tuple(mean("I", s) + mean("B", s) / 2 for s in stages),
        weight_grad=tuple(mean("W", s) + mean("B", s) / 2 for s in stages),
    )
