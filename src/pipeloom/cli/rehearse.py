"""`pipeloom rehearse`: a schedule run by real processes with real messages and emulated computation."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import typer

from pipeloom.cli.options import CostFlags, FamilyFlags, SendFlags, Sizes, SliceFlags, argument, flag, with_options
from pipeloom.cli.output import OutputFlags
from pipeloom.cli.show import Study
from pipeloom.cli.workers import layout_of_workers, require_torch, result_of_workers, words_of
from pipeloom.draw.figures import number, time_unit
from pipeloom.errors import UsageError, folded
from pipeloom.limits import MOST_SECONDS, usable_cores
from pipeloom.schedule import Costs, Schedule, Timeline, check
from pipeloom.schedule.check import TransportName
from pipeloom.schedule.segments import LayerSegments
from pipeloom.traces import timelines as timeline_files
from pipeloom.traces.measured import predict, settled

if TYPE_CHECKING:
    from pipeloom.measure.rehearse import Rehearsal

_MEAN_ACTION = 0.010
"""Seconds that the mean action takes where `--unit` is not given, multiplied by the number of ranks per core: the runtime
spends 0.3 to 0.5 ms of a core on an action, which is then 3 to 5 % of its time."""


@dataclass(frozen=True)
class Emulation:
    """The emulation of computation in a rehearsal."""

    unit: float | None = flag(
        None, "S", "Seconds that a cost of 1 takes; default: chosen for this machine, and printed."
    )
    steps: int = flag(8, "N", "Steps to record.", min=2, max=10_000)
    slow: list[str] | None = flag(
        None, "STAGE=X", "Make a stage X times slower without changing the simulation; repeatable."
    )
    transport: TransportName = flag("auto", "NAME", "auto, individual, batched or shared.")
    device: Literal["cpu", "cuda"] = flag(
        "cpu", "NAME", "cpu: emulated computation sleeps; cuda: it keeps one GPU per rank busy."
    )


@with_options(without=("pair", "slowdown", "overlap_p2p", "csv"), message="64KiB")
def command(
    context: typer.Context,
    *,
    name: str = argument(..., "NAME_OR_FILE", "A family, module:function, or a schedule in CSV or JSON format."),
    sizes: Sizes,
    family: FamilyFlags,
    costs: CostFlags,
    cuts: SliceFlags,
    sending: SendFlags,
    emulation: Emulation,
    output: OutputFlags,
) -> None:
    """Run a schedule with real messages and emulated computation.

    pipeloom rehearse zbv --ranks 4 --microbatches 8 --forward 1 --input-grad 1.2 --message 4MiB

    Starts one process per rank on this machine, or runs in those that torchrun started. Each action takes its cost times --unit;
    with more ranks than cores, a larger unit keeps the timing right. Prints the step and how far it is from its simulation.
    """
    require_torch("rehearse")
    output.require()
    schedule, values = family.schedule(name, sizes, costs, cuts, sending)
    check(schedule, training=True)
    if costs.p2p != "0" and values.sends == "free":
        raise UsageError(
            f"--p2p is {costs.p2p:.60}, and free sends take the time that they take here: add --sends coupled"
        )
    rehearsal = _rehearsal(schedule, values, emulation, costs.layers())
    code, timelines = _run(rehearsal, emulation.device, words_of(context))
    if code or not timelines:
        raise typer.Exit(code)
    report(rehearsal, timelines, output)


def _rehearsal(schedule: Schedule, costs: Costs, options: Emulation, segments: Sequence[LayerSegments]) -> Rehearsal:
    """Return the rehearsal that the options describe. Raises UsageError for options that it cannot emulate."""
    from pipeloom.measure.rehearse import Rehearsal

    unit, steps, on_gpus = options.unit, options.steps, options.device == "cuda"
    if unit is not None and not (math.isfinite(unit) and 0 < unit <= MOST_SECONDS):
        raise UsageError(f"--unit is {unit:g}; give seconds above 0 and up to {MOST_SECONDS:g}, such as 0.02")
    if costs.sends == "rendezvous" or (costs.sends == "coupled" and (options.transport != "auto" or on_gpus)):
        raise UsageError(
            f"{costs.sends} sends are not rehearsed with --transport {options.transport} and --device {options.device}; "
            "nearest: free sends, or coupled ones with --transport auto and --device cpu"
        )
    slow = _slow(options.slow or (), schedule)
    rehearsal = Rehearsal(schedule, costs, unit or 1.0, steps, slow, options.transport, segments)
    if on_gpus and (schedule.ranks == 1 or rehearsal.communicates):
        raise UsageError("--device cuda needs at least 2 ranks and does not emulate --all-to-all; use --device cpu")
    if unit is None:
        rehearsal = _with_usual_unit(rehearsal)
    makespan = rehearsal.simulated().makespan
    if makespan <= 0:
        raise UsageError(
            "all costs are 0, so there is nothing to rehearse; give --forward, --input-grad or --weight-grad"
        )
    if makespan * (steps + 1) > MOST_SECONDS:
        raise UsageError(
            f"--unit {rehearsal.unit:g} makes {steps + 1} steps of {makespan:.3g} s, more than {MOST_SECONDS:g} s in all; "
            f"nearest: --unit {rehearsal.unit * MOST_SECONDS / (makespan * (steps + 1)):.3g}"
        )
    return rehearsal


def _with_usual_unit(rehearsal: Rehearsal) -> Rehearsal:
    timeline = rehearsal.simulated()
    actions = sum(map(len, rehearsal.schedule.codes))
    mean = sum(timeline.busy) / actions
    crowd = max(1.0, rehearsal.schedule.ranks / usable_cores())
    return replace(rehearsal, unit=_MEAN_ACTION * crowd / mean) if mean else rehearsal


def _slow(words: Sequence[str], schedule: Schedule) -> dict[int, float]:
    factors: dict[int, float] = {}
    for word in words:
        match = re.fullmatch(r"(\d{1,9})=(\d*\.?\d+)", word)
        if match is None or int(match[1]) >= schedule.stages or not 0 < float(match[2]) <= 1000:
            raise UsageError(
                f"--slow is {word!r:.60}; give STAGE=FACTOR, such as 2=1.1: a stage from 0 to {schedule.stages - 1}, and a "
                "factor above 0 and up to 1000"
            )
        factors[int(match[1])] = float(match[2])
    return factors


def _run(rehearsal: Rehearsal, device: str, words: Sequence[str]) -> tuple[int, tuple[Timeline, ...]]:
    """Return the exit code and the recorded steps; no steps on workers, whose launcher returns them."""
    from pipeloom.measure.rehearse import patience, run
    from pipeloom.train.workers.worker import is_worker

    ranks = rehearsal.schedule.ranks
    if not is_worker():
        _require_machine(rehearsal, device)
        print(
            f"rehearsing {rehearsal.schedule.name} on {ranks} process{'es' * (ranks > 1)}: {rehearsal.steps + 1} steps of "
            f"{rehearsal.simulated().makespan:.3g} s, a cost of 1 takes {rehearsal.unit * 1e3:.3g} ms",
            file=sys.stderr,
            flush=True,
        )

    def body(context: Any) -> str:
        return json.dumps(
            timeline_files.to_dict(run(rehearsal, context.device, context.watchdog, context.close_to_strangers))
        )

    layout = layout_of_workers(ranks, device, patience(rehearsal))
    code, steps = result_of_workers("rehearse", words, layout, body)
    return code, timeline_files.from_json(steps) if steps else ()


def _require_machine(rehearsal: Rehearsal, device: str) -> None:
    """Raise CapacityError if this machine has too little memory, UsageError if it has too few GPUs."""
    from pipeloom.train.workers.preflight import cuda_devices, memory_of_machine, require_bytes, require_room

    schedule = rehearsal.schedule
    require_room(schedule.ranks, "--ranks")
    size = int(rehearsal.costs.message)
    in_flight = sum(rehearsal.simulated().peak_activations) / schedule.slices
    need = 2 * size * in_flight  # an input and an output per activation
    most = f"at most {int(size * memory_of_machine() / (need or 1)):,}"
    require_bytes(need, f"--message {size:,} bytes: the micro-batches in flight", most)
    if device == "cuda":
        gpus = cuda_devices()
        if gpus < schedule.ranks:
            raise UsageError(
                f"--device cuda: this machine has {gpus} GPU{'s' * (gpus != 1)} for {schedule.ranks} ranks; use --device cpu"
            )


def report(rehearsal: Rehearsal, timelines: Sequence[Timeline], output: OutputFlags) -> None:
    """Write the drawings, and print the step, its figures and its difference from the simulation."""
    study = Study(timelines, predict(timelines), layers=rehearsal.work())
    simulated = rehearsal.simulated()
    rehearsed = median(step.makespan for step in settled(timelines))
    error = rehearsed / simulated.makespan - 1
    output.draw([study.typical, simulated])
    if output.as_json:
        about = {
            "unit": rehearsal.unit,
            "message": int(rehearsal.costs.message),
            "cores": usable_cores(),
            "simulated": simulated.makespan,
            "rehearsed": rehearsed,
            "error": error,
        }
        print(json.dumps(study.as_dict() | {"rehearsal": about}, allow_nan=False))
        return
    output.print_timeline(study.typical)
    factor, unit = time_unit([study.typical])
    words = "without messages" if simulated.costs.sends == "free" else "with coupled sends"
    line = (
        f"\nmakespan: simulated {number(simulated.makespan * factor)} {unit} {words}, rehearsed "
        f"{number(rehearsed * factor)} {unit}: {100 * error:+.1f} %"
    )
    print(folded("\n".join([line, *study.lines()])))
