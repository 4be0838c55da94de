"""A timeline in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from pipeloom.draw.boxes import Box, boxes
from pipeloom.draw.figures import heading
from pipeloom.schedule import Timeline
from pipeloom.schedule.actions import KIND_WORDS


def trace(timeline: Timeline, unit_microseconds: float | None = None) -> dict[str, Any]:
    """The events of `timeline`, ready for `json.dumps`: a process a rank, a slice for each action or pair, a memory
    counter.

    A slice's args are stage, chunk, micro-batch and phase (a pair's: those of its forward, then `backward_…`).

    Args:
        unit_microseconds: how long one unit of the costs is shown. Default: a second for a measured timeline (its
            times are seconds), a millisecond for a simulated one.
    """
    unit = unit_microseconds or (1e6 if timeline.source == "measured" else 1e3)
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(boxes(timeline)):
        stages = ", ".join(map(str, timeline.schedule.stages_of[rank]))
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} (stages {stages})"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": timeline.source}},
        ]
        events += [_slice(box, unit) for box in row]
        origin = min((starts[0] for starts in timeline.starts if starts), default=0.0)
        events += [
            {"ph": "C", "name": "memory", "pid": rank, "ts": (time - origin) * unit, "args": {"activations": level}}
            for time, level in timeline.memory_curve[rank]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": heading(timeline)}}


def _slice(box: Box, unit: float) -> dict[str, Any]:
    first = box.actions[0]
    args: dict[str, Any] = {
        "stage": first.stage,
        "chunk": box.chunks[0],
        "micro-batch": first.microbatch,
        "phase": box.phase,
    }
    for action, chunk in zip(box.actions[1:], box.chunks[1:], strict=True):
        args |= {"backward_stage": action.stage, "backward_chunk": chunk, "backward_micro-batch": action.microbatch}
    return {
        "ph": "X",
        "name": "|".join(map(str, box.actions)),
        "cat": "pair" if len(box.actions) > 1 else KIND_WORDS[first.kind],
        "pid": box.rank,
        "tid": 0,
        "ts": box.start * unit,
        "dur": (box.end - box.start) * unit,
        "args": args,
    }
