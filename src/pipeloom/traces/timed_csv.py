"""torch's CSV with durations: `0F0:1.25`, the action as in the plain CSV and its milliseconds.

Several steps are several durations, `0F0:1.25:1.31`. torch writes the orders of actions as CSV and no times; whoever times the
actions appends them. A duration does not tell when an action ran: it starts when its rank is free and its inputs are computed,
so hops take no time and no rank idles without a reason.
"""

from __future__ import annotations

import re
from pathlib import Path

from pipeloom.errors import UsageError, printable
from pipeloom.limits import SCHEDULE_BYTES, read_text
from pipeloom.schedule.check import check
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.graph import Graph, WalkCosts, walk
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline
from pipeloom.traces.measured import MeasuredSteps, aligned

_CELL = re.compile(r"[^:]+(:\d{1,12}(\.\d*)?([eE][+-]?\d)?)+")  # an action and its milliseconds


def accepts(path: Path) -> bool:
    """Return whether it is a CSV file."""
    return path.suffix.lower() == ".csv" and path.is_file()


def read(path: Path) -> MeasuredSteps:
    """Return the steps of the file. Raises as `TraceReader.read`, also for cells with different numbers of durations."""
    text = read_text(path, SCHEDULE_BYTES, "a schedule")
    lines, times = _taken_apart(text, path)
    schedule = from_csv("\n".join(lines), name=printable(path.stem), source=str(path))
    check(schedule, training=True)
    rows = [row for row in times if row]
    codes = [code for program in schedule.codes for code in program]
    seconds = [[each / 1e3 for each in cell] for row in rows for cell in row]
    timelines = [_timeline(schedule, dict(zip(codes, step, strict=True))) for step in zip(*seconds, strict=True)]
    return MeasuredSteps(tuple(timelines), (), ("durations of actions alone: each starts as soon as it can",))


def _taken_apart(text: str, path: Path) -> tuple[list[str], list[list[tuple[float, ...]]]]:
    """Return the lines without durations, and the durations of their cells."""
    lines: list[str] = []
    times: list[list[tuple[float, ...]]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").rstrip().splitlines(), start=1):
        words = [piece.strip().strip('"').strip() for piece in line.split(",")]
        lines.append(",".join(word.partition(":")[0] for word in words))
        times.append([])
        for word in filter(None, words):
            steps = len(next((row[0] for row in times if row), ())) or word.count(":")
            if not _CELL.fullmatch(word) or word.count(":") != steps:
                raise UsageError(
                    f"{path}:{number}: {word!r:.60} is not an action with its milliseconds, one number for each step and as many "
                    "as in the first cell, such as 0F0:1.25 or 0F0:1.25:1.31"
                )
            times[-1].append(tuple(map(float, word.split(":")[1:])))
    if not any(times):
        raise UsageError(f"{path}: the file contains no actions")
    return lines, times


def _timeline(schedule: Schedule, seconds: dict[int, float]) -> Timeline:
    """Return the timeline in which each entry, of code -> `seconds`, starts as soon as its rank is free and its inputs exist."""
    actions = [seconds.get(code, 0.0) for code in range(schedule._no_action)]
    run = walk(schedule, Graph.of(schedule), WalkCosts(actions, None, seconds))
    return aligned(schedule, run.starts, run.ends)
