"""The characters of a terminal drawing: each rank's boxes laid on a grid of columns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from pipeloom.draw.boxes import boxes, segments
from pipeloom.schedule import Action, Timeline


class Paint(NamedTuple):
    """Colour of a character; kind "" is idle."""

    kind: str
    chunk: int
    chunks: int


IDLE_PAINT = Paint("", 0, 1)
PaintedLine = list[tuple[str, Paint]]
_BusyTime = tuple[float, float, Action, int]


@dataclass(frozen=True)
class Grid:
    """A drawing before it is coloured.

    Attributes:
        bands: rank -> its lines, each a list of (character, paint).
        columns: the number of columns of the makespan.
        scale: columns per unit of time.
        rows: lines per band; more than one when micro-batches are written below the letters.
        dithered: whether a column covers more time than a short action.
        kinds: the actions that occur.
    """

    bands: tuple[tuple[PaintedLine, ...], ...]
    columns: int
    scale: float
    makespan: float
    rows: int
    dithered: bool
    kinds: frozenset[str]

    @property
    def gap(self) -> bool:
        """Return whether an empty line belongs between two bands: where they have more than one line."""
        return self.rows > 1


def grid(timeline: Timeline, columns: int, filled: bool) -> Grid:
    """`timeline` on at most `columns` columns.

    Args:
        filled: whether the rest of a box is filled with a line, which shows its length where there are no colours.
    """
    ranks = [[s for s in segments(row) if s[1] > s[0]] for row in boxes(timeline)]
    makespan = timeline.makespan
    scale = _scale(ranks, makespan, columns)
    used = max(1, round(makespan * scale))
    widths = sorted(round(end * scale) - round(start * scale) for row in ranks for start, end, _, _ in row)
    typical_width = widths[len(widths) // 10] if widths else 1
    digits = len(str(timeline.schedule.microbatches - 1))
    chunks = timeline.schedule.chunks
    kinds = frozenset(action.kind for row in ranks for _, _, action, _ in row)
    if typical_width < 1:
        dithered = tuple((_dithered(row, used, scale, chunks),) for row in ranks)
        return Grid(dithered, used, scale, makespan, 1, True, kinds)
    below = 0 if typical_width >= digits + 2 else 1 if typical_width >= digits + (digits > 1) else digits
    bands = tuple(_band(row, used, scale, chunks, below, filled) for row in ranks)
    return Grid(bands, used, scale, makespan, 1 + below, False, kinds)


def _scale(ranks: list[list[_BusyTime]], makespan: float, columns: int) -> float:
    """Return columns per unit of time: a whole number per tick where all times are multiples of a tick of at least one column."""
    if makespan <= 0:
        return 1.0
    ticks = 0
    for row in ranks:
        for start, end, _, _ in row:
            for time in (start, end):
                whole = round(time * 1000)
                if abs(time * 1000 - whole) > 1e-4:
                    return columns / makespan
                ticks = gcd(ticks, whole)
    count = round(makespan * 1000) // ticks if ticks else columns + 1
    return columns // count * 1000 / ticks if count <= columns else columns / makespan


def _band(
    row: list[_BusyTime], columns: int, scale: float, chunks: int, below: int, filled: bool
) -> tuple[PaintedLine, ...]:
    """Return the line of letters, and `below` lines of micro-batches under it (0: beside the letters)."""
    lines: list[PaintedLine] = [[("·", IDLE_PAINT)] * columns, *([(" ", IDLE_PAINT)] * columns for _ in range(below))]
    for start, end, action, chunk in row:
        left, right = round(start * scale), min(columns, round(end * scale))
        paint = Paint(action.kind, chunk, chunks)
        wide = right - left
        head = f"{action.kind}{action.microbatch}" if below == 0 else action.kind
        texts = [head if len(head) <= wide else action.kind]
        if below == 1:
            texts.append(str(action.microbatch))
        elif below > 1:
            texts += f"{action.microbatch:>{below}}"
        for index, text in enumerate(texts):
            rest = "─" if filled and index == 0 and wide > len(text) else " "
            label = text if len(text) <= wide else ""
            # the last column of a filled box stays empty where it can, so that two boxes never touch
            body = (label + rest * max(0, wide - len(label) - 1)).ljust(wide) if filled else label.ljust(wide)
            for at, char in enumerate(body[:wide]):
                lines[index][left + at] = (char, paint)
    return tuple(lines)


def _dithered(row: list[_BusyTime], columns: int, scale: float, chunks: int) -> PaintedLine:
    """Return one letter per column: of the kinds in it, the one whose letters so far lag most behind its time."""
    inside: list[dict[Paint, float]] = [defaultdict(float) for _ in range(columns)]
    for start, end, action, chunk in row:
        low, high = start * scale, min(end * scale, float(columns))
        at = int(low)
        while at < high and at < columns:
            inside[at][Paint(action.kind, chunk, chunks)] += min(high, at + 1) - max(low, at)
            at += 1
    owed: dict[str, float] = defaultdict(float)
    line: PaintedLine = []
    for times in inside:
        times[IDLE_PAINT] = max(0.0, 1 - sum(times.values()))
        for paint, time in times.items():
            owed[paint.kind] += time
        paint_of_cell = max((p for p, time in times.items() if time > 1e-9), key=lambda p: (owed[p.kind], times[p]))
        owed[paint_of_cell.kind] -= 1
        line.append((paint_of_cell.kind or "·", paint_of_cell))
    return line
