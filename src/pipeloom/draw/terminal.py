"""A timeline in a terminal: one band per rank, to scale, readable with colour and without."""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipeloom.draw import palette
from pipeloom.draw.boxes import EntryBox, boxes, byte_curves, nice_step, queue_names, segments
from pipeloom.draw.figures import (
    FIGURE_WORDS,
    assumptions,
    figures,
    full_rank,
    heading,
    in_blocks,
    label_words,
    message_words,
    number,
    time_unit,
)
from pipeloom.schedule import Action, Timeline
from pipeloom.schedule.actions import COMPUTE, kinds
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.timeline import plain, timelines_of

if TYPE_CHECKING:
    from rich.text import Text


class Paint(NamedTuple):
    """Colour of a character; kind "" is idle."""

    kind: str
    chunk: int
    chunks: int


IDLE_PAINT = Paint("", 0, 1)
LEVELS = "▁▂▃▄▅▆▇█"
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
        lanes: rank -> (name, line) of each queue beside computation, then of each pool of bytes.
    """

    bands: tuple[tuple[PaintedLine, ...], ...]
    columns: int
    scale: float
    makespan: float
    rows: int
    dithered: bool
    kinds: frozenset[str]
    lanes: tuple[tuple[tuple[str, PaintedLine], ...], ...]

    @property
    def gap(self) -> bool:
        """Return whether an empty line belongs between two bands: where they have more than one line."""
        return self.rows > 1 or any(self.lanes)


def terminal(timeline: Timeline, width: int = 80, color: bool | None = None, bound: bool = True) -> str:
    """The drawing, the legend and the figures as text of at most `width` columns.

    A rank's band is to scale. Boxes with room hold the letter and the micro-batch ("F3"); narrower ones the letter,
    with the micro-batch below, its digits under one another if need be. Where columns cover more time than actions, each
    holds one letter, so chosen that the letters are in proportion to the times. Below a band are a line for each queue beside
    computation, and one for each pool of bytes, whose blocks are as high as the most bytes meanwhile.

    Args:
        color: None colours only when standard output is a terminal and NO_COLOR is not set.
        bound: whether to print the lower bound of all schedules on this placement; a search prints a sharper one.
    """
    from rich.console import Console
    from rich.text import Text

    timelines_of(timeline)
    colored = _wants_color() if color is None else color
    names = [f"rank {timeline.schedule.ranks - 1}", *queue_names(timeline)[1:], *byte_curves(timeline)]
    label = max(map(len, names)) + 2
    picture = grid(timeline, max(width, label + 12) - label, filled=not colored)
    text = Text()
    text.append(textwrap.fill(heading(timeline), max(width, 20)), style="bold")
    text.append(f"\n{textwrap.fill(assumptions(timeline), max(width, 20))}\n\n")
    for rank, lines in enumerate(picture.bands):
        heads = [f"rank {rank}", *[""] * (len(lines) - 1)]
        for head, line in (*zip(heads, lines, strict=True), *picture.lanes[rank]):
            text.append(f"{head:<{label}}")
            for paint, run in groupby(line, key=lambda cell: cell[1]):
                text.append("".join(char for char, _ in run), style=_style(paint))
            text.append("\n")
        if picture.gap:
            text.append("\n")
    unit = time_unit([timeline])
    text.append(" " * label + _ruler(picture, unit[0]) + "\n\n")
    _legend(text, timeline, picture, colored, width)
    text.append("\n\n" + _figures(timeline, width, bound))
    if not colored:
        return "\n".join(line.rstrip() for line in text.plain.splitlines()) + "\n"
    console = Console(file=io.StringIO(), force_terminal=True, color_system=_color_system(), width=max(width, 20))
    with console.capture() as capture:
        console.print(text, soft_wrap=True, highlight=False)
    return capture.get()


def _wants_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _color_system() -> Literal["truecolor", "256"]:
    """Return Rich's name of the terminal's colours: 256 unless COLORTERM announces more."""
    return "truecolor" if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit") else "256"


def _style(paint: Paint) -> str:
    if paint.kind == IDLE_PAINT.kind:
        return "bright_black"
    background = palette.color(paint.kind, paint.chunk, paint.chunks)
    return f"{palette.ink_on(background)} on {background}"


def _ruler(picture: Grid, factor: float) -> str:
    """Return the line of times under their columns; `factor` converts times of the timeline to the unit that is printed."""
    step = nice_step(picture.makespan * factor, max(1, picture.columns // 9)) / factor
    out = ""
    at = 0.0
    while at <= picture.makespan * (1 + 1e-9):
        column = round(at * picture.scale)
        mark = f"|{number(plain(at * factor))}"
        if column >= len(out) and column + len(mark) <= picture.columns:
            out = out.ljust(column) + mark
        at += step
    return out


def _legend(text: Text, timeline: Timeline, picture: Grid, colored: bool, width: int) -> None:
    chunks, at = timeline.schedule.chunks, 0
    for kind in (kind for kind in kinds() if kind.letter in picture.kinds):
        at += (size := len(kind.letter) + len(kind.words) + 3 + chunks * colored)
        if size < at > width:
            text.append("\n")
            at = size
        if colored:
            for chunk in range(chunks):
                text.append(f" {kind.letter} " if chunk == 0 else " ", style=_style(Paint(kind.letter, chunk, chunks)))
            text.append(f" {kind.words} ")
        else:
            text.append(f"{kind.letter} {kind.words}  ")
    text.append("· idle")
    if picture.dithered:
        factor, unit = time_unit([timeline])
        column = f"{number(factor / picture.scale)} {unit or 'units of time'}"
        notes = [f"one column is {column}: letters in proportion, no micro-batches"]
    else:
        notes = [f"numbers: {label_words(timeline.schedule)}" + (", digits downwards" if picture.rows > 2 else "")]
    if timeline.schedule.has_pairs:
        notes.append("a pair F|B is drawn as its F, then its backward")
    if colored and chunks > 1:
        notes.append("chunk 0 is the darkest")
    text.append("\n" + "\n".join(notes), style="bright_black")


def _figures(timeline: Timeline, width: int, bound: bool) -> str:
    values = figures(timeline)
    factor, unit = time_unit([timeline])

    def time(value: float) -> str:
        return number(plain(value * factor))

    lines = [f"makespan          {time(values['makespan'])}{f' {unit}' if unit else ''}"]
    if timeline.source == "simulated" and bound:
        lines[0] += f"   lower bound {number(values['lower_bound'])}, gap {100 * values['gap']:.1f} %"
    for key, words in FIGURE_WORDS.items():
        if key == "bubble_rate" or timeline.source == "simulated":
            value = number(values[key]) if key == "period" else f"{values[key]:.4f}"
            lines.append(f"{key.replace('_', ' '):<17} {value}  {words}")
    sent = values["messages"]
    if sent["count"]:
        most = max(channel["count"] for channel in sent["channels"])
        lines.append(f"messages          {message_words(sent)}, at most {most} on a channel")
    full = full_rank(timeline.schedule)
    memory = values["peak_memory"] if values["peak_memory"] != values["peak_activations"] else None
    columns = ["rank", "busy", "idle", "warm-up", "steady", "cool-down", "peak activations"]
    rows = []
    for rank, idle in enumerate(timeline.idle_by_phase):
        peak = values["peak_activations"][rank]
        activations = str(peak) if full == 1 else f"{peak} = {number(peak * full)} full-rank"
        times = (values["busy"][rank], values["idle"][rank], idle.warmup, idle.steady, idle.cooldown)
        rows.append([str(rank), *map(time, times), activations])
        if memory is not None:
            rows[-1].append(number(memory[rank]))
    if memory is not None:
        columns.append("peak memory")
    for pool, peaks in timeline.peak_bytes.items():
        columns.append(f"bytes in {pool}")
        rows = [[*row, size_words(peak)] for row, peak in zip(rows, peaks, strict=True)]
    return "\n".join([*lines, "", *(line[:width] for line in in_blocks([columns, *rows], width, left=0))])


# -- the grid: each rank's boxes on columns ---------------------------------------------------------------------------------


def grid(timeline: Timeline, columns: int, filled: bool) -> Grid:
    """`timeline` on at most `columns` columns.

    Args:
        filled: whether the rest of a box is filled with a line, which shows its length where there are no colours.
    """
    rows = boxes(timeline)
    ranks = [_busy_times(row, COMPUTE) for row in rows]
    makespan = timeline.makespan
    scale = _scale(ranks, makespan, columns)
    used = max(1, round(makespan * scale))
    widths = sorted(round(end * scale) - round(start * scale) for row in ranks for start, end, _, _ in row)
    typical_width = widths[len(widths) // 10] if widths else 1
    digits = len(timeline.schedule.unit_names[-1])
    chunks = timeline.schedule.chunks
    kinds = frozenset(action.kind for row in rows for box in row for action in box.actions)
    lanes = tuple(
        (
            *((queue, _dithered(_busy_times(row, queue), used, scale, chunks)) for queue in queue_names(timeline)[1:]),
            *((pool, _heights(curves[rank], used, scale)) for pool, curves in byte_curves(timeline).items()),
        )
        for rank, row in enumerate(rows)
    )
    if typical_width < 1:
        dithered = tuple((_dithered(row, used, scale, chunks),) for row in ranks)
        return Grid(dithered, used, scale, makespan, 1, True, kinds, lanes)
    below = 0 if typical_width >= digits + 2 else 1 if typical_width >= digits + (digits > 1) else digits
    bands = tuple(_band(row, used, scale, chunks, below, filled) for row in ranks)
    return Grid(bands, used, scale, makespan, 1 + below, False, kinds, lanes)


def _busy_times(row: tuple[EntryBox, ...], queue: str) -> list[_BusyTime]:
    return [s for s in segments(tuple(box for box in row if box.queue == queue)) if s[1] > s[0]]


def _heights(curve: Sequence[tuple[float, float]], columns: int, scale: float) -> PaintedLine:
    """Return a block for each column, as high as the most bytes in it, of the most of the whole curve."""
    most = [0.0] * columns
    for at, (time, level) in enumerate(curve):
        until = curve[at + 1][0] * scale if at + 1 < len(curve) else columns
        for column in range(int(time * scale), min(columns, max(math.ceil(until), int(time * scale) + 1))):
            most[column] = max(most[column], level)
    top = max(most) or 1.0
    return [(LEVELS[min(7, int(8 * level / top))] if level else " ", IDLE_PAINT) for level in most]


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
                ticks = math.gcd(ticks, whole)
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
        head = f"{action.kind}{action.unit}" if below == 0 else action.kind
        texts = [head if len(head) <= wide else action.kind]
        if below == 1:
            texts.append(action.unit)
        elif below > 1:
            texts += f"{action.unit:>{below}}"
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
        line.append((paint_of_cell.kind[:1] or "·", paint_of_cell))
    return line
