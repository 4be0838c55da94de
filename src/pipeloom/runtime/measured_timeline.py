"""Timing of a step: the measured timeline on the boxes of the simulated one, with the ranks' clocks aligned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from pipeloom.parallel.collectives import Tag
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime.executor import StepResult
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Exposed, Timeline

_ROUND_TRIPS = 5


def clock_offset(mesh: PipelineMesh, group: Any) -> float:
    """Seconds to subtract from this rank's `time.perf_counter` to get rank 0's, by the quickest of a few round trips.

    Collective over the pipeline, through `group`, which moves tensors of the CPU. Half the quickest round trip bounds the
    error (Cristian's algorithm).
    """
    if mesh.group is None:
        return 0.0
    stamp = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, len(mesh.ranks)):
        if mesh.rank == 0:
            for _ in range(_ROUND_TRIPS):
                group.recv([stamp], rank, Tag.CLOCK).wait()
                stamp[0] = time.perf_counter()
                group.send([stamp], rank, Tag.CLOCK).wait()
        elif mesh.rank == rank:
            best = (float("inf"), 0.0)
            for _ in range(_ROUND_TRIPS):
                sent = time.perf_counter()
                group.send([stamp], 0, Tag.CLOCK).wait()
                group.recv([stamp], 0, Tag.CLOCK).wait()
                back = time.perf_counter()
                best = min(best, (back - sent, (sent + back) / 2 - stamp.item()))
            return best[1]
    return 0.0


def gather_timeline(schedule: Schedule, mesh: PipelineMesh, result: StepResult, offset: float) -> Timeline:
    """The measured timeline of one step, on every rank, in seconds from its first action; its costs are the measured ones.

    Args:
        schedule: what the ranks ran.
    """
    mine = measured_rank(result, offset)
    everyone = [mine] if mesh.group is None else all_gather_json(mine, mesh.group)
    return timeline_of(schedule, everyone)


def measured_rank(result: StepResult, offset: float) -> list[Any]:
    """Return one rank's part for `timeline_of`: starts, ends, (entry, turn) of its pairs, communications, end, clock's offset."""
    communication = None if result.exposed is None else [dict(result.exposed), dict(result.after)]
    return [result.starts, result.ends, list(result.turns.items()), communication, result.end, offset]


def timeline_of(schedule: Schedule, everyone: Sequence[Sequence[Any]]) -> Timeline:
    """The timeline of `everyone`: rank -> as `measured_rank` returns it."""
    origin = min(starts[0] - off for starts, *_, off in everyone)
    starts = tuple(tuple(t - off - origin for t in each) for each, *_, off in everyone)
    ends = tuple(tuple(t - off - origin for t in each) for _, each, *_, off in everyone)
    turns = [{at: t - off - origin for at, t in each} for _, _, each, *_, off in everyone]
    exposed: tuple[Exposed, ...] = ()
    if all(communication is not None for *_, communication, _, _ in everyone):
        exposed = tuple(
            Exposed(inside, after, max(end - off - origin, last[-1]))
            for (*_, (inside, after), end, off), last in zip(everyone, ends, strict=True)
        )
    return Timeline.measured(schedule, starts, ends, turns, exposed)
