"""Timelines from other programs' traces: timer dumps per rank, as Primus' `pp_vis` draws them, and Chrome traces.

A dump is a folder with `config.json` (`pp_size`, `vp_size` or `vpp_size`, `num_mbs` or `micro_batches`) and `pp_rank_N.json`:
iteration -> `fwd_start`, `fwd_end`, `bwd_start`, `bwd_end` and, where the backward is split, `wgrad_start`, `wgrad_end`, in ms
from the start of the iteration on that rank; `fwd_minibatch`, `fwd_chunk` and the like label each event; `total` (ms) and
`memory` (GB) are the time and memory of the step.

Chrome traces and folders of them are read by `chrome.py`, CSV files with durations by `timed_csv.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from pipeloom.errors import PipeloomError, ScheduleError, UsageError
from pipeloom.limits import SCHEDULE_BYTES, read_file
from pipeloom.schedule.actions import Action, Cell, Pair
from pipeloom.schedule.check import check
from pipeloom.schedule.chrome import is_trace, load_traces, trace_files
from pipeloom.schedule.clocks import aligned, offsets
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timed_csv import load_timed_csv
from pipeloom.schedule.timeline import Timeline

_CONFIG = "config.json"
_LARGEST = 1e12  # the largest time (ms, about thirty years) or memory (GB) that is accepted
_UNITS = 100.0  # milliseconds for microseconds, or for seconds, are a thousand times off
_RANK = re.compile(r"pp_rank_(\d{1,5})\.json")


@dataclass(frozen=True)
class Foreign:
    """A schedule or timeline that was read.

    Attributes:
        timelines: one for each iteration, in seconds; the ranks' clocks are shifted so that no message arrives before it is sent.
        memory: rank -> GB, the largest of the iterations; empty where the trace does not give it.
        notes: how the schedule was found, and what was ambiguous.
    """

    timelines: tuple[Timeline, ...]
    memory: tuple[float, ...]
    notes: tuple[str, ...]


class _Event(NamedTuple):
    start: float
    end: float
    kind: str
    microbatch: int | None
    chunk: int | None


_Ranks = Sequence[Sequence[_Event]]


def is_foreign(path: Path) -> bool:
    """Return whether `path` is a dump's folder, a file that begins like a Chrome trace, a folder of these, or a CSV file."""
    if path.is_dir():
        return _is_dump(path) or bool(trace_files(path))
    return is_trace(path) or (path.suffix.lower() == ".csv" and path.is_file())


def _is_dump(folder: Path) -> bool:
    ranks = any(_RANK.fullmatch(each.name) for each in folder.iterdir())
    return ranks or ((folder / _CONFIG).is_file() and not trace_files(folder))


def load_foreign(path: Path) -> Foreign:
    """The iterations of a dump's folder, or the steps of a Chrome trace, a folder of them, or a CSV with durations.

    Raises:
        UsageError: a file that cannot be read or is not of its format.
        ScheduleError: events that do not form a schedule, with the likeliest reason.
    """
    if path.is_dir() and _is_dump(path):
        return _load_dump(path)
    if path.suffix.lower() == ".csv":
        note = "durations of actions alone: each starts as soon as it can"
        return Foreign(load_timed_csv(path), (), (note,))
    timelines, notes = load_traces(path)
    return Foreign(timelines, (), tuple(notes))


def _json(path: Path) -> Any:
    try:
        return json.loads(read_file(path, 8 * SCHEDULE_BYTES, "a dump"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of these pairs. Raises ValueError for a repeated key."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} appears twice in an object")
    return table


def _load_dump(folder: Path) -> Foreign:
    config = _json(folder / _CONFIG)
    ranks = _size(config, ("pp_size",), folder)
    chunks = _size(config, ("vp_size", "vpp_size"), folder, default=1)
    microbatches = _size(config, ("num_mbs", "micro_batches"), folder)
    files = [folder / f"pp_rank_{rank}.json" for rank in range(ranks)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(
            f"{folder}: pp_size is {ranks}, and {', '.join(missing[:3])} {'are' if missing[1:] else 'is'} missing"
        )
    dumps = [_json(file) for file in files]
    names = [name for name in dumps[0] if all(isinstance(dump, dict) and name in dump for dump in dumps)]
    if not names:
        raise UsageError(f"{folder}: the ranks' files have no iteration in common")
    left = len(set().union(*dumps)) - len(names)
    iterations = [
        [_events(dump[name], f"{file}, iteration {name}") for dump, file in zip(dumps, files, strict=True)]
        for name in names
    ]
    for name, rows in zip(names, iterations, strict=True):
        _require_milliseconds([dump[name] for dump in dumps], rows, f"{folder}, iteration {name}")
    _require_enough(iterations[-1], chunks * microbatches, folder)
    schedule, notes = _schedule(iterations[-1], (ranks, chunks, microbatches), folder)
    timelines = []
    for name, rows in zip(names, iterations, strict=True):
        try:
            timelines.append(aligned(schedule, *_times(schedule, rows)))
        except ScheduleError as error:
            raise ScheduleError(f"{folder}, iteration {name}: {error}") from None
    memory = tuple(max(_gigabytes(dump[name]) for name in names) for dump in dumps)
    if left:
        notes.append(f"{left} iteration{'s are' if left > 1 else ' is'} not in every rank's file, and left out")
    return Foreign(tuple(timelines), memory if any(memory) else (), tuple(notes))


def _gigabytes(iteration: Mapping[str, Any]) -> float:
    """Return the memory that the iteration records, in GB; 0 where it records none."""
    value = iteration.get("memory")
    return float(value) if _is_number(value) and value >= 0 else 0.0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _require_milliseconds(iterations: Sequence[Mapping[str, Any]], rows: _Ranks, where: str) -> None:
    """Raise UsageError where the events are not in ms, as the `total` of the iteration is."""
    for rank, (iteration, row) in enumerate(zip(iterations, rows, strict=True)):
        total = iteration.get("total")
        if not row or not _is_number(total) or total <= 0:
            continue
        took = 1e3 * (max(event.end for event in row) - min(event.start for event in row))
        if not 1 / _UNITS < took / total < _UNITS:
            raise UsageError(
                f"{where}: total is {total:g} ms, but the events of rank {rank} span {took:g}; they must be in ms, too"
            )


def _require_enough(rows: _Ranks, forwards: int, folder: Path) -> None:
    """Raise ScheduleError for sizes that name many more micro-batches than there are events."""
    most = max(sum(event.kind == "F" for event in row) for row in rows)
    if forwards > 2 * most:  # with two routes, each of a rank's stages runs half of the micro-batches
        raise ScheduleError(
            f"{folder / _CONFIG}: with these sizes a rank runs {forwards:,} forwards, but the files have at most {most:,}"
        )


def _size(config: Any, keys: Sequence[str], folder: Path, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key) if isinstance(config, dict) else None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
                raise UsageError(f"{folder / _CONFIG}: {key} is {value!r:.60}; it must be a whole number of at least 1")
            return value
    if default is None:
        raise UsageError(f"{folder / _CONFIG}: the key {' or '.join(keys)} is missing")
    return default


def _events(iteration: Any, where: str) -> list[_Event]:
    """One rank's events of an iteration, by start; F, B (I where the weight gradients are apart) and W."""
    if not isinstance(iteration, dict):
        raise UsageError(f"{where}: an iteration must be an object, not {iteration!r:.60}")
    split = bool(iteration.get("wgrad_start"))
    events = []
    for name, kind in (("fwd", "F"), ("bwd", "I" if split else "B"), ("wgrad", "W")):
        lists = {side: iteration.get(f"{name}_{side}") or [] for side in ("start", "end", "minibatch", "chunk")}
        for side, values in lists.items():
            if not isinstance(values, list):
                raise UsageError(f"{where}: {name}_{side} is {values!r:.60}; it must be a list")
        starts, ends = lists["start"], lists["end"]
        if len(starts) != len(ends):
            raise UsageError(f"{where}: {len(starts)} {name}_start and {len(ends)} {name}_end")
        labels = [lists["minibatch"], lists["chunk"]]
        for what, values in zip(("minibatch", "chunk"), labels, strict=True):
            if values and len(values) != len(starts):
                raise UsageError(f"{where}: {len(starts)} {name}_start and {len(values)} {name}_{what}")
            if not all(isinstance(value, int) and 0 <= value < 10**9 for value in values):
                raise UsageError(f"{where}: {name}_{what} must hold only whole numbers of at least 0")
        for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if not _is_number(start) or not _is_number(end) or end < start:
                raise UsageError(f"{where}: {name} {at} runs from {start!r:.40} to {end!r:.40}")
            microbatch, chunk = (values[at] if values else None for values in labels)
            events.append(_Event(start / 1e3, end / 1e3, kind, microbatch, chunk))
    return sorted(events, key=lambda event: (event.start, event.end, "FBIW".index(event.kind)))


def _words(rows: _Ranks) -> list[str]:
    """rank -> its kinds in order of time; an F and a backward at the same time are a pair, written P."""
    words = []
    for row in rows:
        kinds: list[str] = []
        for at, event in enumerate(row):
            before = row[at - 1] if at else None
            if before is not None and before[:2] == event[:2] and kinds[-1] == "F" and event.kind in "BI":
                kinds[-1] = "P"
            else:
                kinds.append(event.kind)
        words.append("".join(kinds))
    return words


def _schedule(rows: _Ranks, sizes: tuple[int, int, int], folder: Path) -> tuple[Schedule, list[str]]:
    """The schedule of these events, and notes on how it was found."""
    ranks, chunks, microbatches = sizes
    events = [event for row in rows for event in row]
    if not events:
        raise UsageError(f"{folder}: there is no event")
    if all(event.microbatch is not None and (chunks == 1 or event.chunk is not None) for event in events):
        return _labelled(rows, sizes, folder), ["micro-batches and chunks as labelled"]
    if chunks == 1:
        ordered = _first_in_first_out(rows)
        return _labelled(ordered, sizes, folder), ["one stage per rank: micro-batches in order"]
    words = _words(rows)
    matches = _families_of(words, sizes)
    if not matches:
        raise ScheduleError(
            f"{folder}: the events have no labels, and their order is none of the families' for {ranks} ranks, {chunks} chunks "
            f"and {microbatches} micro-batches; rank 0 runs {words[0][:60]}"
        )
    likely = sorted(matches, key=lambda name: _lateness(matches[name], rows))
    note = f"no labels: the order of kinds is that of {likely[0]}"
    if likely[1:]:
        note += f"; {', '.join(likely[1:])} {'have' if likely[2:] else 'has'} the same one, and other micro-batches or chunks"
    return matches[likely[0]], [note]


def _families_of(words: Sequence[str], sizes: tuple[int, int, int]) -> dict[str, Schedule]:
    """name and options -> the schedules of the families whose ranks run these kinds, each once."""
    ranks, chunks, microbatches = sizes
    matches: dict[str, Schedule] = {}
    for name in FAMILIES:
        for options in ({}, {"rounds": "tail"}, {"rounds": "head"}, {"rounds": "paper"}):
            try:
                schedule = build(name, ranks, microbatches, chunks, dict(options))
            except PipeloomError:
                continue
            same = any((s.codes, s.placement) == (schedule.codes, schedule.placement) for s in matches.values())
            if not same and schedule.chunks == chunks and list(map(_letters, schedule.programs)) == list(words):
                matches[" ".join([name, *(f"{key}={value}" for key, value in options.items())])] = schedule
    return matches


def _letters(program: Sequence[Cell]) -> str:
    return "".join("P" if isinstance(cell, Pair) else cell.kind for cell in program)


def _first_in_first_out(rows: _Ranks) -> list[list[_Event]]:
    """The events with micro-batches in order for each rank and kind, on chunk 0."""
    labelled = []
    for row in rows:
        count: dict[str, int] = {}
        events = []
        for event in row:
            number = count.get(event.kind, 0)
            count[event.kind] = number + 1
            events.append(event._replace(microbatch=number, chunk=0))
        labelled.append(events)
    return labelled


def _labelled(rows: _Ranks, sizes: tuple[int, int, int], folder: Path) -> Schedule:
    """The schedule of labelled events: stages in a loop or, where that cannot run, in a V."""
    ranks, chunks, microbatches = sizes
    places = {"loop": [chunk * ranks + rank for rank in range(ranks) for chunk in range(chunks)]}
    if chunks == 2:
        places["vee"] = [stage for rank in range(ranks) for stage in (rank, 2 * ranks - 1 - rank)]
    reasons = []
    candidates: list[tuple[float, Schedule]] = []
    for name, stages in places.items():
        programs: list[list[Cell]] = []
        for rank, row in enumerate(rows):
            cells: list[Cell] = []
            before: _Event | None = None
            for event in row:
                chunk = event.chunk or 0
                if not 0 <= chunk < chunks:
                    raise ScheduleError(f"{folder}: rank {rank} has an event of chunk {event.chunk} of {chunks}")
                action = Action(event.kind, stages[rank * chunks + chunk], int(event.microbatch or 0))
                last = cells[-1] if cells else None
                both = before is not None and before[:2] == event[:2]
                if both and isinstance(last, Action) and last.kind == "F" and event.kind in "BI":
                    cells[-1] = Pair(last, action)
                else:
                    cells.append(action)
                before = event
            programs.append(cells)
        placement = [0] * (ranks * chunks)
        for at, stage in enumerate(stages):
            placement[stage] = at // chunks
        try:
            schedule = Schedule.of(
                programs, placement=placement, microbatches=microbatches, name=folder.name or "trace"
            )
            check(schedule)
        except ScheduleError as error:
            reasons.append(f"in a {name}: {error}")
            continue
        candidates.append((_lateness(schedule, rows), schedule))
    if not candidates:
        raise ScheduleError(f"{folder}: the events do not form a schedule; {'; '.join(reasons)}")
    return min(candidates, key=lambda one: one[0])[1]


def _times(schedule: Schedule, rows: _Ranks) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every entry; raises ScheduleError where a rank has another order of kinds."""
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for rank, (row, word) in enumerate(zip(rows, _words(rows), strict=True)):
        if word != _letters(schedule.programs[rank]):
            raise ScheduleError(
                f"rank {rank} runs {word[:60]}, and the schedule {_letters(schedule.programs[rank])[:60]}"
            )
        events = [
            event for at, event in enumerate(row) if not at or row[at - 1][:2] != event[:2] or event.kind not in "BI"
        ]
        starts.append([event.start for event in events])
        ends.append([event.end for event in events])
    return starts, ends


def _lateness(schedule: Schedule, rows: _Ranks) -> float:
    """The most by which a message arrives before it is sent, with clocks shifted; the smaller, the likelier the schedule."""
    return offsets(schedule, *_times(schedule, rows))[1]
