"""`pipeloom improve`: what another schedule would have saved in a measured step, at the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeloom.cli.options import argument, flag, memory_of, with_options
from pipeloom.cli.output import emit, json_flag, write_csv
from pipeloom.cli.show import Study, layers_of, layout_of, steps_of
from pipeloom.draw.figures import in_columns, number, time_unit
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.limits import newest_run
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import DEVICE, activation_limit
from pipeloom.schedule.families import ONE_ROUTE, build
from pipeloom.schedule.placement import name_of
from pipeloom.schedule.transforms import merge_backward, split_cooldown
from pipeloom.solver import search
from pipeloom.traces.measured import predict, settled, with_overhead

_LEAST = 1e-6  # share of a step below which nothing is gained
_ENOUGH = 0.9  # share of the largest saving from which a simpler change is recommended


@dataclass(frozen=True)
class ImproveFlags:
    """The limits of the search, and the files that it writes."""

    memory: str | None = flag(
        None,
        "GIB",
        "Memory of a device, such as 80 or 80GiB, for a run of `train`; for other traces, which have no bytes, the most "
        "stage-micro-batches alive on a rank. Default: as many as in the measured step.",
    )
    time_limit: float = flag(10.0, "S", "Longest search, in seconds.", min=0.1)
    whole: bool = flag(False, None, "Leave backwards whole: no I and W in schedules without them in the trace.")
    csv: Path | None = flag(None, "FILE", "Write the best schedule in torch's CSV format.")
    as_json: bool = json_flag()


@dataclass(frozen=True)
class Change:
    """A schedule in place of the measured one, simulated with the measured costs.

    Attributes:
        words: how to get it.
        makespan: seconds.
        peak: the most stage-micro-batches alive on a rank.
    """

    words: str
    schedule: Schedule
    makespan: float
    peak: float


@with_options()
def command(
    *,
    trace: Path = argument(
        ...,
        "TRACE",
        "A Chrome or Kineto trace, a folder of them, a CSV with durations, or a run or a folder of runs (the newest).",
    ),
    options: ImproveFlags,
) -> None:
    """Find what a measured step would have saved under another schedule.

    pipeloom improve trace.json --csv better.csv

    Reads schedule and costs from the trace, and compares every family and transform that fits the placement and the memory, and
    the best schedule that a search finds. A trace of another program will do.
    """
    trace = newest_run(trace) or trace
    steps, memory, notes = steps_of(trace)
    study = Study(steps, predict(steps), (), layers_of(trace, steps), memory, notes)
    limits = None
    if options.memory is not None:
        study, limits = _limited(study, trace, options.memory)
    now, changes = compare(study, limits, options.time_limit, options.whole)
    best = min(changes, key=lambda each: each.makespan)
    if now in changes and best.makespan > now.makespan * (1 - _LEAST):
        best = now
    gain = now.makespan - best.makespan
    simple = next(each for each in changes if now.makespan - each.makespan >= min(gain, _ENOUGH * gain))
    if options.csv is not None:
        write_csv(best.schedule, options.csv)
    results = study, now, changes, best, simple
    emit(options.as_json, lambda: _as_dict(*results), lambda: _lines(*results))


def _limited(study: Study, trace: Path, memory: str) -> tuple[Study, tuple[float, ...]]:
    """Return the study with costs in the unit of the limit, and rank -> the most activations: in bytes for a run of `train`."""
    schedule, sizes = study.typical.schedule, _stage_bytes(trace, study.typical.schedule)
    limit, in_bytes = memory_of(memory, plain_is_gib=bool(sizes))
    if not in_bytes:
        return study, (limit,) * schedule.ranks
    if not sizes:
        raise UsageError(
            f"--memory is {memory!r:.60}, and {trace} has no bytes, which only runs of `train` have; nearest: "
            f"--memory {max(study.typical.peak_activations)}, in stage-micro-batches"
        )
    costs = replace(study.prediction.costs, bytes=sizes)
    costs, limits = activation_limit(costs, limit, schedule.placement)
    return replace(study, prediction=replace(study.prediction, costs=costs)), limits


def _stage_bytes(trace: Path, schedule: Schedule) -> dict[str, tuple[float, ...]]:
    """Return the predicted bytes of the stages of a run of `train`, as `Costs.bytes`; empty for any other trace."""
    from pipeloom.plan.run import predicted

    layout = layout_of(trace)
    if layout is None:
        return {}
    with suppress(PipeloomError):  # a model that cannot be planned, or a file of another run
        return predicted(layout).timeline.costs.bytes_in(DEVICE, schedule.stages)
    return {}


def compare(
    study: Study, memory: Sequence[float] | None, seconds: float, whole: bool = False
) -> tuple[Change, list[Change]]:
    """Return (the measured schedule simulated with its costs, all schedules within the memory, simple ones first).

    Args:
        memory: rank -> the largest peak of memory, in units of `Costs.activation`; None: the measured schedule's.
        whole: whether backwards stay whole, unless the measured schedule splits some.
    """
    # Micro-batches count as alike: how long each of the next step's takes is not known, and torch's runtime keeps their order.
    schedule = study.typical.schedule
    costs = with_overhead(replace(study.prediction.costs, microbatch=()), settled(study.steps))
    timeline = simulate(schedule, costs)
    now = Change("as measured", schedule, timeline.makespan, max(timeline.peak_memory))
    limits = (now.peak,) * schedule.ranks if memory is None else tuple(memory)

    def fits(run: Timeline) -> bool:
        return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(run.peak_memory, limits, strict=True))

    changes = [now] if fits(timeline) else []
    whole = whole and not schedule.splits_backward
    for words, other in _others(schedule, costs):
        if whole and other.splits_backward:
            continue
        try:
            check(other)
            run = simulate(other, costs)
        except PipeloomError:  # a family that these costs or sizes do not suit
            continue
        if fits(run):
            changes.append(Change(words, other, run.makespan, max(run.peak_memory)))
    searched_for = with_whole_backwards(costs, schedule.stages) if whole else costs
    place = list(schedule.placement)
    best = search(
        schedule.ranks, schedule.microbatches, searched_for, limits, placement=place, time_limit=seconds
    ).schedule
    best = merge_backward(best) if whole else best
    timeline = simulate(best, costs)
    return now, [*changes, Change("searched", best, timeline.makespan, max(timeline.peak_memory))]


def with_whole_backwards(costs: Costs, stages: int) -> Costs:
    """Return costs whose I takes as long as a B and frees as much, and whose W takes no time."""
    return replace(
        costs, input_grad=tuple(costs.per_stage("backward", stages)), weight_grad=0.0, backward=None, held=0.0
    )


def _others(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Yield (words, schedule) of transforms of the schedule and of the families of one route on its placement."""
    if len(schedule.routes) > 1:
        return
    with suppress(PipeloomError):  # one that is split already
        yield "transform split_cooldown", split_cooldown(schedule)
    place = name_of(schedule.placement, schedule.ranks)
    for name in ONE_ROUTE.get(place or "", ()):
        try:
            other = build(name, schedule.ranks, schedule.microbatches, schedule.chunks, {}, costs)
        except PipeloomError:
            continue
        if other.placement == schedule.placement and other.codes != schedule.codes:
            yield f"family {name}", other


def _as_dict(study: Study, now: Change, changes: list[Change], best: Change, simple: Change) -> dict[str, object]:
    def plain(each: Change) -> dict[str, object]:
        saved = 1 - each.makespan / now.makespan if now.makespan else 0.0
        return {"change": each.words, "makespan": each.makespan, "peak": each.peak, "saved": saved}

    return {
        "unit": "s",
        "measured": study.prediction.measured,
        "now": plain(now),
        "changes": [plain(each) for each in changes],
        "best": plain(best),
        "recommended": plain(simple),
        "assumptions": study.assumptions(),
        "notes": list(study.notes),
    }


def _lines(study: Study, now: Change, changes: list[Change], best: Change, simple: Change) -> list[str]:
    factor, unit = time_unit([study.typical])

    in_bytes = bool(study.prediction.costs.bytes)

    def row(each: Change) -> list[str]:
        saved = 100 * (1 - each.makespan / now.makespan)
        peak = size_words(each.peak) if in_bytes else number(each.peak)
        return [each.words, number(each.makespan * factor), f"{saved:.1f} %", peak]

    ordered = sorted((each for each in changes if each is not now), key=lambda each: each.makespan)
    lines = [
        *study.notes,
        f"measured {number(study.prediction.measured * factor)} {unit}, simulated with the step's own costs "
        f"{number(now.makespan * factor)} {unit}",
        *in_columns(
            [
                ["schedule", f"step, {unit}", "saved", "peak"],
                *map(row, [now, *ordered]),
            ]
        ),
    ]
    if best is now:
        return [*lines, "nothing within this memory is shorter than the measured schedule"]
    lines.append(f"change: {simple.words}, which saves {100 * (1 - simple.makespan / now.makespan):.1f} % of the step")
    unit = "predicted bytes of activations" if in_bytes else "stage-micro-batches"
    return [*lines, f"the peak counts {unit}; assumed:", f"  {study.assumptions()}"]
