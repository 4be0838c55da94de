"""`pipeloom show`: the measured steps of a run, above the step that its own costs predict."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeloom.cli import schedule_arguments
from pipeloom.cli.schedule import require_outputs, write_files
from pipeloom.cli.study import Study
from pipeloom.errors import PipeloomError, UsageError, did_you_mean, shortened

if TYPE_CHECKING:
    from pipeloom.schedule import Timeline

TIMELINES_FILE = "timelines.json"


def command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR_OR_TRACE",
            help="The folder of a run, its timelines.json, a Chrome trace or a folder of such traces, or a CSV with durations.",
        ),
    ],
    predict: Annotated[
        list[Path] | None,
        typer.Option(
            "--predict",
            metavar="RUN_DIR",
            help="Predict another run of the same model from the costs of this one; repeatable.",
        ),
    ] = None,
    search: Annotated[
        float | None,
        typer.Option(
            "--search", metavar="S", min=0.1, help="Search S seconds for a better schedule within the same memory."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Draw every recorded step, one below the other.")] = False,
    as_json: schedule_arguments.JsonOption = False,
    svg: schedule_arguments.SvgOption = None,
    png: schedule_arguments.PngOption = None,
    html: schedule_arguments.HtmlOption = None,
    trace: schedule_arguments.TraceOption = None,
    width: schedule_arguments.WidthOption = None,
) -> None:
    """Show the measured steps of a run.

    Draws the typical step, and prints where its time went and how well the measured costs predict it.

    pipeloom show runs/20260101-120000-1f1b --html step.html
    """
    require_outputs(svg=svg, png=png, html=html, trace=trace)
    from pipeloom.schedule import simulate
    from pipeloom.traces.measured import predict as fit

    steps, memory, notes = steps_of(run)
    others = tuple((path, steps_of(path)[0]) for path in predict or ())
    study = Study(steps, fit(steps), others, layers_of(run, steps), memory, notes)
    if search is not None:
        study = replace(study, better=study.search(search))
    predicted = simulate(study.typical.schedule, study.prediction.costs)
    write_files(
        [*(steps if every else [study.typical]), predicted], svg=svg, png=png, html=html, trace=trace, width=width
    )
    if as_json:
        print(json.dumps(study.as_dict() | {"run": str(run)}, allow_nan=False))
        return
    from pipeloom.draw import terminal

    sys.stdout.write(terminal(study.typical, width=width or shutil.get_terminal_size().columns))
    print("\n" + "\n".join(study.lines()))


def steps_of(path: Path) -> tuple[tuple[Timeline, ...], tuple[float, ...], tuple[str, ...]]:
    """Return the measured steps of a run or of another program's trace, the GB of each rank where known, and notes."""
    from pipeloom.traces import reader_of

    ours = path.is_dir() and (path / TIMELINES_FILE).is_file()  # a run's folder also contains the trace of one step
    reader = None if ours else reader_of(path)
    return reader.read(path) if reader is not None else (timelines_of(path), (), ())


def timelines_of(path: Path) -> tuple[Timeline, ...]:
    """Return the measured steps in a run's folder or in a file of timelines. Raises UsageError where there are none."""
    from pipeloom.traces import timelines as timeline_files

    file = path / TIMELINES_FILE if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            runs = sorted(name.parent.name for name in path.glob(f"*/{TIMELINES_FILE}"))
            near = f"; nearest: {path / runs[-1]}" if runs else "; a run writes it when it ends"
            raise UsageError(f"{path} has no {TIMELINES_FILE}{near}")
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(
            f"there is no {shortened(str(path))}{did_you_mean(path.name, names) if len(names) < 200 else ''}"
        )
    timelines = timeline_files.load(file)
    if not timelines:
        raise UsageError(f"{file} contains no steps")
    return timelines


def layers_of(run: Path, steps: Sequence[Timeline]) -> list[float] | None:
    """Return stage -> its number of blocks, from the configuration in the run's folder; 0 for the first and last stage of a
    route, which hold other layers too.

    None where there is no valid configuration, or one with another number of stages.
    """
    file = (run if run.is_dir() else run.parent) / "config.toml"
    if not file.is_file():
        return None
    from pipeloom.config import load_layout

    schedule = steps[-1].schedule
    try:
        held = load_layout(file).stage_layers
    except PipeloomError:
        return None
    if len(held) != schedule.positions:
        return None
    blocks = [0.0, *map(float, held[1:-1]), 0.0] if len(held) > 1 else [0.0]
    return [blocks[at] for at in schedule.position_of]
