"""`pipeloom improve`: what another schedule, or another cut, would have saved in a measured step, at the same memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeloom.cli.changes import compare
from pipeloom.cli.options import argument, flag, memory_of, with_options
from pipeloom.cli.output import emit, json_flag, require_writable, write_csv
from pipeloom.cli.show import Study, layers_of, layout_of, steps_of
from pipeloom.draw.figures import number, time_unit
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.interop.timers import accepts, read
from pipeloom.limits import newest_run
from pipeloom.plan.job import Job
from pipeloom.schedule import Schedule
from pipeloom.schedule.costs import DEVICE, StageCosts, activation_limit
from pipeloom.traces.measured import predict


@dataclass(frozen=True)
class ImproveFlags:
    """The limits of the search, and the files that it writes."""

    memory: str | None = flag(
        None,
        "GIB",
        "Memory of a device, such as 80 or 80GiB, for a --job or a run of `train`; for other traces, which have no bytes, the "
        "most stage-micro-batches alive on a rank. Default: as many as in the measured step; of a job, the device's.",
    )
    time_limit: float = flag(10.0, "S", "Longest search for an order, in seconds.")
    split: bool = flag(False, None, "Split backwards into I and W, where the trace has them whole.")
    csv: Path | None = flag(None, "FILE", "Write the best schedule in torch's CSV format.")
    job: str | None = flag(
        None,
        "JOB",
        "The job that was measured, as for `plan --job`: its cut, chunks, micro-batch and recomputation change.",
    )
    model: str | None = flag(None, "MODEL", "The model, where JOB does not describe it.")
    device: str = flag("h100", "NAME", "The device of JOB, as for `plan`.")
    output: Path | None = flag(None, "FILE", "Write the best job in the words of its system.")
    as_json: bool = json_flag()


@with_options()
def command(
    *,
    trace: Path | None = argument(
        None,
        "TRACE",
        "A Chrome or Kineto trace, a folder of them, a CSV with durations, or a run or a folder of runs (the newest); with --job "
        "also a log with Megatron-LM's timers, or nothing.",
    ),
    options: ImproveFlags,
) -> None:
    """Find what a measured step would have saved under another schedule.

    pipeloom improve trace.json --csv better.csv

    Reads schedule and costs from the trace, and compares every family and transform that fits the placement and the memory, and
    the best schedule that a search finds. A trace of another program will do. With --job, the job's layers, chunks, micro-batch,
    recomputation and offload change, as far as its system lets them; with --csv also the order, where the system reads one.
    """
    require_writable(options.csv, options.output)
    if options.job is not None:
        _of_job(trace, options, options.job)
        return
    if trace is None:
        raise UsageError("improve needs a TRACE, or --job")
    if options.output is not None:
        raise UsageError("--output writes a job, which --job names; nearest: --csv, which writes a schedule")
    if accepts(trace):
        raise UsageError(
            f"{trace} is a log, whose timers give times and no order; nearest: --job JOB, the job that it is of"
        )
    trace = newest_run(trace) or trace
    steps, memory, notes = steps_of(trace)
    study, limits = Study(steps, predict(steps), (), layers_of(trace, steps), memory, notes), None
    if options.memory is not None:
        study, limits = _limited(study, trace, options.memory)
    alternatives = compare(steps, study.prediction, limits, options.time_limit, options.split)
    if options.csv is not None and alternatives.best is not None:
        write_csv(alternatives.best.schedule, options.csv)
    factor, unit = time_unit([study.typical])
    measured = f"measured: {number(study.prediction.measured * factor)} {unit}"
    values = {"unit": "s", "measured": study.prediction.measured, "notes": list(notes)}
    emit(
        options.as_json,
        lambda: values | alternatives.values(),
        lambda: [*notes, measured, *alternatives.lines(factor, unit)],
    )


def _of_job(trace: Path | None, options: ImproveFlags, source: str) -> None:
    from pipeloom.cli.gains import gain_of
    from pipeloom.cli.plan import details
    from pipeloom.interop.systems import read_job
    from pipeloom.plan import load_device, load_model

    if options.split and options.csv is None:
        raise UsageError("--split is about the order of the actions, which --csv FILE searches beside --job")
    device = load_device(options.device)
    if options.memory is not None:
        device = replace(device, memory=memory_of(options.memory)[0])
    job = read_job(source, None if options.model is None else load_model(options.model))
    path = trace and (newest_run(trace) or trace)
    times = None if path is None else lambda job: _stage_times(path, job)
    gain = gain_of(job, device, axes=False, times=times)
    if options.csv is not None:
        gain = gain.in_order(options.csv, options.time_limit, options.split)
    gain.report(options.output, options.as_json, details)


def _stage_times(trace: Path, job: Job) -> list[tuple[tuple[int, ...], float, float]]:
    """Return (stages, seconds of F, of B) of a job's micro-batch as they were measured. Raises UsageError for another job's."""
    if accepts(trace):
        return read(trace, job.layout)
    steps = steps_of(trace)[0]
    schedule, costs, layout = steps[-1].schedule, predict(steps).costs, job.layout
    sizes = schedule.ranks, schedule.stages, schedule.microbatches
    if sizes != (layout.pp, layout.pp * layout.v, layout.m):
        raise UsageError(
            f"{trace} has {sizes[0]} ranks, {sizes[1]} stages and {sizes[2]} micro-batches, and the job {layout.pp}, "
            f"{layout.pp * layout.v} and {layout.m}: it is of another job"
        )
    each = StageCosts(costs, schedule.stages)
    return [((stage,), *times) for stage, times in enumerate(zip(each.forward, each.backward, strict=True))]


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
