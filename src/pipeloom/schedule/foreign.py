"""Timelines from other programs' traces: timer dumps per rank, as Primus' `pp_vis` draws them, and Chrome traces.

A dump is a folder with `config.json` (`pp_size`, `vp_size` or `vpp_size`, `num_mbs` or `micro_batches`) and `pp_rank_N.json`:
iteration -> `fwd_start`, `fwd_end`, `bwd_start`, `bwd_end` and, where the backward is split, `wgrad_start`, `wgrad_end`, in ms
from the start of the iteration on that rank; `fwd_minibatch`, `fwd_chunk` and their like say what each event is, `total` (ms) and
`memory` (GB) what the step took.

A Chrome trace has events called as the actions are (`3F0`, `0F5|3B1`, with torch's `PP:` before them), a process for each rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.errors import PipeloomError, ScheduleError, UsageError
from pipeloom.limits import SCHEDULE_BYTES, read_file
from pipeloom.schedule.actions import Action, Cell, Pair, parse_cell
from pipeloom.schedule.check import check
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.measured import measured_costs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline

_CONFIG = "config.json"
_RANK = re.compile(r"pp_rank_(\d{1,5})\.json")


@dataclass(frozen=True)
class Foreign:
    """A schedule or timeline that was read.

    Attributes:
        timelines: one for each iteration, in seconds; the ranks' clocks are shifted so that no message arrives before it is sent.
        memory: rank -> GB, the largest of the iterations; empty where the trace does not say.
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
    """Return whether `path` is a dump's folder, or a Chrome trace by its beginning."""
    if path.is_dir():
        return (path / _CONFIG).is_file() and any(_RANK.fullmatch(each.name) for each in path.iterdir())
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"traceEvents"' in file.read(65536)


def load_foreign(path: Path) -> Foreign:
    """The iterations of a dump's folder, or the one of a Chrome trace.

    Raises:
        UsageError: a file that cannot be read or is not of its format.
        ScheduleError: events that are no schedule's, with the nearest reason.
    """
    return _load_dump(path) if path.is_dir() else _load_chrome(path)


def _json(path: Path) -> Any:
    try:
        return json.loads(read_file(path, 8 * SCHEDULE_BYTES, "a trace"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


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
    iterations = [
        [_events(dump[name], f"{file}, iteration {name}") for dump, file in zip(dumps, files, strict=True)]
        for name in names
    ]
    found, notes = _schedule(iterations[-1], (ranks, chunks, microbatches), folder)
    timelines = []
    for name, rows in zip(names, iterations, strict=True):
        try:
            timelines.append(_timeline(found, rows))
        except ScheduleError as error:
            raise ScheduleError(f"{folder}, iteration {name}: {error}") from None
    memory = tuple(max(_gigabytes(dump[name]) for name in names) for dump in dumps)
    return Foreign(tuple(timelines), memory if any(memory) else (), tuple(notes))


def _gigabytes(iteration: Mapping[str, Any]) -> float:
    """Return what the iteration says of memory; 0 where it says nothing."""
    value = iteration.get("memory")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _size(config: Any, keys: Sequence[str], folder: Path, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key) if isinstance(config, dict) else None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
                raise UsageError(f"{folder / _CONFIG}: {key} is {value!r:.60}; it is a whole number of at least 1")
            return value
    if default is None:
        raise UsageError(f"{folder / _CONFIG}: the key {' or '.join(keys)} is missing")
    return default


def _events(iteration: Any, where: str) -> list[_Event]:
    """One rank's events of an iteration, by start; F, B (I where the weight gradients are apart) and W."""
    if not isinstance(iteration, dict):
        raise UsageError(f"{where}: an iteration is an object, not {iteration!r:.60}")
    split = bool(iteration.get("wgrad_start"))
    events = []
    for name, kind in (("fwd", "F"), ("bwd", "I" if split else "B"), ("wgrad", "W")):
        lists = {side: iteration.get(f"{name}_{side}") or [] for side in ("start", "end", "minibatch", "chunk")}
        for side, values in lists.items():
            if not isinstance(values, list):
                raise UsageError(f"{where}: {name}_{side} is {values!r:.60}; it is a list")
        starts, ends = lists["start"], lists["end"]
        if len(starts) != len(ends):
            raise UsageError(f"{where}: {len(starts)} {name}_start and {len(ends)} {name}_end")
        labels = [lists["minibatch"], lists["chunk"]]
        for what, values in zip(("minibatch", "chunk"), labels, strict=True):
            if values and len(values) != len(starts):
                raise UsageError(f"{where}: {len(starts)} {name}_start and {len(values)} {name}_{what}")
            if not all(isinstance(value, int) and value >= 0 for value in values):
                raise UsageError(f"{where}: {name}_{what} holds other than whole numbers from 0 on")
        for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if not all(isinstance(time, (int, float)) for time in (start, end)) or not 0 <= end - start < 1e12:
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
    """The schedule that these events ran, and how it was found."""
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
    found: list[tuple[float, Schedule]] = []
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
        found.append((_lateness(schedule, rows), schedule))
    if not found:
        raise ScheduleError(f"{folder}: the events are no schedule; {'; '.join(reasons)}")
    return min(found, key=lambda one: one[0])[1]


def _times(schedule: Schedule, rows: _Ranks) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every entry; raises ScheduleError where a rank has another order of kinds."""
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for rank, (row, word) in enumerate(zip(rows, _words(rows), strict=True)):
        if word != _letters(schedule.programs[rank]):
            raise ScheduleError(
                f"rank {rank} runs {word[:60]}, and the schedule {_letters(schedule.programs[rank])[:60]}"
            )
        kept = [
            event for at, event in enumerate(row) if not at or row[at - 1][:2] != event[:2] or event.kind not in "BI"
        ]
        starts.append([event.start for event in kept])
        ends.append([event.end for event in kept])
    return starts, ends


def _needs(schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """(rank, entry) of what produces a message, and (rank, entry) of what waits for it, between different ranks."""
    graph = Graph.of(schedule, full=True)
    assert graph.event is not None
    entries = [schedule.split_entries(rank) for rank in range(schedule.ranks)]
    maker = {
        graph.event[code]: (rank, at)
        for rank, both in enumerate(entries)
        for codes in both
        for at, code in enumerate(codes)
    }
    for rank, both in enumerate(entries):
        for codes in both:
            for at, code in enumerate(codes):
                source = maker.get(graph.needs[code]) if graph.needs[code] < graph.always else None
                if source is not None and source[0] != rank:
                    yield (*source, rank, at)


def _offsets(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[list[float], float]:
    """rank -> seconds to add to its clock, the least from 0 on with which no message arrives before it is sent; and by how much
    one still does. Longest paths over the ranks (Bellman and Ford): each rank's clock begins with its own iteration."""
    bound: dict[tuple[int, int], float] = {}
    for source, made, rank, at in _needs(schedule):
        late = ends[source][made] - starts[rank][at]
        bound[source, rank] = max(late, bound.get((source, rank), late))
    offsets = [0.0] * schedule.ranks
    for _ in range(schedule.ranks):
        for (source, rank), late in bound.items():
            offsets[rank] = max(offsets[rank], offsets[source] + late)
    left = max((offsets[source] + late - offsets[rank] for (source, rank), late in bound.items()), default=0.0)
    return offsets, max(0.0, left)


def _lateness(schedule: Schedule, rows: _Ranks) -> float:
    """By how much messages arrive before they are sent, whatever the ranks' clocks: the smaller, the likelier the schedule."""
    return _offsets(schedule, *_times(schedule, rows))[1]


def _timeline(schedule: Schedule, rows: _Ranks) -> Timeline:
    return _placed(schedule, *_times(schedule, rows))


def _placed(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Timeline:
    """The timeline with the ranks' clocks shifted."""
    offsets, _ = _offsets(schedule, starts, ends)
    origin = min(row[0] + offset for row, offset in zip(starts, offsets, strict=True) if row)

    def shifted(times: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time + shift - origin for time in row) for row, shift in zip(times, offsets, strict=True))

    begins, stops = shifted(starts), shifted(ends)
    turns: list[Mapping[int, float]] = [
        {at: (begins[rank][at] + stops[rank][at]) / 2 for at, cell in enumerate(program) if isinstance(cell, Pair)}
        for rank, program in enumerate(schedule.programs)
    ]
    return Timeline(schedule, measured_costs(schedule, begins, stops, turns), begins, stops, source="measured")


def _load_chrome(path: Path) -> Foreign:
    """The events of a Chrome trace whose names are actions, after torch's `PP:` or bare; a process for each rank."""
    trace = _json(path)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UsageError(f"{path}: traceEvents is no list")
    rows: dict[Any, list[tuple[float, float, Cell]]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        text = str(event.get("name", "")).removeprefix("PP:")
        try:
            cell = parse_cell(f"({text.replace('|', ';')})" if "|" in text else text)
        except ScheduleError:
            continue
        start, duration = event.get("ts"), event.get("dur")
        if not isinstance(start, (int, float)) or not isinstance(duration, (int, float)):
            raise UsageError(f"{path}: the event {text!r:.60} has no ts and dur")
        rows.setdefault(event.get("pid"), []).append((start / 1e6, (start + duration) / 1e6, cell))
    if not rows:
        raise UsageError(f"{path}: no event is called as an action, such as 0F0, PP:3B2 or 0F5|3B1")
    ranks = [sorted(rows[pid], key=lambda one: one[:2]) for pid in sorted(rows, key=lambda pid: (str(type(pid)), pid))]
    actions = [
        action for row in ranks for _, _, cell in row for action in ((cell,) if isinstance(cell, Action) else cell)
    ]
    largest = max(max(action.stage, action.microbatch) for action in actions)
    if largest >= len(actions):
        raise ScheduleError(f"{path}: {len(actions)} actions cannot name stage or micro-batch {largest}")
    placement = [0] * (1 + max(action.stage for action in actions))
    for rank, row in enumerate(ranks):
        for _, _, cell in row:
            for action in (cell,) if isinstance(cell, Action) else cell:
                placement[action.stage] = rank
    schedule = Schedule.of(
        [[cell for _, _, cell in row] for row in ranks],
        placement=placement,
        microbatches=1 + max(action.microbatch for action in actions),
        name=path.stem,
    )
    check(schedule)
    starts, ends = [[one[0] for one in row] for row in ranks], [[one[1] for one in row] for row in ranks]
    return Foreign((_placed(schedule, starts, ends),), (), ("actions by the names of the events",))
