"""Line charts of a sweep: makespan and memory of several schedules against one of their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pipeloom.draw import palette
from pipeloom.draw.boxes import nice_step
from pipeloom.draw.figures import number
from pipeloom.draw.svg import LEAST_WIDTH, USUAL_WIDTH, Sheet, svg_document, text_width, wrapped
from pipeloom.errors import UsageError, printable

# Okabe and Ito's colours, which every kind of colour vision can tell apart; the yellow is darker, to be visible on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b59f00", "#56b4e9", "#e69f00", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
LEFT, CHART_RIGHT, HIGH, TOP_MARGIN = 74.0, 24.0, 220.0, 16.0


@dataclass(frozen=True)
class Panel:
    """One chart: the title of its vertical axis, its lines as label -> [(x, y), …], and whether the axis begins at 0."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    from_zero: bool = True


def chart(title: str, axis: str, panels: Sequence[Panel], width: float = USUAL_WIDTH, log2: bool = False) -> str:
    """An SVG document with the panels under one another, on one horizontal axis.

    `log2`: x and 2x are always as far apart.

    Raises UsageError where no line has a point, or for a width below `LEAST_WIDTH`.
    """
    marks = [x for panel in panels for line in panel.lines.values() for x, _ in line]
    if not marks:
        raise UsageError("there is no point to draw")
    if not width >= LEAST_WIDTH:
        raise UsageError(f"an SVG is at least {LEAST_WIDTH} pixels wide, not {width:g}")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    sheet = _ChartSheet(width, min(marks), max(marks), labels, math.log2 if log2 else float)
    y = 8.0
    for words in wrapped(printable(title), 16.8, width - 2 * TOP_MARGIN):
        y += 20
        sheet.text(TOP_MARGIN, y, words, "h")
    for panel in panels:
        y = sheet.panel(panel, y + 42)
    sheet.text((LEFT + width - CHART_RIGHT) / 2, y + 12, axis, "m")
    height = sheet.legend(y + 34) + 16
    style = (
        f".b{{font-weight:600}}.e{{text-anchor:end;fill:{palette.FAINT_INK}}}"
        f".m{{text-anchor:middle;fill:{palette.FAINT_INK}}}"
    )
    return svg_document((width, height), title, style, sheet.out)


@dataclass
class _ChartSheet(Sheet):
    """A sheet with line charts; `low` and `high` are the ends of the horizontal axis, and `scale` is its scale."""

    low: float
    high: float
    labels: Sequence[str]
    scale: Callable[[float], float]

    def stroke(self, label: str) -> str:
        """Return the stroke of the line of `label`."""
        at = self.labels.index(label)
        dash = DASHES[at // len(COLOURS) % len(DASHES)]
        return f'stroke="{COLOURS[at % len(COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")

    def across(self, x: float) -> float:
        low, at, high = map(self.scale, (self.low, x, self.high))
        return LEFT + (at - low) / ((high - low) or 1.0) * (self.width - LEFT - CHART_RIGHT)

    def panel(self, panel: Panel, y: float) -> float:
        """Draw a panel from `y` on; return where it ends."""
        self.text(TOP_MARGIN, y - 14, panel.title, "b")
        values = [value for line in panel.lines.values() for _, value in line]
        least = 0.0 if panel.from_zero else min(values, default=0.0)
        top = max(values, default=0.0) or 1.0
        step = nice_step(top - least or abs(top), 5)
        first = math.floor(least / step + 1e-9)
        steps = max(1, math.ceil(top / step - 1e-9) - first)
        for count in range(steps + 1):
            level = y + HIGH * (1 - count / steps)
            grid = (
                f'd="M{LEFT} {level:.1f}H{self.width - CHART_RIGHT:.1f}" stroke="{palette.IDLE_LINE}" stroke-width=".6"'
            )
            self.out.append(f"<path {grid}/>")
            self.text(LEFT - 8, level + 4, number((first + count) * step), "e")
        for label, line in panel.lines.items():
            self._line(
                label,
                [
                    (x, value, self.across(x), y + HIGH * (1 - (value / step - first) / steps))
                    for x, value in sorted(line)
                ],
            )
        y += HIGH
        last = -math.inf
        for x in sorted({x for line in panel.lines.values() for x, _ in line}):
            if self.across(x) - last >= 34:
                last = self.across(x)
                self.text(last, y + 16, number(x), "m")
        return y + 22

    def _line(self, label: str, points: Sequence[tuple[float, float, float, float]]) -> None:
        """Draw a line through points (x, value, horizontal and vertical position on the sheet)."""
        path = " ".join(f"{x:.1f},{y:.1f}" for _, _, x, y in points)
        wide = 2 + max(0, min(len(self.labels), 6) - 1 - self.labels.index(label))  # the first show behind the others
        self.out.append(f'<polyline points="{path}" fill="none" {self.stroke(label)} stroke-width="{wide:g}"/>')
        colour = COLOURS[self.labels.index(label) % len(COLOURS)]
        for size, value, x, y in points:
            words = escape(printable(f"{label}: {number(value)} at {number(size)}"))
            self.out.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"><title>{words}</title></circle>'
            )

    def legend(self, y: float) -> float:
        """Draw a line and its words for each label, from the baseline `y` on; return the last baseline."""
        room = self.width - 2 * TOP_MARGIN - 44
        cut = [wrapped(printable(label), 12, room - 12) for label in self.labels]
        names = [lines[0] + "…" * (len(lines) > 1) for lines in cut]
        places = self.flow([34 + text_width(name, 12) for name in names], y, 20)
        for (x, y), label, name in zip(places, self.labels, names, strict=True):
            self.out.append(f'<path d="M{x:.1f} {y - 4:.1f}h26" {self.stroke(label)} stroke-width="2.5"/>')
            self.text(x + 32, y, name)
        return y
