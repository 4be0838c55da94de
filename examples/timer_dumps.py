"""Timer dumps of a pipeline, as Primus' `pp_vis` draws them, as a Chrome trace that `pipeloom show` reads.

    python examples/timer_dumps.py DUMP_FOLDER trace.json
    pipeloom show trace.json

A dump is a folder with `config.json` (`pp_size`, `vp_size` or `vpp_size`, `num_mbs` or `micro_batches`) and `pp_rank_N.json`:
iteration -> `fwd_start`, `fwd_end`, `bwd_start`, `bwd_end` and, where the backward is split, `wgrad_start`, `wgrad_end`, in ms
from the start of the iteration on that rank; `fwd_minibatch`, `fwd_chunk` and the like label each event, and `memory` (GB) is
that of the iteration. Without labels the micro-batches of a single stage per rank are in order; for several stages the order of
kinds is compared with that of every family, and of those that agree the one is taken whose messages arrive least early.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pipeloom as pl
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.traces.measured import offsets


class Event(NamedTuple):
    start: float  # ms
    end: float
    kind: str
    microbatch: int | None
    chunk: int | None


Ranks = list[list[Event]]


def main(folder: Path, trace: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    ranks, microbatches = config["pp_size"], config.get("num_mbs") or config["micro_batches"]
    chunks = config.get("vp_size") or config.get("vpp_size") or 1
    dumps = [json.loads((folder / f"pp_rank_{rank}.json").read_text()) for rank in range(ranks)]
    iterations = [name for name in dumps[0] if all(name in dump for dump in dumps)]
    steps = [[sorted(events_of(dump[name]), key=by_time) for dump in dumps] for name in iterations]
    schedule = schedule_of(steps[-1], ranks, chunks, microbatches)
    events: list[dict[str, Any]] = []
    clock = 0.0
    for name, step in zip(iterations, steps, strict=True):
        for rank, row in enumerate(step):
            spans = [times for times, _ in entries_of(row)]
            memory = dumps[rank][name].get("memory", 0.0)
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": 1e3 * clock, "args": {"GB": memory}})
            events += [
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": 0,
                    "ts": 1e3 * (clock + start),
                    "dur": 1e3 * (end - start),
                    "name": cell,
                }
                for (start, end), cell in zip(spans, map(str, schedule.programs[rank]), strict=True)
            ]
        clock += 2 * max(event.end for row in step for event in row)
    trace.write_text(json.dumps({"traceEvents": events}))


def events_of(iteration: dict[str, Any]) -> Iterator[Event]:
    """The events of one rank in an iteration: F, B (I where the weight gradients are apart) and W."""
    backward = "I" if iteration.get("wgrad_start") else "B"
    for name, kind in (("fwd", "F"), ("bwd", backward), ("wgrad", "W")):
        starts, ends = iteration.get(f"{name}_start") or [], iteration.get(f"{name}_end") or []
        unknown = [None] * len(starts)
        labels = [iteration.get(f"{name}_{label}") or unknown for label in ("minibatch", "chunk")]
        yield from map(Event, starts, ends, [kind] * len(starts), *labels)


def by_time(event: Event) -> tuple[float, float, int]:
    return event.start, event.end, "FBIW".index(event.kind)


def entries_of(row: Sequence[Event]) -> list[tuple[tuple[float, float], list[Event]]]:
    """The events that run together, with their time: an F and a backward at the same time are a pair."""
    entries: list[tuple[tuple[float, float], list[Event]]] = []
    for event in row:
        if entries and entries[-1][0] == event[:2] and event.kind in "BI":
            entries[-1][1].append(event)
        else:
            entries.append(((event.start, event.end), [event]))
    return entries


def kinds_of(schedule: pl.Schedule) -> list[list[str]]:
    """rank -> the kinds of its entries."""
    return [
        [cell.forward.kind + cell.backward.kind if isinstance(cell, pl.Pair) else cell.kind for cell in program]
        for program in schedule.programs
    ]


def schedule_of(rows: Ranks, ranks: int, chunks: int, microbatches: int) -> pl.Schedule:
    """The schedule that these events ran."""
    if chunks == 1:
        rows = [in_order(row) for row in rows]
    labelled = all(event.microbatch is not None and event.chunk is not None for row in rows for event in row)
    candidates = from_labels(rows, ranks, chunks) if labelled else from_families(rows, ranks, chunks, microbatches)
    schedules = list(candidates)
    if not schedules:
        raise UsageError("the events do not form a schedule, or have no labels and the order of no family")
    times = [[span for span, _ in entries_of(row)] for row in rows]
    starts, ends = ([[span[side] for span in spans] for spans in times] for side in (0, 1))
    return min(schedules, key=lambda schedule: offsets(schedule, starts, ends)[1])


def in_order(row: Sequence[Event]) -> list[Event]:
    """The events of a single stage with micro-batches in order, unless they are labelled."""
    count: Counter[str] = Counter()
    numbered = []
    for event in row:
        number = count[event.kind] if event.microbatch is None else event.microbatch
        numbered.append(event._replace(microbatch=number, chunk=0))
        count[event.kind] += 1
    return numbered


def from_labels(rows: Ranks, ranks: int, chunks: int) -> Iterator[pl.Schedule]:
    """The schedules with stages in a loop and, for two chunks, in a V, if they can run."""
    places = [[[chunk * ranks + rank for chunk in range(chunks)] for rank in range(ranks)]]
    if chunks == 2:
        places.append([[rank, 2 * ranks - 1 - rank] for rank in range(ranks)])
    for stages in places:
        rank_of = {stage: rank for rank, held in enumerate(stages) for stage in held}
        programs = []
        for rank, row in enumerate(rows):
            cells = []
            for _, events in entries_of(row):
                names = [f"{stages[rank][event.chunk or 0]}{event.kind}{event.microbatch}" for event in events]
                cells.append(names[0] if len(names) == 1 else f"({';'.join(names)})")
            programs.append(cells)
        try:
            count = 1 + max(event.microbatch or 0 for row in rows for event in row)
            schedule = pl.Schedule.of(programs, placement=[rank_of[s] for s in sorted(rank_of)], microbatches=count)
            pl.check(schedule)
        except PipeloomError:
            continue
        yield schedule


def from_families(rows: Ranks, ranks: int, chunks: int, microbatches: int) -> Iterator[pl.Schedule]:
    """The schedules of the families whose ranks run these kinds in this order."""
    words = [["".join(event.kind for event in events) for _, events in entries_of(row)] for row in rows]
    for name in pl.schedules.FAMILIES:
        for options in ({}, {"rounds": "tail"}, {"rounds": "head"}, {"rounds": "paper"}):
            try:
                schedule = pl.schedules.build(name, ranks, microbatches, chunks, options)
            except PipeloomError:
                continue
            if kinds_of(schedule) == words:
                yield schedule


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
