"""`pipeloom show`: what a run measured, over what its own costs predict."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeloom.cli import requests
from pipeloom.cli.schedule import as_dict, write_files
from pipeloom.errors import PipeloomError, UsageError, did_you_mean, shortened

if TYPE_CHECKING:
    from pipeloom.schedule import Timeline
    from pipeloom.schedule.measured import Prediction
    from pipeloom.solver import SearchResult

TIMELINES_FILE = "timelines.json"


def command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR_OR_TRACE",
            help="The folder of a run, its timelines.json, a folder of timer dumps (pp_rank_N.json), or a Chrome trace.",
        ),
    ],
    predict: Annotated[
        list[Path] | None,
        typer.Option(
            "--predict", metavar="RUN_DIR", help="Predict another run, of as many stages, from this one's costs."
        ),
    ] = None,
    search: Annotated[
        float | None,
        typer.Option(
            "--search", metavar="S", min=0.1, help="Search S seconds for a better schedule at the same memory."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Draw every traced step, one under another.")] = False,
    as_json: requests.JsonOption = False,
    svg: requests.SvgOption = None,
    png: requests.PngOption = None,
    html: requests.HtmlOption = None,
    trace: requests.TraceOption = None,
    width: requests.WidthOption = None,
) -> None:
    """Show what a run measured: the typical step, where its time went, and how well its costs predict it.

    pipeloom show runs/20260101-120000-1f1b --html step.html
    """
    from pipeloom.schedule import simulate
    from pipeloom.schedule.measured import predict as fit

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
    """(measured steps, GB of each rank where known, how they were read) of a run or of another program's trace."""
    from pipeloom.schedule.foreign import is_foreign, load_foreign

    if is_foreign(path):
        found = load_foreign(path)
        return found.timelines, found.memory, found.notes
    return timelines_of(path), (), ()


def timelines_of(path: Path) -> tuple[Timeline, ...]:
    """The measured steps of a run's folder or of a file of timelines; raises UsageError where there are none."""
    from pipeloom.schedule import timeline_form

    file = path / TIMELINES_FILE if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            runs = sorted(name.parent.name for name in path.glob(f"*/{TIMELINES_FILE}"))
            near = f"; nearest: {path / runs[-1]}" if runs else "; a run writes it at its end"
            raise UsageError(f"{path} has no {TIMELINES_FILE}{near}")
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(
            f"there is no {shortened(str(path))}{did_you_mean(path.name, names) if len(names) < 200 else ''}"
        )
    found = timeline_form.load(file)
    if not found:
        raise UsageError(f"{file} holds no step")
    return found


def layers_of(run: Path, steps: Sequence[Timeline]) -> list[float] | None:
    """stage -> its blocks, of the configuration beside the steps; 0 for the first and the last, which hold more than blocks.

    None where there is no configuration, or it is another model's.
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


@dataclass(frozen=True)
class Study:
    """The measured steps of a run and what they say.

    Attributes:
        others: runs to predict from this one's costs, with their steps.
        layers: stage -> its blocks, where known.
        memory: rank -> GB, where the trace says.
        notes: how another program's trace was read.
        better: what a search found at the same memory, or None.
    """

    steps: Sequence[Timeline]
    prediction: Prediction
    others: Sequence[tuple[Path, Sequence[Timeline]]] = ()
    layers: Sequence[float] | None = None
    memory: Sequence[float] = ()
    notes: Sequence[str] = ()
    better: SearchResult | None = None

    @property
    def typical(self) -> Timeline:
        """The settled step with the median makespan."""
        from pipeloom.schedule.measured import settled

        ordered = sorted(settled(self.steps), key=lambda step: step.makespan)
        return ordered[len(ordered) // 2]

    def search(self, seconds: float) -> SearchResult:
        """The best schedule found for the fitted costs, on this placement and within this schedule's peak memory."""
        from pipeloom.schedule import simulate
        from pipeloom.solver import search

        schedule, costs = self.typical.schedule, self.prediction.costs
        room = max(simulate(schedule, costs).peak_memory)
        return search(
            schedule.ranks, schedule.microbatches, costs, room, placement=list(schedule.placement), time_limit=seconds
        )

    def memory_law(self) -> tuple[float, float] | None:
        """(GB at rest, GB of one stage-micro-batch) of the least squares through the ranks' memory and their peaks."""
        peaks = self.typical.peak_activations
        if len(self.memory) != len(peaks) or len(set(peaks)) < 2:
            return None
        mean, level = fmean(peaks), fmean(self.memory)
        slope = sum((p - mean) * (g - level) for p, g in zip(peaks, self.memory, strict=True))
        slope /= sum((p - mean) ** 2 for p in peaks)
        return level - slope * mean, slope

    def predicted(self) -> list[tuple[Path, float, float]]:
        """(run, simulated, measured) makespan of each of the others."""
        from pipeloom.schedule.measured import predict_another

        return [(path, *predict_another(self.prediction.costs, steps)) for path, steps in self.others]

    def as_dict(self) -> dict[str, Any]:
        from pipeloom.schedule.measured import drift, settled, slow_stages, time_spent
        from pipeloom.schedule.timeline_form import costs_dict

        prediction = self.prediction
        return as_dict(self.typical) | {
            "unit": "s",
            "steps": len(self.steps),
            "prediction": {
                "costs": costs_dict(prediction.costs),
                "fitted_steps": prediction.fitted,
                "tested_steps": prediction.tested,
                "simulated": prediction.simulated,
                "measured": prediction.measured,
                "error": prediction.error,
                "by_kind": dict(prediction.by_kind),
            },
            "time_spent": list(time_spent(settled(self.steps))),
            "slow_stages": [
                {"stage": slow.stage, "rank": slow.rank, "excess": slow.excess}
                for slow in slow_stages(self.steps, self.layers)
            ],
            "others": [
                {"run": str(path), "simulated": simulated, "measured": measured, "error": simulated / measured - 1}
                for path, simulated, measured in self.predicted()
            ],
            "drift": drift(self.steps),
            "memory": list(self.memory),
            "memory_law": self.memory_law(),
            "notes": list(self.notes),
            "search": None
            if self.better is None
            else {"makespan": self.better.value, "lower_bound": self.better.lower_bound},
        }

    def lines(self) -> list[str]:
        """Return the lines below the drawing in the terminal."""
        from pipeloom.draw.figures import number, time_unit
        from pipeloom.schedule.measured import drift, settled, slow_stages, time_spent

        factor, unit = time_unit([self.typical])
        prediction = self.prediction
        lines = [*self.notes]
        lines += [
            f"prediction: costs of {prediction.fitted} step{'s' * (prediction.fitted > 1)} predict "
            f"{number(prediction.simulated * factor)} {unit}, the other {prediction.tested} took "
            f"{number(prediction.measured * factor)} {unit}: error {100 * prediction.error:+.1f} %"
        ]
        for path, simulated, measured in self.predicted():
            lines.append(
                f"they predict {number(simulated * factor)} {unit} for {path}, which took {number(measured * factor)} {unit}: "
                f"error {100 * (simulated / measured - 1):+.1f} %"
            )
        if prediction.by_kind:
            kinds = ", ".join(f"{kind} {100 * error:+.1f} %" for kind, error in prediction.by_kind.items())
            lines.append(f"time of an action against its fitted time: {kinds}")
        spent = time_spent(settled(self.steps))
        columns = [name for name in spent[0] if any(row[name] > 0 for row in spent)]
        table = [["rank", *columns]]
        table += [[str(rank), *(number(row[name] * factor) for name in columns)] for rank, row in enumerate(spent)]
        wide = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
        lines += ["", f"where the time went, {unit} of a step, the mean over the steps"]
        lines += ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, wide, strict=True)) for row in table]
        law = self.memory_law()
        if law is not None:
            lines.append(
                f"memory of a rank: {number(law[0], 3)} GB and {number(law[1], 3)} GB for each stage-micro-batch it holds"
            )
        if self.better is not None:
            gain = 1 - self.better.value / prediction.simulated
            lines.append(
                f"search at the same memory: {number(self.better.value * factor)} {unit}, {100 * gain:.1f} % less than these "
                f"costs give this schedule; no schedule takes less than {number(self.better.lower_bound * factor)} {unit}"
            )
        for slow in slow_stages(self.steps, self.layers):
            lines.append(f"stage {slow.stage} on rank {slow.rank} takes {100 * slow.excess:.0f} % longer than its like")
        change = drift(self.steps)
        if abs(change) >= 0.02:
            lines.append(
                f"steps became {100 * abs(change):.0f} % {'longer' if change > 0 else 'shorter'} from the first to the last"
            )
        return lines
