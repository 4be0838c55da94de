"""The content of every drawing: one box for each program entry, with its queue, chunk and phase, and curves of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pipeloom.schedule import Action, Schedule, Timeline
from pipeloom.schedule.actions import COMPUTE, INPUT_GRADIENT, OUTPUT, kind_number, kind_of
from pipeloom.schedule.costs import durations
from pipeloom.schedule.model import parts, steady_entries

Phase = Literal["warm-up", "steady", "cool-down"]


class EntryBox(NamedTuple):
    """One program entry.

    Attributes:
        actions: its action, or a pair's forward and backward.
        chunks: the chunk of each action.
        start, end: from the timeline's first start, in the unit of its costs.
        share: the part of the box that its first action takes (1 unless it is a pair).
        phase: warm-up before the rank's first backward, cool-down after its last forward.
        queue: what is busy meanwhile.
    """

    rank: int
    actions: tuple[Action, ...]
    chunks: tuple[int, ...]
    start: float
    end: float
    share: float
    phase: Phase
    queue: str


def boxes(timeline: Timeline) -> tuple[tuple[EntryBox, ...], ...]:
    """rank -> its boxes, in program order."""
    schedule = timeline.schedule
    origin = timeline.begin
    chunk_of = {stage: chunk % schedule.chunks for held in schedule.stages_of for chunk, stage in enumerate(held)}
    duration = durations(schedule, timeline.costs) if schedule.has_pairs else []
    rows = []
    for rank, program in enumerate(schedule.programs):
        phases = _phases(schedule, rank)
        row = []
        for at, cell in enumerate(program):
            actions = parts(cell)
            share = _share(schedule, actions, duration) if len(actions) > 1 else 1.0
            start, end = timeline.starts[rank][at] - origin, timeline.ends[rank][at] - origin
            chunks, queue = tuple(chunk_of[a.stage] for a in actions), kind_of(actions[0].kind).queue
            row.append(EntryBox(rank, actions, chunks, start, end, share, phases[at], queue))
        rows.append(tuple(row))
    return tuple(rows)


def queue_names(timeline: Timeline) -> tuple[str, ...]:
    """Return the queues that any rank uses, computation first, the others by name."""
    return COMPUTE, *sorted(set().union(*timeline.schedule.queues) - {COMPUTE})


def byte_curves(timeline: Timeline) -> dict[str, tuple[tuple[tuple[float, float], ...], ...]]:
    """pool -> rank -> (time from the timeline's first start, bytes from then on), in order of time, of the pools in use."""
    origin = timeline.begin
    return {
        pool: tuple(
            tuple(
                (time - origin, level)
                for (_, before), (time, level) in zip(((0.0, None), *curve), curve, strict=False)
                if level != before
            )
            for curve in curves
        )
        for pool, curves in timeline.bytes_curves.items()
        if any(timeline.peak_bytes[pool])
    }


def segments(row: tuple[EntryBox, ...]) -> Iterator[tuple[float, float, Action, int]]:
    """(start, end, action, chunk) of a rank's boxes; a pair is cut in two, as its actions' costs share it."""
    for box in row:
        middle = box.start + box.share * (box.end - box.start)
        yield box.start, middle, box.actions[0], box.chunks[0]
        if len(box.actions) > 1:
            yield middle, box.end, box.actions[1], box.chunks[1]


def talk(timeline: Timeline, box: EntryBox) -> tuple[tuple[Action, float], ...]:
    """The box's actions with declared all-to-all, each with the share of the box's time that its all-to-all takes."""
    costs, stages = timeline.costs, timeline.schedule.stages
    shares = costs.per_stage("all_to_all", stages)
    factors = costs.time_factors(timeline.schedule)
    action_shares = []
    for action in box.actions:
        produces = kind_of(action.kind).produces
        name = "forward" if OUTPUT in produces else "input_grad" if INPUT_GRADIENT in produces else None
        if name is not None and shares[action.stage] and box.end > box.start:
            alone = costs.per_stage(name, stages)[action.stage] * factors[timeline.schedule.unit_of(action)]
            action_shares.append((action, shares[action.stage] * alone / (box.end - box.start)))
    return tuple(action_shares)


def nice_step(span: float, most: int) -> float:
    """The smallest of …, .5, 1, 2, 5, 10, 20, … that cuts `span` into at most `most` parts; 1 for an empty span."""
    if span <= 0:
        return 1.0
    rough = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _phases(schedule: Schedule, rank: int) -> list[Phase]:
    """The phase of each entry of a rank's program."""
    program = schedule.programs[rank]
    first, last = steady_entries(program)
    return ["warm-up" if at < first else "cool-down" if at > last else "steady" for at in range(len(program))]


def _share(schedule: Schedule, actions: tuple[Action, ...], duration: list[float]) -> float:
    forward, backward = (
        duration[kind_number(a.kind) * schedule._kind_stride + a.stage * schedule.units + schedule.unit_of(a)]
        for a in actions
    )
    return forward / (forward + backward) if forward + backward > 0 else 0.5
