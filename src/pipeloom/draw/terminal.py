"""A timeline in a terminal: one band per rank, to scale, readable with colour and without."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Literal

from pipeloom.draw import palette
from pipeloom.draw.bands import IDLE_PAINT, Grid, Paint, grid
from pipeloom.draw.boxes import nice_step
from pipeloom.draw.figures import (
    BUBBLE_WORDS,
    assumptions,
    figures,
    full_rank,
    heading,
    message_words,
    number,
    plain,
    time_unit,
)
from pipeloom.schedule.actions import kinds

if TYPE_CHECKING:
    from rich.text import Text

    from pipeloom.schedule import Timeline


def terminal(timeline: Timeline, width: int = 80, color: bool | None = None) -> str:
    """The drawing, the legend and the figures as text of at most `width` columns.

    A rank's band is to scale. Boxes with room hold the letter and the micro-batch ("F3"); narrower ones the letter,
    with the micro-batch below, its digits under one another if need be. Where columns cover more time than actions, each
    holds one letter, so chosen that the letters are in proportion to the times.

    Args:
        color: None colours only when standard output is a terminal and NO_COLOR is not set.
    """
    from rich.console import Console
    from rich.text import Text

    colored = _wants_color() if color is None else color
    label = len(f"rank {timeline.schedule.ranks - 1}") + 2
    picture = grid(timeline, max(width, label + 12) - label, filled=not colored)
    text = Text()
    text.append(heading(timeline), style="bold")
    text.append(f"\n{textwrap.fill(assumptions(timeline), max(width, 20))}\n\n")
    for rank, lines in enumerate(picture.bands):
        for index, line in enumerate(lines):
            text.append(f"{f'rank {rank}' if index == 0 else '':<{label}}")
            _paint(text, line, colored)
        if picture.gap:
            text.append("\n")
    unit = time_unit([timeline])
    text.append(" " * label + _ruler(picture, unit[0]) + "\n\n")
    _legend(text, timeline, picture, colored)
    text.append("\n\n" + _figures(timeline, width))
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


def _paint(text: Text, line: list[tuple[str, Paint]], colored: bool) -> None:
    """Append one line of a band, each run of the same paint at once."""
    if not colored:
        text.append("".join(char for char, _ in line) + "\n")
        return
    run, paint = "", line[0][1] if line else IDLE_PAINT
    for char, this in line:
        if this != paint:
            text.append(run, style=_style(paint))
            run, paint = "", this
        run += char
    text.append(run, style=_style(paint))
    text.append("\n")


def _style(paint: Paint) -> str:
    if paint is IDLE_PAINT or paint.kind == IDLE_PAINT.kind:
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


def _legend(text: Text, timeline: Timeline, picture: Grid, colored: bool) -> None:
    chunks = timeline.schedule.chunks
    for kind in (kind for kind in kinds() if kind.letter in picture.kinds):
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
        notes = ["numbers: micro-batch" + (", digits downwards" if picture.rows > 2 else "")]
    if timeline.schedule.has_pairs:
        notes.append("a pair F|B is drawn as its F, then its backward")
    if colored and chunks > 1:
        notes.append("chunk 0 is the darkest")
    text.append("\n" + "\n".join(notes), style="bright_black" if colored else "")


def _figures(timeline: Timeline, width: int) -> str:
    values = figures(timeline)
    factor, unit = time_unit([timeline])

    def time(value: float) -> str:
        return number(plain(value * factor))

    lines = [f"makespan          {time(values['makespan'])}{f' {unit}' if unit else ''}"]
    if timeline.source == "simulated":
        lines[0] += (
            f"   lower bound {number(values['lower_bound'])}, gap {100 * values['gap']:.1f} %"
            f"   period {number(values['period'])}"
        )
    for key, words in BUBBLE_WORDS.items():
        lines.append(f"{key.replace('_', ' '):<17} {values[key]:.4f}  {words}")
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
    wide = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    table = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, wide, strict=True)) for row in [columns, *rows]]
    return "\n".join([*lines, "", *(line[:width] for line in table)])
