"""`pipeloom compare --sweep`: figures of schedules as one size varies, as a table, JSON or a chart."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pipeloom.draw.chart import Panel, chart
from pipeloom.draw.figures import in_blocks, number
from pipeloom.draw.tables import full_rank_peaks
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule import Timeline
from pipeloom.schedule.timeline import plain

SIZES = ("ranks", "microbatches", "chunks")
MOST_POINTS = 64


@dataclass(frozen=True)
class Sweep:
    """One size and the values that it takes."""

    size: str
    values: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> Sweep:
        """Parse `microbatches=8..64`, `microbatches=8..64:8` or `microbatches=8,16,32`.

        Without a step, a range of more than `MOST_POINTS` values is thinned evenly. Raises UsageError for any other text.
        """
        match = re.fullmatch(
            rf"({'|'.join(SIZES)})=(?:(\d{{1,6}})\.\.(\d{{1,6}})(?::([1-9]\d{{0,5}}))?|(\d{{1,6}}(?:,\d{{1,6}})*))",
            text,
        )
        low, high, step = (int(word or 0) for word in match.group(2, 3, 4)) if match is not None else (0, 0, 0)
        if match is None or low > high:
            raise UsageError(
                f"--sweep is {text!r:.200}; give {', '.join(SIZES)} and values, as in microbatches=8..64, microbatches=8..64:8 "
                "or ranks=2,4,8"
            )
        if match[5]:
            points = tuple(dict.fromkeys(map(int, match[5].split(","))))
        else:
            points = tuple(range(low, high + 1, step or -(-(high - low + 1) // MOST_POINTS)))
        if len(points) > MOST_POINTS:
            raise UsageError(f"--sweep has {len(points)} values; the most is {MOST_POINTS}: give a larger step")
        return cls(match[1], points)

    def run(
        self, names: Sequence[str], simulated: Callable[[str, int], Timeline], fixed: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Return a series for each name: its label, the figures at each point, and the refused values, each with a reason.

        The names in `fixed` have no such size: one simulation gives all their points.

        Raises UsageError if every schedule refuses all values.
        """
        series = []
        for name in names:
            one: dict[str, Any] = {"label": name, "fixed": name in fixed, "points": [], "refused": []}
            for value in self.values:
                try:
                    same = one["points"] if name in fixed else []
                    figures_of_point = same[0] if same else figures(simulated(name, value))
                    one["points"].append({**figures_of_point, "value": value})
                except PipeloomError as error:
                    one["refused"].append({"value": value, "reason": str(error)})
            series.append(one)
        if not any(one["points"] for one in series):
            name, why = series[0]["label"], series[0]["refused"][0]["reason"]
            raise UsageError(f"no schedule supports any of these sizes; {name}: {why}")
        return series


def figures(timeline: Timeline) -> dict[str, float]:
    """Return the makespan in the unit of the costs, the bubble ratio, and the largest peaks of a rank: activations in full-rank
    units (micro-batches of 1/p of the model), and memory as weighted by `Costs.activation`."""
    return {
        "makespan": plain(timeline.makespan),
        "bubble_ratio": timeline.bubble_ratio,
        "activations": max(full_rank_peaks(timeline)),
        "memory": max(timeline.peak_memory),
    }


def table(sweep: Sweep, series: Sequence[dict[str, Any]], costs: str) -> list[str]:
    """Return the lines of a table with a line for each schedule and value."""
    rows = [["schedule", sweep.size, "makespan", "bubble ratio", "peak activations", "peak memory"]]
    for one in series:
        for point in one["points"][: 1 if one["fixed"] else None]:
            figures_of_point = [number(point["makespan"]), f"{point['bubble_ratio']:.4f}"]
            peaks = [number(point["activations"]), number(point["memory"])]
            value = "any" if one["fixed"] else str(point["value"])
            rows.append([one["label"], value, *figures_of_point, *peaks])
    lines = in_blocks(rows)
    lines += ["", f"costs of 1/p of the model: {costs}", "peaks in full-rank units (micro-batches of 1/p of the model)"]
    for one in series:
        if one["refused"]:
            values = ", ".join(str(each["value"]) for each in one["refused"])
            lines.append(f"{one['label']} refuses {sweep.size} {values}: {one['refused'][0]['reason']}")
    return lines


def drawing(sweep: Sweep, series: Sequence[dict[str, Any]], words: str, width: float) -> str:
    """Return a chart of makespan, bubble ratio and peak memory against the size, as SVG; `words` names the fixed settings."""
    names = {"ranks": "p, ranks", "microbatches": "m, micro-batches", "chunks": "v, chunks"}
    panels = [
        Panel(
            title,
            {
                one["label"]: [(float(point["value"]), point[figure]) for point in one["points"]]
                for one in series
                if one["points"]
            },
        )
        for title, figure in (
            ("makespan", "makespan"),
            ("bubble ratio, Σ idle / Σ busy", "bubble_ratio"),
            ("peak memory, micro-batches of 1/p of the model", "memory"),
        )
    ]
    return chart(words, names[sweep.size], panels, width)
