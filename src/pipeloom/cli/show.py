"""`pipeloom show`: the measured steps of a run, above the step that its own costs predict."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeloom.cli.changes import Alternatives, compare
from pipeloom.cli.options import argument, flag, with_options
from pipeloom.cli.output import OutputFlags, as_dict
from pipeloom.draw.figures import in_blocks, number, time_unit
from pipeloom.draw.losses import loss_curve
from pipeloom.errors import PipeloomError, UsageError, did_you_mean, folded, shortened
from pipeloom.limits import newest_run
from pipeloom.schedule import Timeline, simulate
from pipeloom.traces import reader_of
from pipeloom.traces import timelines as timeline_files
from pipeloom.traces.measured import Prediction, drift, predict_another, settled, slow_stages, step_time, time_spent
from pipeloom.traces.measured import predict as fit
from pipeloom.traces.timelines import costs_dict

if TYPE_CHECKING:
    from pipeloom.config import Layout
TIMELINES_FILE = "timelines.json"
_USES = (
    "p2p: messages on their way (tp, cp, dp and all-to-all: communication inside layers); dependency: another rank has not yet "
    "computed what is needed; memory: for room, or a copy; overhead: the host; end of step: the rank has nothing left to do"
)


@with_options(without=("csv",))
def command(
    *,
    run: Path = argument(
        ...,
        "RUN_DIR_OR_TRACE",
        "The folder of a run or of runs, a timelines.json, a Chrome trace or a folder of such, or a CSV with durations.",
    ),
    predict: list[Path] | None = flag(
        None, "RUN_DIR", "Predict another run of the same model from the costs of this one; repeatable."
    ),
    search: float | None = flag(
        None, "S", "Search S seconds for a better schedule within the same memory, as `improve` does.", min=0.1
    ),
    split: bool = flag(False, None, "With --search: split backwards into I and W, where the trace has them whole."),
    every: bool = flag(False, None, "Draw every recorded step, one below the other.", "--every"),
    output: OutputFlags,
) -> None:
    """Show the measured steps of a run.

    Draws the typical step, and prints where its time went and how well the measured costs predict it.

    pipeloom show runs/20260101-120000-1f1b --html step.html
    """
    output.require()
    if (newest := newest_run(run)) is not None:
        run = newest
        print(f"pipeloom: the newest run is {run}", file=sys.stderr)
    steps, memory, notes = steps_of(run)
    others = tuple((path, steps_of(path)[0]) for path in predict or ())
    study = Study(steps, fit(steps), others, layers_of(run, steps), memory, notes)
    if search is not None:
        study = replace(study, better=compare(steps, study.prediction, None, search, split))
    predicted = simulate(study.typical.schedule, study.prediction.costs)
    output.draw([*(steps if every else [study.typical]), predicted], partial(loss_curve, run / "log.jsonl"))
    if output.as_json:
        print(json.dumps(study.as_dict() | {"run": str(run)}, allow_nan=False))
        return
    output.print_timeline(study.typical)
    print(folded("\n".join(["", *study.lines()])))


def steps_of(path: Path) -> tuple[tuple[Timeline, ...], tuple[float, ...], tuple[str, ...]]:
    """Return the measured steps of a run or of another program's trace, the GB of each rank where known, and notes."""
    ours = path.is_dir() and (path / TIMELINES_FILE).is_file()  # a run's folder also contains the trace of one step
    reader = None if ours else reader_of(path)
    return reader.read(path) if reader is not None else (timelines_of(path), (), ())


def timelines_of(path: Path) -> tuple[Timeline, ...]:
    """Return the measured steps in a run's folder or in a file of timelines. Raises UsageError where there are none."""
    file = path / TIMELINES_FILE if path.is_dir() else path
    if not file.exists():
        if path.is_dir():
            runs = sorted(name.parent.name for name in path.glob(f"*/{TIMELINES_FILE}"))
            near = f"; nearest: {path / runs[-1]}" if runs else "; a run writes it when it ends"
            raise UsageError(f"{path} has no {TIMELINES_FILE}{near}")
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"there is no {shortened(str(path))}{did_you_mean(path.name, names, listed=False)}")
    timelines = timeline_files.load(file)
    if not timelines:
        raise UsageError(f"{file} contains no steps")
    return timelines


def layout_of(run: Path) -> Layout | None:
    """Return the layout of the configuration in a run's folder; None where there is none, or no valid one."""
    file = (run if run.is_dir() else run.parent) / "config.toml"
    if file.is_file():
        from pipeloom.config import load_layout

        with suppress(PipeloomError):
            return load_layout(file)
    return None


def layers_of(run: Path, steps: Sequence[Timeline]) -> list[float] | None:
    """Return stage -> its number of blocks, from the configuration in the run's folder; 0 for the first and last stage of a
    route, which hold other layers too.

    None where there is no valid configuration, or one with another number of stages.
    """
    schedule, layout = steps[-1].schedule, layout_of(run)
    held = () if layout is None else layout.stage_layers
    if len(held) != schedule.positions:
        return None
    blocks = [0.0, *map(float, held[1:-1]), 0.0] if len(held) > 1 else [0.0]
    return [blocks[at] for at in schedule.position_of]


@dataclass(frozen=True)
class Study:
    """The measured steps of a run and their analysis.

    Attributes:
        steps: the measured steps.
        prediction: costs fitted to some of the steps, and their error on the others.
        others: runs to predict from this run's costs, with their steps.
        layers: stage -> its number of blocks, or any other measure of its work, where known.
        memory: rank -> GB, where the trace contains it.
        notes: lines on how another program's trace was read.
        better: other schedules within the same memory, or None.
    """

    steps: Sequence[Timeline]
    prediction: Prediction
    others: Sequence[tuple[Path, Sequence[Timeline]]] = ()
    layers: Sequence[float] | None = None
    memory: Sequence[float] = ()
    notes: Sequence[str] = ()
    better: Alternatives | None = None

    @property
    def typical(self) -> Timeline:
        """The settled step with the median makespan."""
        ordered = sorted(settled(self.steps), key=lambda step: step.makespan)
        return ordered[len(ordered) // 2]

    def predicted(self) -> list[tuple[Path, float, float]]:
        """Return (run, simulated makespan, measured makespan) of each run in `others`."""
        fitted = self.typical.schedule
        return [(path, *predict_another(self.prediction.costs, fitted, steps)) for path, steps in self.others]

    def as_dict(self) -> dict[str, Any]:
        prediction = self.prediction
        return as_dict(self.typical) | {
            "unit": "s",
            "steps": len(self.steps),
            "prediction": {
                "costs": costs_dict(prediction.costs),
                "fitted_steps": prediction.fitted,
                "tested_steps": prediction.tested,
                **{name: getattr(prediction, name) for name in ("simulated", "measured")},
                **{
                    name: getattr(prediction, name) if prediction.tested else None
                    for name in ("error", "speed", "error_at_speed")
                },
                "by_kind": dict(prediction.by_kind),
            },
            "time_spent": list(time_spent(settled(self.steps))),
            "step_time": fmean(map(step_time, settled(self.steps))),
            "slow_stages": [asdict(slow) for slow in slow_stages(self.steps, self.layers)],
            "others": [
                {"run": str(path), "simulated": simulated, "measured": measured, "error": simulated / measured - 1}
                for path, simulated, measured in self.predicted()
            ],
            "drift": drift(self.steps),
            "memory": list(self.memory),
            "notes": list(self.notes),
            "search": self.better and self.better.values(),
        }

    def lines(self) -> list[str]:
        """Return the lines below the drawing in the terminal."""
        factor, unit = time_unit([self.typical])
        prediction = self.prediction
        took = f"{number(prediction.measured * factor)} {unit}".rstrip()
        lines = [*self.notes]
        if not prediction.tested:
            lines.append(f"one step, of {took}: there is no other one to predict from its costs")
        else:
            lines += [
                f"prediction: costs of {prediction.fitted} step{'s' * (prediction.fitted > 1)} predict "
                f"{number(prediction.simulated * factor)} {unit};",
                f"  the other {prediction.tested} took {took}: error {100 * prediction.error:+.1f} %",
            ]
        if prediction.tested and abs(prediction.speed - 1) >= 0.02:
            lines.append(
                f"  actions ran {100 * abs(1 - 1 / prediction.speed):.0f} % {'faster' if prediction.speed < 1 else 'slower'} in "
                f"them; with costs at that speed: error {100 * prediction.error_at_speed:+.1f} %"
            )
        for (path, simulated, measured), (_, steps) in zip(self.predicted(), self.others, strict=True):
            here, there = self.typical.schedule.positions, steps[-1].schedule.positions
            cut = f", with the {here} stages cut evenly into {there}," if here != there else ""
            lines.append(
                f"the same costs{cut} predict {number(simulated * factor)} {unit} for {path}, which took "
                f"{number(measured * factor)} {unit}: "
                f"error {100 * (simulated / measured - 1):+.1f} %"
            )
        if prediction.by_kind and prediction.tested:
            kinds = ", ".join(f"{kind} {100 * error:+.1f} %" for kind, error in prediction.by_kind.items())
            lines.append(f"time of an action against its fitted time: {kinds}")
        spent = time_spent(settled(self.steps))
        columns = [name for name in spent[0] if any(row[name] > 0 for row in spent)]
        table = [["rank", *columns, "step"]]
        table += [
            [str(rank), *(number(row[name] * factor) for name in columns), number(sum(row.values()) * factor)]
            for rank, row in enumerate(spent)
        ]
        lines += [
            "",
            f"where the time went, {unit or 'in units of the costs,'} per step, mean over the steps",
            *in_blocks(table),
            _USES,
        ]
        if self.better is not None:
            lines += ["", *self.better.lines(factor, unit)]
        for slow in slow_stages(self.steps, self.layers):
            lines.append(
                f"stage {slow.stage} on rank {slow.rank} takes {100 * slow.excess:.0f} % longer than comparable stages"
            )
        change = drift(self.steps)
        if abs(change) >= 0.02:
            lines.append(
                f"steps became {100 * abs(change):.0f} % {'longer' if change > 0 else 'shorter'} from the first to the last"
            )
        return lines
