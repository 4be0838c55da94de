"""Actions of a Kineto trace that names none, from a rank's sends and receives and the operators between them.

For one stage per rank: torch's `Schedule1F1B` and `ScheduleGPipe`, and loops of one's own. Operators that autograd's engine
runs are a backward, others a forward; sends and receives separate actions, and so does a change from one to the other. As many
forwards as backwards count, the longest ones, since splitting a batch or scaling gradients runs operators too. On a GPU an action
lasts from the first kernel that its operators launched to the end of the last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from pipeloom.schedule.actions import Action

INFERRED = "actions inferred from sends, receives and the operators between them: one stage per rank, in the order of the ranks"
"""The note on a trace that was read in this way."""

RECORD_LINE = (
    'with torch.profiler.record_function(f"PP:{stage}F{microbatch}"): around each forward, and the same with B around each '
    "backward"
)
"""The line that gives a trace the names of its actions."""

_BACKWARD = "autograd::engine::evaluate_function"
_SENDS, _RECEIVES = ("c10d::send",), ("c10d::recv_", "c10d::recv_any_source_")
_KERNELS, _CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


class KernelLaunch(NamedTuple):
    """A kernel: the host's time of its launch, its start and its end."""

    launched: float
    start: float
    end: float


def launches_of(events: Sequence[Mapping[str, Any]]) -> list[KernelLaunch]:
    """Return the kernels of a rank, without those of messages and collectives, in the order of their launches."""

    def correlation(event: Mapping[str, Any]) -> Any:
        arguments = event.get("args")
        return arguments.get("correlation") if isinstance(arguments, dict) else None

    calls = {correlation(event): event["ts"] for event in events if event.get("cat") in _CALLS}
    return sorted(
        KernelLaunch(calls[correlation(event)], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _KERNELS
        and correlation(event) in calls
        and not str(event.get("name", "")).startswith("nccl")
    )


def on_device(launches: Sequence[KernelLaunch], start: float, end: float) -> tuple[float, float] | None:
    """Return the start of the first kernel that was launched from `start` to `end`, and the end of the last; None: none was."""
    inside = launches[bisect_left(launches, (start,)) : bisect_right(launches, (end, inf))]
    return (min(each.start for each in inside), max(each.end for each in inside)) if inside else None


class _Run(NamedTuple):
    kind: str
    start: float
    end: float


def inferred_actions(
    events: Sequence[Mapping[str, Any]], rank: int, ranks: int, launches: Sequence[KernelLaunch] = ()
) -> list[tuple[float, float, Action]] | str:
    """Return (start, end, action) of one step in µs, in order, or the reason why they cannot be inferred.

    Args:
        events: the complete events ("X") of one rank and step, with numbers as ts and dur.
        rank: its place in the pipeline, which is its stage.
        launches: its kernels; none: it computes on the host.
    """
    if not launches and any(event.get("cat") in _KERNELS for event in events):
        return "its actions ran on a GPU, and the launches of the kernels are not in the trace"
    runs, sends = list(_runs(events)), sum(event.get("name") in _SENDS for event in events)
    backwards = [run for run in runs if run.kind == "B"]
    longest = sorted((run for run in runs if run.kind == "F"), key=lambda run: run.start - run.end)[: len(backwards)]
    forwards = sorted(longest, key=lambda run: run.start)
    neighbours = (rank > 0) + (rank + 1 < ranks)
    if not backwards or len(forwards) < len(backwards) or sends != len(backwards) * neighbours:
        return (
            f"rank {rank} has {len(forwards)} forwards, {len(backwards)} backwards and {sends} sends, which are not those of one "
            "stage per rank"
        )
    if launches:
        times = {run: on_device(launches, run.start, run.end) for run in (*forwards, *backwards)}
        if None in times.values():
            return f"rank {rank} has an action that launched no kernel"
        forwards, backwards = ([_Run(run.kind, *(times[run] or ())) for run in runs] for runs in (forwards, backwards))
    actions = [
        (run.start, run.end, Action(run.kind, rank, microbatch))
        for same in (forwards, backwards)
        for microbatch, run in enumerate(same)
    ]
    return sorted(actions, key=lambda action: action[0])


def _runs(events: Sequence[Mapping[str, Any]]) -> Iterator[_Run]:
    """Yield the runs of outermost operators of one kind without a send or receive between them, in order."""
    operators = [
        event for event in events if event.get("cat") == "cpu_op" or str(event.get("name", "")).startswith("Optimizer.")
    ]
    outermost: list[_Run] = []
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        start, end, name = event["ts"], event["ts"] + event["dur"], str(event["name"])
        if outermost and start < outermost[-1].end:
            continue
        other = name in (*_SENDS, *_RECEIVES) or "Optimizer." in name
        outermost.append(_Run("B" if name.startswith(_BACKWARD) else "" if other else "F", start, end))
    for kind, same in groupby(outermost, key=lambda run: run.kind):
        runs = list(same)
        if kind:
            yield _Run(kind, runs[0].start, runs[-1].end)
