"""Operators of a few steps, recorded by torch.profiler, and the actions that ran them, in one trace file for Perfetto."""

from __future__ import annotations

import gc
import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeloom import draw
from pipeloom.parallel.exchange import gather_tree
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Timeline
from pipeloom.train.collect import gather

MOST_OPERATORS = 200_000  # per rank, about 20 MB of the file
_FIRST_ROW = 2  # of operators in a rank's group; actions have row 0, their all-to-alls row 1
_ARROWS = 1 << 24  # arrow ids reserved per rank, so that the ids of two ranks never coincide


class OperatorProfile:
    """Records the operators of this rank and the actions of its pipeline in a window of steps, and writes them.

    Every rank of the run creates one and calls the same methods, on the thread that runs the steps: torch's profiler crashes
    the process if the thread that stops it is not the one that started it. The constructor starts and stops the profiler
    once, because its first start takes about a second; recording starts with the window.

    All events share one time axis. The profiler counts nanoseconds of the Unix clock, and actions are timed by
    `time.perf_counter`; both clocks are read together at the start of the window. The ranks of a pipeline are aligned as in
    `Pipeline.timeline`, pipelines on different hosts by the hosts' Unix clocks.

    Attributes:
        path: the file that rank 0 writes.
    """

    def __init__(self, pipeline: Pipeline, first: int, last: int, folder: Path, most: int = MOST_OPERATORS) -> None:
        """
        Args:
            first, last: first and last step of the window.
            folder: the run's folder.
            most: largest number of operators of this rank to keep; the longest ones are kept.
        """
        self.path = folder / "profile.json"
        self._pipeline = pipeline
        self._first, self._last = first, last
        self._most = most
        self._own = pipeline.mesh.pipeline.ranks[pipeline.mesh.pipeline.rank]
        self._profiler: profile | None = None
        self._unix_less_counter = 0  # nanoseconds
        self._steps: list[tuple[int, float, Timeline]] = []  # number, perf_counter of the timeline's second 0, timeline
        self._over = False
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise kineto prints two lines at each start and stop
        with self._new():
            pass

    def _new(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._pipeline.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, acc_events=True)

    def before_step(self, step: int) -> None:
        """Start recording if `step` is in the window, which is collective."""
        if self._over or self._profiler is not None or not self._first <= step <= self._last:
            return
        self._profiler = self._new()
        self._profiler.start()
        gather(self._pipeline, [0.0])  # starting takes longer on some ranks than on others: wait for all
        self._unix_less_counter = _unix_less_counter()

    def after_step(self, step: int) -> list[str]:
        """Keep the step's actions while recording. After the last step of the window, write the file, which is collective.

        Returns:
            lines to print: the path of the file.
        """
        if self._profiler is None:
            return []
        timeline, rank = self._pipeline.timeline(), self._pipeline.mesh.pipeline.rank
        self._steps.append((step, self._pipeline.step_began - timeline.starts[rank][0], timeline))
        return self.finish() if step >= self._last else []

    def finish(self) -> list[str]:
        """Write what has been recorded, if anything, and stop recording; collective.

        Returns:
            lines to print.
        """
        if self._profiler is None:
            return []
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)
        self._profiler.stop()
        operators = sorted(_operators(self._profiler), key=lambda event: -event["dur"])
        # The profiler is part of a reference cycle. Its native part must be destroyed now: at the exit of the interpreter,
        # its destructor fails about every second time and kills the process.
        self._profiler, self._over = None, True
        gc.collect()
        seconds = self._unix_less_counter * 1e-9
        begun = gather(self._pipeline, [zero + seconds for _, zero, _ in self._steps])
        text = ",\n".join(json.dumps(event) for event in self._events(operators[: self._most], begun))
        parts = self._on_rank_0(text, max(0, len(operators) - self._most))
        if parts is None:
            return []
        whole = self.path.with_suffix(".part")
        try:
            with whole.open("w", encoding="utf-8") as file:
                file.write(
                    '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(text for text, _ in parts) + "\n]}\n"
                )
            whole.replace(self.path)
        except OSError as error:
            return [f"cannot write {self.path}: {error.strerror or error}; training continues without a profile"]
        lines = [f"profile: {self.path}  (open it in ui.perfetto.dev)"]
        if left_out := sum(count for _, count in parts):
            lines.append(f"profile: the shortest {left_out:,} operators are left out")
        return lines

    def _on_rank_0(self, text: str, left_out: int) -> list[tuple[str, int]] | None:
        """Return the text of every rank's events, and the number of its operators left out, on rank 0; None on the others."""
        everyone = self._pipeline.mesh.everyone
        if everyone.group is None:
            return [(text, left_out)]
        data = torch.frombuffer(
            bytearray(text.encode()), dtype=torch.uint8
        )  # as a tensor, because JSON would escape it
        with self._pipeline.waiting("the other ranks' operators", "save"):
            parts = gather_tree((data, left_out), everyone.group, everyone.ranks[0])
        return None if parts is None else [(bytes(data.numpy()).decode(), count) for data, count in parts]

    def _events(
        self, operators: Sequence[dict[str, Any]], everyone: Sequence[Sequence[float]]
    ) -> Iterator[dict[str, Any]]:
        """Yield this rank's events: names, operators, and on a pipeline's first rank the actions of all its ranks.

        Args:
            everyone: rank -> Unix time of second 0 of each step, by that rank's clock. A pipeline uses its first rank's.
        """
        pipeline, rank = self._pipeline, self._own
        line = pipeline.mesh.pipeline
        origin, begun = min(row[0] for row in everyone), everyone[line.ranks[0]]
        stages = ", ".join(map(str, pipeline.schedule.stages_of[line.rank]))
        yield _name(rank, "process_name", {"name": f"rank {rank} (stages {stages})"})
        yield _name(rank, "process_sort_index", {"sort_index": rank})
        yield _name(rank, "thread_name", {"name": "actions"}, 0)
        arrows = rank * _ARROWS
        if line.rank == 0:
            for (step, _, timeline), start in zip(self._steps, begun, strict=True):
                last = arrows
                for event in self._actions(timeline, step, (start - origin) * 1e6, arrows):
                    last = max(last, event.get("id", 0))
                    yield event
                arrows = last
        # Clocks are aligned anew in each step: an operator's time counts from second 0 of the step that it belongs to.
        zeros = [round(zero * 1e9) + self._unix_less_counter for _, zero, _ in self._steps]
        of_row: dict[str, int] = {}
        for event in sorted(operators, key=lambda event: event["start"]):
            row = of_row.get(event["where"])
            if row is None:
                row = of_row[event["where"]] = _FIRST_ROW + len(of_row)
                yield _name(rank, "thread_name", {"name": event["where"]}, row)
            step = max(0, bisect_right(zeros, event["start"]) - 1)
            start = (begun[step] - origin) * 1e6 + (event["start"] - zeros[step]) / 1e3
            yield {"ph": "X", "name": event["name"], "pid": rank, "tid": row, "ts": start, "dur": event["dur"] / 1e3}

    def _actions(self, timeline: Timeline, step: int, at: float, arrows: int) -> Iterator[dict[str, Any]]:
        """Yield the trace events of a step's actions on all ranks of this pipeline, shifted by `at` microseconds."""
        ranks = self._pipeline.mesh.pipeline.ranks
        for event in draw.trace(timeline)["traceEvents"]:
            if event["ph"] == "M":
                continue
            event["pid"] = ranks[event["pid"]]
            event["ts"] += at
            if "id" in event:
                event["id"] += arrows
            if event["ph"] == "X":
                event["args"] = {**event.get("args", {}), "step": step}
            yield event


def _unix_less_counter() -> int:
    """Return the nanoseconds by which the Unix clock is ahead of `time.perf_counter`, from the quickest of five readings."""
    readings = []
    for _ in range(5):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def _operators(profiler: profile) -> Iterator[dict[str, Any]]:
    """Yield the name, start and duration in nanoseconds (start on the Unix clock), and thread or stream of each event."""
    recorder = profiler.profiler
    result = None if recorder is None else recorder.kineto_results
    for event in () if result is None else result.events():
        on_host = event.device_type().name == "CPU"
        where = (
            f"operators, thread {event.start_thread_id()}"
            if on_host
            else f"device {event.device_index()}, stream {event.device_resource_id()}"
        )
        yield {"name": event.name(), "start": event.start_ns(), "dur": event.duration_ns(), "where": where}


def _name(rank: int, kind: str, arguments: dict[str, Any], row: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": arguments}
