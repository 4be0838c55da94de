"""A run's prediction beside what was measured: step, bubble, exposed communication, bytes, and the largest cause of error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pipeloom.config import Layout
from pipeloom.draw.figures import in_columns
from pipeloom.plan.run import predicted
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.traces.measured import costs_of
from pipeloom.train.report.metrics import known_device, simulated

_LEAST_CAUSE = 0.01  # share of the measured step: less is within its noise
_MEASURE = {
    "times of the stages": "pipeloom profile measures the layers",
    "messages": "pipeloom profile --processes 2 measures the links",
}
"""Cause of error -> what a reader can do about it."""


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured.

    Attributes:
        basis: where the predicted times come from, in words.
        predicted: the schedule, simulated with the predicted times.
        figures: name -> (predicted, measured): step and exposed communication in seconds, bubble rate, bytes of the fullest rank.
        causes: cause -> seconds of the step that it adds to the prediction; together they lead to the measured step.
    """

    basis: str
    predicted: Timeline
    figures: Mapping[str, tuple[float, float]]
    causes: Mapping[str, float]

    @property
    def largest(self) -> str:
        """The cause that moves the step most."""
        return max(self.causes, key=lambda cause: abs(self.causes[cause]))

    def record(self) -> dict[str, Any]:
        """Return the figures for the log."""
        pairs = {name: {"predicted": one, "measured": other} for name, (one, other) in self.figures.items()}
        return {"basis": self.basis, **pairs, "causes": dict(self.causes), "largest_cause": self.largest}

    @property
    def advice(self) -> str:
        """A sentence on the largest cause of error; "" where nobody can act on it."""
        cause = self.causes[self.largest]
        command = next((words for name, words in _MEASURE.items() if self.largest.startswith(name)), "")
        if not command or abs(cause) < _LEAST_CAUSE * self.figures["step, s"][1]:
            return ""
        return f"largest cause of error: {self.largest}, {cause:+.2g} s of the step; {command}, for plan --costs FILE"


def step_lines(measured: Timeline, comparison: Comparison | None, crowded: str) -> list[str]:
    """Return a table of a step as measured, as simulated with its own times, and as predicted, and the meaning of its words.

    Args:
        crowded: how many ranks share how many cores; "" where each has its own.
    """
    free = simulated(measured)
    known = {"step, s": (measured.makespan, free.makespan), "bubble rate": (measured.bubble_rate, free.bubble_rate)}
    rows = [["", "measured", "simulated"], *([name, *map(_number, values)] for name, values in known.items())]
    notes = ["simulated: with the measured times of the stages, and free messages"]
    if comparison is not None:
        rows = [["", "measured", "simulated", "predicted", "error"]]
        for name, (one, other) in comparison.figures.items():
            write = size_words if name == "bytes" else _number
            error = f"{100 * (one / other - 1):+.1f} %" if name in ("step, s", "bytes") and other else ""
            rows.append([name, write(other), write(known[name][1]) if name in known else "", write(one), error])
        notes += [f"predicted: times from {comparison.basis}", *filter(None, [comparison.advice])]
    waits = f" ({crowded}, so idle time includes waiting for a core)" if crowded else ""
    return [*(line.rstrip() for line in in_columns(rows)), f"bubble rate: Σ idle / (p · makespan){waits}", *notes]


def _number(value: float) -> str:
    return f"{value:.4g}"


def compared(
    layout: Layout, measured: Timeline, device_name: str, sizes: tuple[Sequence[float], Sequence[float]] = ((), ())
) -> Comparison:
    """Compare a measured step with its prediction, from the data sheet of the device, or else from the stages' FLOPs at the
    speed that was measured.

    Args:
        device_name: as torch names it; "" on a CPU.
        sizes: (predicted, measured) bytes of each rank; empty where they are not known.

    Raises UsageError for a model that cannot be planned.
    """
    device = known_device(device_name)
    prediction = predicted(replace(layout, schedule=measured.schedule), device).timeline
    if device is None:
        scaled = prediction.costs.scaled(
            sum(measured.busy) / sum(prediction.busy)
        )  # all ranks together compute as long
        prediction = simulate(measured.schedule, replace(scaled, p2p=0.0, message=0.0))
    fitted = costs_of([measured])
    measured_times = replace(
        fitted, **{name: getattr(prediction.costs, name) for name in ("p2p", "message", "bandwidth")}
    )
    steps = [
        prediction.makespan,
        simulate(measured.schedule, measured_times).makespan,
        simulate(measured.schedule, fitted).makespan,
        measured.makespan,
    ]
    names = (_stage_times(prediction, measured), "messages", "waits, and times that vary between micro-batches")
    figures = {
        "step, s": (prediction.makespan, measured.makespan),
        "bubble rate": (prediction.bubble_rate, measured.bubble_rate),
        "exposed communication, s": (_exposed(prediction), _exposed(replace(measured, costs=fitted))),
    }
    if all(sizes):
        worst = max(range(len(sizes[1])), key=lambda rank: sizes[1][rank])
        figures["bytes"] = sizes[0][worst], sizes[1][worst]
    return Comparison(
        f"the data sheet of {device.name}" if device is not None else "FLOPs at the measured speed",
        replace(prediction, source="predicted"),
        figures,
        {name: after - before for name, before, after in zip(names, steps, steps[1:], strict=False)},
    )


def _exposed(timeline: Timeline) -> float:
    """Return the seconds that messages add to the simulated step."""
    free = simulate(timeline.schedule, replace(timeline.costs, p2p=0.0, message=0.0))
    return simulate(timeline.schedule, timeline.costs).makespan - free.makespan


def _stage_times(prediction: Timeline, measured: Timeline) -> str:
    """Return the cause "times of the stages", which names the stage that is furthest from its prediction."""
    before, after = (of_stages(each.costs, each.schedule.stages) for each in (prediction, measured))
    ratios = [other / one if one else 1.0 for one, other in zip(before, after, strict=True)]
    worst = max(range(len(ratios)), key=lambda stage: abs(ratios[stage] - 1))
    longer = "longer" if ratios[worst] > 1 else "less"
    return f"times of the stages (stage {worst} takes {100 * abs(ratios[worst] - 1):.0f} % {longer})"


def of_stages(costs: Costs, stages: int) -> list[float]:
    """Return stage -> seconds of the forward and backward of a mean micro-batch."""
    names = ("forward", "input_grad", "weight_grad") if costs.backward is None else ("forward", "backward")
    rows = (costs.per_stage(name, stages) for name in names)
    return [fmean(costs.microbatch or (1.0,)) * sum(each) for each in zip(*rows, strict=True)]
