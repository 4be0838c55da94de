"""Chrome traces, and exports of Nsight Systems: one file with a process for each rank, or a folder with a file for each rank.

An event is an action if it has the name of one: `3F0` or `0F5|3B1`, as in Pipeloom's traces; the same after torch's `PP:`; or
`Forward 3` and `Backward 3`, as in torch's GPipe, where the stage is the rank. Where the same names are measured on a GPU
(`gpu_user_annotation`), only those events count. `ProfilerStep#N` cuts a file into steps; without it each occurrence of an action
of a micro-batch is another step.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.errors import ScheduleError, UsageError, reason_of, shortened
from pipeloom.foreign import is_number, number_in
from pipeloom.limits import MOST_WORKERS, SCHEDULE_BYTES, read_file
from pipeloom.schedule.actions import Action, Cell, Pair, kind_of, parse_cell
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.timeline import Timeline
from pipeloom.traces import nsys
from pipeloom.traces.inferred import INFERRED, RECORD_LINE, inferred_actions, launches_of
from pipeloom.traces.measured import MeasuredSteps, aligned

_BEGINNING = 2**20  # bytes within which a trace is recognised: the ranks' process groups are written before the events
_SUFFIXES = (".json", ".json.gz")
_STEP = re.compile(r"ProfilerStep#\d+")
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,7})")
_NUMBER = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})", re.IGNORECASE)
_APART = ("B", "E", "b", "e", "S", "F")  # phases of an event that is only the begin or the end of something
_MOST_BYTES = 32 * SCHEDULE_BYTES


class _NamedEvent(NamedTuple):
    start: float
    end: float
    cell: Cell
    entry: float = math.inf  # its number in the program, where Pipeloom has written it: queues run beside each other


class _Row(NamedTuple):
    """One rank's steps, each a list of events by start."""

    rank: int
    steps: list[list[_NamedEvent]]
    memory: float = 0.0  # GB, 0 where the trace does not give it
    marked: bool = True  # where its steps begin and end


def accepts(path: Path) -> bool:
    """Return whether the file is a Chrome trace, by its beginning, or the folder contains one."""
    return bool(_trace_files(path)) if path.is_dir() else _is_trace(path)


def _is_trace(path: Path) -> bool:
    if not path.name.lower().endswith(_SUFFIXES) or not path.is_file():
        return nsys.is_export(path)
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            head = file.read(_BEGINNING)
    except (OSError, EOFError):
        return False
    return b'"traceEvents"' in head or (head.lstrip().startswith(b"[") and b'"ph"' in head)


def _trace_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _is_trace(path))


def read(path: Path) -> MeasuredSteps:
    """Return the steps of a trace or of a folder of traces. Raises as `TraceReader.read`, also where a process has no trace."""
    ranks = _ranks_of_folder(path) if path.is_dir() else _ranks_of_file(path)
    rows = [row for rank, events in ranks if (row := _row(events, rank, path)).steps]
    if rows:
        rows, notes = _without_replicas(rows) if path.is_dir() else (rows, [])
        return _timelines(path, rows, ["actions by the names of the events", *notes])
    return _timelines(path, _inferred([events for _, events in ranks], path), [INFERRED])


def _ranks_of_file(path: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return (rank, events) of each process of one file that has an action, or of all where none has.

    The ranks are those in the names of the processes, or where these name none for each, their places by number.
    """
    processes: dict[str, list[dict[str, Any]]] = {}
    named: dict[str, int] = {}
    trace = _read(path)
    for event in _events_of(trace, path, ("X", "C", "M")):
        pid = str(event.get("pid"))
        if event["ph"] != "M":
            processes.setdefault(pid, []).append(event)
        elif event.get("name") == "process_name" and (number := _NUMBER.search(str(event.get("args")))):
            named[pid] = int(number[1])
    every = sorted(processes, key=lambda pid: (len(pid), pid))
    with_actions = [pid for pid in every if _row(processes[pid], 0, path).steps]
    _require_all(path, trace, len(with_actions) or 1)
    held = with_actions or every
    ranks = {named[pid]: processes[pid] for pid in held if pid in named}
    return sorted(ranks.items()) if len(ranks) == len(held) else [(at, processes[pid]) for at, pid in enumerate(held)]


def _ranks_of_folder(folder: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return (rank, events) of each file."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    files = _trace_files(folder)
    for at, path in enumerate(files):
        trace = _read(path)
        _require_all(folder, trace, len(files))
        rank = _rank_of(trace, path, at)
        if rank in ranks:
            raise UsageError(f"{folder}: two files are of rank {rank}; keep one trace for each rank, of one run")
        ranks[rank] = _events_of(trace, path)
    return sorted(ranks.items())


def _without_replicas(rows: Sequence[_Row]) -> tuple[list[_Row], list[str]]:
    """Return the ranks of one pipeline, in order of their stages, and a note on the others."""
    lines: dict[frozenset[int], _Row] = {}
    for row in rows:
        lines.setdefault(frozenset(a.stage for event in row.steps[-1] for a in parts(event.cell)), row)
    best_rows = [lines[held] for held in sorted(lines, key=min)]
    left = len(rows) - len(best_rows)
    notes = [f"{left} of {len(rows)} files hold the stages of another one (replicas) and are left out"] if left else []
    return best_rows, notes


def _require_all(path: Path, trace: Any, count: int) -> None:
    """Raise UsageError where the run that a trace is of had more processes than the `count` that are in `path`."""
    world = number_in(f"{path}: world_size", _info(trace).get("world_size", 1), 1, MOST_WORKERS, whole=True)
    if world > count:
        raise UsageError(
            f"{path} holds the traces of {count} of {world} processes; give a folder with those of all, a file for each"
        )


def _info(trace: Any) -> dict[str, Any]:
    """Return what a trace of torch says about its process."""
    info = trace.get("distributedInfo") if isinstance(trace, dict) else None
    return info if isinstance(info, dict) else {}


def _rank_of(trace: Any, path: Path, default: int) -> int:
    """Return the rank given in a trace, else in the name of its file, else `default`."""
    number, info = _NUMBER.search(path.name), _info(trace)
    default = int(number[1]) if number else default
    return int(number_in(f"{path}: rank", info.get("rank", default), 0, MOST_WORKERS, whole=True))


def _read(path: Path) -> Any:
    if nsys.is_export(path):
        return nsys.read_trace(path)
    try:
        content = read_file(path, _MOST_BYTES, "a trace")
        if path.name.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=BytesIO(content)) as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise UsageError(f"{path} has more than {_MOST_BYTES:,} bytes; trace fewer steps")
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read {shortened(str(path))}: {reason_of(error)}") from None


def _events_of(trace: Any, path: Path, phases: tuple[str, ...] = ("X", "C")) -> list[dict[str, Any]]:
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise UsageError(f"{path}: traceEvents is not a list")
    events = [event for event in events if isinstance(event, dict)]
    for event in events:
        phase, name = str(event.get("ph")), str(event.get("name", ""))
        if phase in _APART and _cell_of(name, 0) is not None:
            raise UsageError(
                f"{path}: the action {name!r:.60} begins and ends in events of their own (ph {phase!r}); record complete ones "
                "(ph 'X', with dur)"
            )
    return [event for event in events if event.get("ph") in phases]


def _inferred(ranks: Sequence[Sequence[dict[str, Any]]], path: Path) -> list[_Row]:
    """Return a row for each rank of a trace without names of actions. Raises UsageError with the line to add where it fails."""
    rows, reason = [], "it has no sends and receives of a pipeline"
    for rank, events in enumerate(ranks):
        slices = [event for event in events if event["ph"] == "X" and event.get("cat") != "Trace"]
        times = [(event, *_interval(event, str(event.get("name", "")), path)) for event in slices]
        cuts = [(start, end) for event, start, end in times if _STEP.fullmatch(str(event.get("name", "")))]
        if not cuts:
            ends = [end for event, _, end in times if str(event.get("name", "")).startswith("Optimizer.step")]
            cuts = list(pairwise([-math.inf, *ends, math.inf]))
        steps, launches = [], launches_of([event for event, *_ in times])
        for low, high in sorted(cuts):
            inside = [event for event, start, _ in times if low <= start < high]
            actions = inferred_actions(inside, rank, len(ranks), launches)
            if isinstance(actions, str):
                reason = reason if "0 backwards" in actions else actions
            else:
                steps.append([_NamedEvent(start / 1e6, end / 1e6, action) for start, end, action in actions])
        rows += [_Row(rank, steps)] if steps else []
    if len(rows) < max(2, len(ranks)):
        exports = any(map(nsys.is_export, path.iterdir() if path.is_dir() else [path]))
        raise UsageError(
            f"{path}: no event has the name of an action, such as 0F0, PP:3B2 or 0F5|3B1, and none can be inferred: {reason}. "
            f"Add to the program that is traced: {nsys.RECORD_RANGES if exports else RECORD_LINE}"
        )
    return rows


def _row(every: Sequence[dict[str, Any]], rank: int, path: Path) -> _Row:
    """One rank's steps; none where no event is an action."""
    counters = [event.get("args") for event in every if event["ph"] == "C" and event.get("name") == "memory"]
    levels = [args.get("GB") for args in counters if isinstance(args, dict)]
    host: list[_NamedEvent] = []
    device: list[_NamedEvent] = []
    steps: list[tuple[float, float]] = []
    marked = False
    events = [event for event in every if event["ph"] == "X"]
    operators = _operators(events, path)
    sharded = any(str(event.get("name", "")).startswith("FSDP::") for event in events)
    for event in events:
        name = str(event.get("name", ""))
        on_device = event.get("cat") == "gpu_user_annotation"
        if _STEP.fullmatch(name):
            marked = True
            if not on_device:
                steps.append(_interval(event, name, path))
            continue
        cell = _cell_of(name, rank)
        # torch's runtime names the gathers and reductions of stages that are not sharded, too: they do nothing.
        idle = cell is not None and not sharded and name.startswith("PP:") and kind_of(parts(cell)[0].kind).of_stage
        if cell is not None and not idle:
            arguments = event.get("args")
            entry = arguments.get("entry") if isinstance(arguments, dict) else None
            entry = entry if is_number(entry) and entry >= 0 else math.inf
            start, end = _interval(event, name, path)
            if not on_device:
                start, end = _computing(start, end, operators.get(str(event.get("tid")), []))
            (device if on_device else host).append(_NamedEvent(start, end, cell, entry))
    outermost = _outermost(sorted(device or host, key=lambda event: (event.start, -event.end)))
    if len(steps) > 1 and not device:  # on a device the work of a step runs on into the host's next one
        groups = [[action for action in outermost if low <= action.start < high] for low, high in sorted(steps)]
    else:
        groups = _cut_by_repetition(outermost)
    memory = max(filter(is_number, levels), default=0.0)
    return _Row(rank, [group for group in groups if group], memory, marked)


def _cut_by_repetition(events: Sequence[_NamedEvent]) -> list[list[_NamedEvent]]:
    """Return the events step by step: an action of a micro-batch that repeats begins another one.

    Gathers and reductions of stages have no micro-batch; as many of them as come before the first step belong to the next.
    """

    def of_stage(event: _NamedEvent) -> bool:
        return kind_of(parts(event.cell)[0].kind).of_stage

    groups: list[list[_NamedEvent]] = [[]]
    before = [event.cell for event in takewhile(of_stage, events)]
    seen: set[Cell] = set()
    for event in events:
        if event.cell in seen and not of_stage(event):
            last, seen = groups[-1], set()
            first = len(last) - len(before) if [each.cell for each in last[-len(before) :]] == before else len(last)
            groups[-1:] = [last[:first], last[first:]]
        seen.add(event.cell)
        groups[-1].append(event)
    return groups


def _operators(events: Iterable[dict[str, Any]], path: Path) -> dict[str, list[tuple[float, float]]]:
    """thread -> (start, end) of its operators, by start; sends, receives and collectives are none."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "cpu_op" and not name.startswith("c10d::"):
            rows.setdefault(str(event.get("tid")), []).append(_interval(event, name, path))
    return {thread: sorted(row) for thread, row in rows.items()}


def _computing(start: float, end: float, operators: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the start of the first operator of an action and the end of the last: torch's runtime waits for messages inside the
    action's own event. An action without operators is left as it is.
    """
    inside = operators[bisect_left(operators, (start,)) : bisect_left(operators, (end,))]
    return (inside[0][0], min(end, max(stop for _, stop in inside))) if inside else (start, end)


def _outermost(events: Sequence[_NamedEvent]) -> list[_NamedEvent]:
    """Return the events without the actions that lie inside the event of their pair."""
    outermost: list[_NamedEvent] = []
    for event in events:
        last = outermost[-1] if outermost else None
        inside = last is not None and event.end <= last.end and isinstance(last.cell, Pair)
        if not (inside and last is not None and event.cell in last.cell):
            outermost.append(event)
    return outermost


def _interval(event: dict[str, Any], name: str, path: Path) -> tuple[float, float]:
    """Start and end of an event in seconds."""
    interval: Any = event.get("ts"), event.get("dur")
    if not all(map(is_number, interval)):
        raise UsageError(f"{path}: the event {name!r:.60} has no ts and dur")
    start, duration = interval
    if duration < 0 or abs(start) > 1e18 or duration > 1e15:
        raise UsageError(f"{path}: the event {name!r:.60} takes {duration:g} µs from {start:g} µs on")
    return start / 1e6, (start + duration) / 1e6


def _cell_of(name: str, rank: int) -> Cell | None:
    """The action or pair that an event is named after; None for other events."""
    text = name.removeprefix("PP:")
    single = _SINGLE.fullmatch(text)
    if single is not None:
        return Action("F" if single[1] == "Forward" else "B", rank, int(single[2]))
    if not text[:1].isdecimal() and not text.startswith("("):
        return None
    try:
        return parse_cell(f"({text.replace('|', ';')})" if "|" in text else text)
    except ScheduleError:
        return None


def _timelines(path: Path, rows: Sequence[_Row], notes: list[str]) -> MeasuredSteps:
    """Return a timeline for each step that all ranks ran in full."""
    cells = [(event.cell, at) for at, row in enumerate(rows) for step in row.steps for event in step]
    actions = [(action, at) for cell, at in cells for action in parts(cell)]
    largest = max(max(action.stage, action.microbatch) for action, _ in actions)
    if largest >= len(actions):
        raise ScheduleError(f"{path}: {len(actions)} actions do not name a valid stage or micro-batch {largest}")
    home = {action.stage: at for action, at in actions}
    placement = [home.get(stage, -1) for stage in range(1 + max(home))]
    if -1 in placement:
        ranks = [row.rank for row in rows]
        absent = [rank for rank in range(max(ranks)) if rank not in ranks]
        raise UsageError(
            f"{path} has ranks {', '.join(map(str, ranks))}, and none has an action of stage {placement.index(-1)}"
            + (f": rank {absent[0]} is missing" if absent else "; give the traces of all ranks")
        )
    count = max(len(row.steps) for row in rows)
    timelines: list[Timeline] = []
    reason: ScheduleError | None = None
    for step in range(count):
        events = [sorted(r.steps[step], key=lambda e: e.entry) if step < len(r.steps) else [] for r in rows]
        try:
            schedule = Schedule.of(
                [[event.cell for event in row] for row in events],
                placement=placement,
                microbatches=1 + max((a.microbatch for row in events for e in row for a in parts(e.cell)), default=0),
                name=path.name.split(".")[0] or "trace",
            )
            check(schedule, training=True)
            starts = [[event.start for event in row] for row in events]
            ends = [[event.end for event in row] for row in events]
            timelines.append(aligned(schedule, starts, ends))
        except ScheduleError as error:
            reason = reason or ScheduleError(f"{path}: {error}")
    if not timelines:
        assert reason is not None
        if count > 1 and not all(row.marked for row in rows):
            raise UsageError(
                f"{path}: cannot tell its steps apart: record ProfilerStep marks (profiler.step() after each)"
            )
        raise reason
    if count > len(timelines):
        left = count - len(timelines)
        notes = [*notes, f"{left} of {count} steps are incomplete and are left out"]
    memory = tuple(row.memory for row in rows)
    return MeasuredSteps(tuple(timelines), memory if any(memory) else (), tuple(notes))
