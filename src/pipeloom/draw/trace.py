"""A timeline in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeloom.draw.boxes import EntryBox, boxes, byte_curves, queue_names, talk
from pipeloom.draw.figures import heading
from pipeloom.schedule import Timeline
from pipeloom.schedule.actions import COMPUTE, kind_of
from pipeloom.schedule.channels import Message, traffic
from pipeloom.schedule.timeline import timelines_of


def trace(timeline: Timeline, unit_microseconds: float | None = None) -> dict[str, Any]:
    """The events of `timeline`, ready for `json.dumps`: a process per rank with a thread for each queue, a slice for each action
    or pair, counters of memory and of the bytes in each pool, an arrow for each message between ranks.

    A slice's args are stage, chunk, micro-batch, phase and the number of its entry in the rank's program (a pair's: those of its
    forward, then `backward_…`).

    Args:
        unit_microseconds: how long one unit of the costs is shown. Default: a second for a measured timeline (its
            times are seconds), a millisecond for a simulated one.
    """
    timelines_of(timeline)
    unit = unit_microseconds or (1e6 if timeline.source == "measured" else 1e3)
    events: list[dict[str, Any]] = []
    threads = {queue: at + bool(at) for at, queue in enumerate(queue_names(timeline))}  # 1 is that of the all-to-all
    for rank, row in enumerate(boxes(timeline)):
        stages = ", ".join(map(str, timeline.schedule.stages_of[rank]))
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} (stages {stages})"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            *(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
                for name, thread in (threads | {timeline.source: threads[COMPUTE]}).items()
                if name != COMPUTE
            ),
        ]
        events += [_slice(box, threads[box.queue], unit, at) for at, box in enumerate(row)]
        events += [event for box in row for event in _all_to_all(timeline, box, unit)]
        origin = timeline.begin
        events += [
            {"ph": "C", "name": "memory", "pid": rank, "ts": (time - origin) * unit, "args": {"activations": level}}
            for time, level in timeline.memory_curve[rank]
        ]
        events += [
            {"ph": "C", "name": f"bytes in {pool}", "pid": rank, "ts": time * unit, "args": {"bytes": level}}
            for pool, curves in byte_curves(timeline).items()
            for time, level in curves[rank]
        ]
    events += _flows(timeline, unit)
    world = {"world_size": timeline.schedule.ranks}
    other = {"schedule": heading(timeline)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "distributedInfo": world, "otherData": other}


def _all_to_all(timeline: Timeline, box: EntryBox, unit: float) -> Iterator[dict[str, Any]]:
    """The box's all-to-all on a separate thread, for as long as the links are busy, the forward's first."""
    start, span = box.start * unit, (box.end - box.start) * unit
    for action, share in talk(timeline, box):
        slice_ = {"ph": "X", "name": f"all-to-all of {action}", "cat": "communication", "pid": box.rank, "tid": 1}
        yield {**slice_, "ts": start, "dur": share * span}
        start += share * span


def _flows(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    """An arrow for each message between ranks, from the middle of the slice that sends it to that of the one that needs it."""
    rows = boxes(timeline)
    sent_at: dict[Message, float] = {}
    programs = traffic(timeline.schedule)
    middle = [[(box.start + box.end) / 2 * unit for box in row] for row in rows]
    for rank, program in enumerate(programs):
        for at, entry in enumerate(program):
            sent_at |= dict.fromkeys(entry.sends, middle[rank][at])
    number = 0
    for rank, program in enumerate(programs):
        for at, entry in enumerate(program):
            for message in entry.receives:
                number += 1
                flow = {"cat": "message", "name": message.channel.kind, "id": number, "tid": 0}
                yield {"ph": "s", **flow, "pid": message.channel.source, "ts": sent_at[message]}
                yield {"ph": "f", "bp": "e", **flow, "pid": rank, "ts": middle[rank][at]}


def _slice(box: EntryBox, thread: int, unit: float, entry: int) -> dict[str, Any]:
    first = box.actions[0]
    args: dict[str, Any] = {
        "stage": first.stage,
        "chunk": box.chunks[0],
        "micro-batch": first.microbatch,
        "phase": box.phase,
        "entry": entry,
    }
    if first.slice is not None:
        args["slice"] = first.slice
    for action, chunk in zip(box.actions[1:], box.chunks[1:], strict=True):
        args |= {"backward_stage": action.stage, "backward_chunk": chunk, "backward_micro-batch": action.microbatch}
    return {
        "ph": "X",
        "name": "|".join(map(str, box.actions)),
        "cat": "pair" if len(box.actions) > 1 else kind_of(first.kind).words,
        "pid": box.rank,
        "tid": thread,
        "ts": box.start * unit,
        "dur": (box.end - box.start) * unit,
        "args": args,
    }
