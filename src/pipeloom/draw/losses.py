"""The losses of a run as a line chart, read from its log."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pipeloom.draw.chart import Panel, chart
from pipeloom.limits import open_file

LOSS_LINES = {"step": "of each step", "evaluation": "held-out"}
"""Event of the log -> the line of its losses."""
MOST_LOSSES = 200  # of a line; of more steps, each point is the mean of several


def loss_curve(log: Path, width: float) -> str:
    """Return an SVG document of `width` pixels with the losses in a run's log against the step; "" where there are none.

    A step that was done again after a failure counts as it was done last. Lines that are torn or of another form are left out.
    """
    if not log.is_file():
        return ""
    losses: dict[str, dict[int, float]] = {name: {} for name in LOSS_LINES.values()}
    with open_file(log, "a run's log") as file:
        for line in file:
            try:
                event = json.loads(line)
                losses[LOSS_LINES[event["event"]]][int(event["step"])] = float(event["loss"])
            except (ValueError, TypeError, LookupError, RecursionError):
                continue
    lines = {name: thinned(points) for name, points in losses.items() if len(points) > 1}
    return chart("Losses", "step", [Panel("loss, nats per target", lines, from_zero=False)], width) if lines else ""


def thinned(points: dict[int, float]) -> list[tuple[float, float]]:
    """Return at most `MOST_LOSSES` points (last step, mean) of so many neighbouring steps with finite losses."""
    steps = sorted(step for step, loss in points.items() if math.isfinite(loss))
    size = max(1, math.ceil(len(steps) / MOST_LOSSES))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return [(group[-1], sum(map(points.__getitem__, group)) / len(group)) for group in groups]
