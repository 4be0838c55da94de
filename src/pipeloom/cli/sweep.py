"""`pipeloom compare --sweep`: figures of schedules as one size varies, as a table, JSON or a chart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeloom.cli.output import aligned
from pipeloom.errors import PipeloomError, UsageError, did_you_mean

if TYPE_CHECKING:
    from pipeloom.schedule import Timeline

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
        size, equals, values = text.partition("=")
        size = size.strip().replace("-", "_")
        if not equals or size not in SIZES:
            raise UsageError(
                f"--sweep is {text!r:.200}; give a size and its values, as in microbatches=8..64, microbatches=8..64:8 or "
                f"ranks=2,4,8{did_you_mean(size, SIZES) if equals else ''}"
            )
        if match := re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})(?::(\d{1,6}))?", values.strip()):
            low, high = int(match[1]), int(match[2])
            if high < low:
                raise UsageError(f"--sweep is {text!r:.200}; {high} is below {low}: write {size}={high}..{low}")
            step = int(match[3]) if match[3] else -(-(high - low + 1) // MOST_POINTS)
            if step < 1:
                raise UsageError(f"--sweep is {text!r:.200}; the step must be at least 1")
            points = tuple(range(low, high + 1, step))
        elif re.fullmatch(r"\d{1,6}(,\d{1,6})*", values.strip()):
            points = tuple(dict.fromkeys(map(int, values.split(","))))
        else:
            raise UsageError(f"--sweep is {text!r:.200}; give a range such as 8..64, or numbers such as 8,16,32")
        if len(points) > MOST_POINTS:
            raise UsageError(f"--sweep has {len(points)} values; the most is {MOST_POINTS}: give a larger step")
        return cls(size, points)

    def run(self, names: Sequence[str], simulated: Callable[[str, int], Timeline]) -> list[Series]:
        """Return a series for each name; values that a schedule refuses are in `refused`, with the reason.

        Raises UsageError if every schedule refuses all values.
        """
        series = []
        for name in names:
            points: list[Point] = []
            refused: dict[int, str] = {}
            for value in self.values:
                try:
                    points.append(Point.of(value, simulated(name, value)))
                except PipeloomError as error:
                    refused[value] = str(error)
            series.append(Series(name, points, refused))
        if not any(one.points for one in series):
            name, why = next((one.name, next(iter(one.refused.values()))) for one in series)
            raise UsageError(f"no schedule supports any of these sizes; {name}: {why}")
        return series


@dataclass(frozen=True)
class Point:
    """The figures of one schedule at one value of the size.

    Attributes:
        value: the number of ranks, micro-batches or chunks.
        makespan: in the unit of the costs.
        activations: the largest peak of a rank, in full-rank units (micro-batches of 1/p of the model).
        memory: the largest peak of a rank, weighted by `Costs.activation`.
    """

    value: int
    makespan: float
    bubble_ratio: float
    activations: float
    memory: float

    @classmethod
    def of(cls, value: int, timeline: Timeline) -> Point:
        from pipeloom.schedule.timeline import plain

        peaks = max(full_rank_peaks(timeline)), max(timeline.peak_memory)
        return cls(value, plain(timeline.makespan), timeline.bubble_ratio, *peaks)


def full_rank_peaks(timeline: Timeline) -> list[float]:
    """Return rank -> peak activations in full-rank units (micro-batches of 1/p of the model)."""
    from pipeloom.draw.figures import full_rank

    full = full_rank(timeline.schedule)
    return [peak * full for peak in timeline.peak_activations]


@dataclass(frozen=True)
class Series:
    """One schedule's points, and value -> reason for each value that it refuses."""

    name: str
    points: list[Point]
    refused: dict[int, str]


def as_dict(sweep: Sweep, series: Sequence[Series]) -> dict[str, Any]:
    return {
        "sweep": {"size": sweep.size, "values": list(sweep.values)},
        "series": [
            {
                "label": one.name,
                "points": [point.__dict__ for point in one.points],
                "refused": [{"value": value, "reason": why} for value, why in one.refused.items()],
            }
            for one in series
        ],
    }


def table(sweep: Sweep, series: Sequence[Series], costs: str) -> str:
    """Return a table with a line for each schedule and value."""
    from pipeloom.draw.figures import number

    rows = [["schedule", sweep.size, "makespan", "bubble ratio", "peak activations", "peak memory"]]
    for one in series:
        rows += [
            [
                one.name,
                str(p.value),
                number(p.makespan),
                f"{p.bubble_ratio:.4f}",
                number(p.activations),
                number(p.memory),
            ]
            for p in one.points
        ]
    lines = aligned(rows)
    lines += ["", f"costs of 1/p of the model: {costs}", "peaks in full-rank units (micro-batches of 1/p of the model)"]
    for one in series:
        if one.refused:
            values = ", ".join(map(str, one.refused))
            lines.append(f"{one.name} refuses {sweep.size} {values}: {next(iter(one.refused.values()))}")
    return "\n".join(lines)


def drawing(sweep: Sweep, series: Sequence[Series], words: str, width: float) -> str:
    """Return a chart of makespan, bubble ratio and peak memory against the size, as SVG; `words` names the fixed settings."""
    from pipeloom.draw.chart import Panel, chart

    names = {"ranks": "p, ranks", "microbatches": "m, micro-batches", "chunks": "v, chunks"}

    def panel(title: str, figure: str) -> Panel:
        lines = {one.name: [(float(p.value), getattr(p, figure)) for p in one.points] for one in series if one.points}
        return Panel(title, lines)

    panels = [
        panel("makespan", "makespan"),
        panel("bubble ratio, Σ idle / Σ busy", "bubble_ratio"),
        panel("peak memory, micro-batches of 1/p of the model", "memory"),
    ]
    return chart(words, names[sweep.size], panels, width)
