"""What all drawings draw: one box for each program entry, with its chunk and phase."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pipeloom.schedule import Action, Schedule, Timeline
from pipeloom.schedule.actions import KINDS
from pipeloom.schedule.costs import durations
from pipeloom.schedule.model import parts

Phase = Literal["warm-up", "steady", "cool-down"]


class Box(NamedTuple):
    """One program entry.

    Attributes:
        actions: its action, or a pair's forward and backward.
        chunks: the chunk of each action.
        start, end: from the timeline's first start, in the unit of its costs.
        share: the part of the box that its first action takes (1 unless it is a pair).
        phase: warm-up before the rank's first backward, cool-down after its last forward.
    """

    rank: int
    actions: tuple[Action, ...]
    chunks: tuple[int, ...]
    start: float
    end: float
    share: float
    phase: Phase


def boxes(timeline: Timeline) -> tuple[tuple[Box, ...], ...]:
    """rank -> its boxes, in program order."""
    schedule = timeline.schedule
    origin = min((starts[0] for starts in timeline.starts if starts), default=0.0)
    chunk_of = {stage: chunk for held in schedule.stages_of for chunk, stage in enumerate(held)}
    duration = durations(schedule, timeline.costs) if schedule.has_pairs else []
    rows = []
    for rank, program in enumerate(schedule.programs):
        phases = _phases(schedule, rank)
        row = []
        for at, cell in enumerate(program):
            actions = parts(cell)
            share = _share(schedule, actions, duration) if len(actions) > 1 else 1.0
            start, end = timeline.starts[rank][at] - origin, timeline.ends[rank][at] - origin
            row.append(Box(rank, actions, tuple(chunk_of[a.stage] for a in actions), start, end, share, phases[at]))
        rows.append(tuple(row))
    return tuple(rows)


def segments(row: tuple[Box, ...]) -> Iterator[tuple[float, float, Action, int]]:
    """(start, end, action, chunk) of a rank's boxes; a pair is cut in two, as its actions' costs share it."""
    for box in row:
        middle = box.start + box.share * (box.end - box.start)
        yield box.start, middle, box.actions[0], box.chunks[0]
        if len(box.actions) > 1:
            yield middle, box.end, box.actions[1], box.chunks[1]


def nice_step(span: float, most: int) -> float:
    """The smallest of …, .5, 1, 2, 5, 10, 20, … that cuts `span` into at most `most` parts; 1 for an empty span."""
    if span <= 0:
        return 1.0
    rough = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _phases(schedule: Schedule, rank: int) -> list[Phase]:
    """The phase of each entry of a rank's program."""
    kinds = [{action.kind for action in parts(cell)} for cell in schedule.programs[rank]]
    first = next((at for at, kind in enumerate(kinds) if kind - {"F"}), len(kinds))
    last = next((at for at in reversed(range(len(kinds))) if "F" in kinds[at]), -1)
    return ["warm-up" if at < first else "cool-down" if at > last else "steady" for at in range(len(kinds))]


def _share(schedule: Schedule, actions: tuple[Action, ...], duration: list[float]) -> float:
    forward, backward = (
        duration[KINDS.index(a.kind) * schedule.kind_stride + a.stage * schedule.microbatches + a.microbatch]
        for a in actions
    )
    return forward / (forward + backward) if forward + backward > 0 else 0.5
