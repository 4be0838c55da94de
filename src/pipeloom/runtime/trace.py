"""What a step took: the measured timeline on the boxes of the simulated one, with the ranks' clocks aligned."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime.work import StepResult
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


def gather_timeline(schedule: Schedule, mesh: PipelineMesh, result: StepResult, offset: float) -> Timeline:
    """The measured timeline of one step, on every rank, in seconds from its first action; its costs are the measured ones.

    Args:
        schedule: what this rank ran. Another may have run pairs as one action after the other; the timeline's says which.
    """
    mine = result.starts, result.ends, result.turns, schedule.codes[mesh.rank], offset
    everyone: list[Any] = [mine]
    if mesh.group is not None:
        everyone = [None] * len(mesh.ranks)
        dist.all_gather_object(everyone, mine, group=mesh.group)
    origin = min(starts[0] - off for starts, _, _, _, off in everyone)
    starts = tuple(tuple(t - off - origin for t in each) for each, _, _, _, off in everyone)
    ends = tuple(tuple(t - off - origin for t in each) for _, each, _, _, off in everyone)
    turns = [{at: t - off - origin for at, t in each.items()} for _, _, each, _, off in everyone]
    schedule = replace(schedule, codes=tuple(codes for _, _, _, codes, _ in everyone))
    return Timeline(schedule, measured_costs(schedule, starts, ends, turns), starts, ends, source="measured")


def measured_costs(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    turns: Sequence[Mapping[int, float]],
) -> Costs:
    """A stage's mean F, I and W in this timeline, in its unit. p2p is 0.

    A stage whose backward is never split counts half of B as I and half as W. `backward` is given where a stage has both.

    Args:
        turns: rank -> entry of a pair -> when it went from its forward to its backward.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for rank, program in enumerate(schedule.programs):
        for at, (cell, start, end) in enumerate(zip(program, starts[rank], ends[rank], strict=True)):
            actions = parts(cell)
            moments = (start, turns[rank][at], end) if len(actions) > 1 else (start, end)
            for action, begin, stop in zip(actions, moments, moments[1:], strict=False):
                times.setdefault((action.kind, action.stage), []).append(stop - begin)

    def mean(kind: str, stage: int) -> float:
        own = times.get((kind, stage))
        if own is None and kind != "F":
            own = [time / 2 for time in times.get(("B", stage), [0.0])]
        return fmean(own or [0.0])

    stages = range(schedule.stages)
    parted = tuple(mean("I", s) + mean("W", s) for s in stages)
    whole = tuple(mean("B", s) if ("B", s) in times else parted[s] for s in stages)
    return Costs(
        forward=tuple(mean("F", s) for s in stages),
        input_grad=tuple(mean("I", s) for s in stages),
        weight_grad=tuple(mean("W", s) for s in stages),
        backward=whole if any(("B", s) in times and ("I", s) in times for s in stages) else None,
    )
