"""Measured steps from torch's CSV with durations: `0F0:1.25`, the action as in the plain CSV and its milliseconds.

Several steps are several durations, `0F0:1.25:1.31`. torch writes the orders of actions as CSV and no times; whoever times the
actions appends them. A duration does not tell when an action ran: it starts when its rank is free and its inputs are computed,
so hops take no time and no rank idles without a reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from pipeloom.errors import ScheduleError, UsageError, printable, shortened
from pipeloom.limits import SCHEDULE_BYTES, read_file
from pipeloom.schedule.check import check
from pipeloom.schedule.clocks import aligned, needs
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline

_MOST_MILLISECONDS = 1e12


def load_timed_csv(path: Path) -> tuple[Timeline, ...]:
    """The steps of the file.

    Raises UsageError for cells without durations or with different numbers of them, ScheduleError for an invalid schedule.
    """
    try:
        text = read_file(path, SCHEDULE_BYTES, "a schedule").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise UsageError(f"cannot read {shortened(str(path))}: {error.strerror or error}") from None
    lines, times = _taken_apart(text, path)
    schedule = from_csv("\n".join(lines), name=printable(path.stem), source=str(path))
    check(schedule)
    rows = [row for row in times if row]
    if [len(row) for row in rows] != [len(program) for program in schedule.programs if program]:
        raise UsageError(f"{path}: REDUCE_GRAD takes no duration here; leave it out")
    by_rank = iter(rows)
    durations = [next(by_rank) if program else [] for program in schedule.programs]
    steps = len(rows[0][0])
    return tuple(
        _timeline(schedule, [[each[step] / 1e3 for each in row] for row in durations]) for step in range(steps)
    )


def _taken_apart(text: str, path: Path) -> tuple[list[str], list[list[tuple[float, ...]]]]:
    """The lines without durations, and the durations of their cells."""
    lines: list[str] = []
    times: list[list[tuple[float, ...]]] = []
    count = 0
    for number, line in enumerate(text.removeprefix("\ufeff").rstrip().splitlines(), start=1):
        cells, row = [], []
        for piece in line.split(","):
            word = piece.strip().strip('"').strip()
            action, *rest = word.split(":")
            cells.append(action)
            if not action and not rest:
                continue
            where = f"{path}:{number}: {word!r:.60}"
            if not action:
                raise UsageError(f"{where} is a duration without an action, such as 0F0:1.25")
            if not rest:
                raise UsageError(f"{where} has no duration; write milliseconds after each action, such as 0F0:1.25")
            values = tuple(map(_milliseconds, rest))
            if any(math.isnan(value) for value in values):
                raise UsageError(f"{where}: a duration is a number of milliseconds from 0 on, such as 1.25")
            count = count or len(values)
            if len(values) != count:
                raise UsageError(f"{where} has {len(values)} durations, and the first cell {count}; one for each step")
            row.append(values)
        lines.append(",".join(cells))
        times.append(row)
    if not count:
        raise UsageError(f"{path}: the file contains no actions")
    return lines, times


def _milliseconds(text: str) -> float:
    """The number in `text`; NaN if it is not a number or is out of range."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value < _MOST_MILLISECONDS else math.nan


def _timeline(schedule: Schedule, durations: list[list[float]]) -> Timeline:
    """Return the timeline in which each entry starts as soon as its rank is free and its inputs are computed."""
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for source, position, rank, at in needs(schedule):
        if (source, position) != (rank, at):
            waits[rank, at].append((source, position))
    starts: list[list[float]] = [[] for _ in range(schedule.ranks)]
    ends: list[list[float]] = [[] for _ in range(schedule.ranks)]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(durations):
            while len(starts[rank]) < len(row):
                at = len(starts[rank])
                sources = waits[rank, at]
                if any(len(ends[source]) <= position for source, position in sources):
                    break
                free = ends[rank][-1] if at else 0.0
                starts[rank].append(max([free, *(ends[source][position] for source, position in sources)]))
                ends[rank].append(starts[rank][-1] + row[at])
                progress = True
    if any(len(row) != len(row_durations) for row, row_durations in zip(starts, durations, strict=True)):
        raise ScheduleError(f"{schedule.name} depends on itself")
    return aligned(schedule, starts, ends)
