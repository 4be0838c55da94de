"""Timelines as SVG: rows of ranks, colour by action, lightness by chunk, idle hatched; no script, no outside file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from pipeloom.draw import palette
from pipeloom.draw.boxes import Box, boxes, nice_step
from pipeloom.draw.figures import cost_words, heading, number
from pipeloom.schedule import Timeline
from pipeloom.schedule.actions import KIND_WORDS, KINDS

ROW, GAP = 30.0, 5.0
LEFT, RIGHT = 66.0, 104.0
HEAD, AXIS, BETWEEN, LEGEND = 66.0, 30.0, 22.0, 40.0
DIGIT = 0.6  # width of a digit, in font sizes
MOST_TOOLTIPS = 4000


@dataclass
class _Sheet:
    """What is drawn so far, and the colours that it uses."""

    out: list[str] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    numbered: bool = False

    def fill(self, color: str) -> str:
        """The class of boxes filled with `color`."""
        return self.classes.setdefault(color, f"c{len(self.classes)}")

    def text(self, x: float, y: float, content: str, style: str = "") -> None:
        self.out.append(f'<text x="{_n(x)}" y="{_n(y)}"{_class(style)}>{escape(content)}</text>')


def svg(timelines: Timeline | Sequence[Timeline], width: float = 960, tooltips: bool = True) -> str:
    """An SVG document of `width` pixels: the timelines under one another, on one scale of time, so that they compare.

    A box holds its micro-batch where there is room; a pair has its forward above and its backward below. Idle and the
    peak of activations stand at the right of each rank. With `tooltips` a box says what it is when the pointer rests on
    it (left out above a few thousand boxes).
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not shown:
        raise ValueError("svg needs at least one timeline")
    longest = max(timeline.makespan for timeline in shown) or 1.0
    scale = (width - LEFT - RIGHT) / longest
    sheet = _Sheet()
    top = 0.0
    for timeline in shown:
        _panel(sheet, timeline, top, scale, tooltips and sum(t.schedule.actions for t in shown) <= MOST_TOOLTIPS)
        top += HEAD + timeline.schedule.ranks * (ROW + GAP) + AXIS + BETWEEN
    _legend(sheet, shown, top - BETWEEN / 2)
    height = top - BETWEEN / 2 + LEGEND
    names = escape("; ".join(heading(timeline) for timeline in shown))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" aria-label="{names.replace(chr(34), "&quot;")}">\n'
        f"<title>{names}</title>\n<style>{_style(sheet)}</style>\n{_HATCH}\n"
        f'<rect width="100%" height="100%" rx="8" fill="{palette.PAPER}"/>\n' + "\n".join(sheet.out) + "\n</svg>\n"
    )


_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{palette.IDLE}"/><rect width="1.2" height="6" fill="{palette.IDLE_LINE}"/>'
    "</pattern></defs>"
)


def _style(sheet: _Sheet) -> str:
    rules = [
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px;"
        f"fill:{palette.INK};font-variant-numeric:tabular-nums}}",
        ".h{font-size:15px;font-weight:600}",
        f".f{{fill:{palette.FAINT_INK};font-size:11.5px}}",
        ".r,.e{text-anchor:end}.m{text-anchor:middle}.e{font-size:11.5px}",
        ".n text{text-anchor:middle;font-size:inherit}",
        f".b rect{{stroke:{palette.PAPER}}}",
        ".n .w{fill:#ffffff}.n .k{fill:#000000}",
        *(f".{name}{{fill:{color}}}" for color, name in sheet.classes.items()),
    ]
    return "".join(rules)


def _panel(sheet: _Sheet, timeline: Timeline, top: float, scale: float, tooltips: bool) -> None:
    right = LEFT + timeline.makespan * scale
    sheet.text(16, top + 26, heading(timeline), "h")
    sheet.text(16, top + 45, _facts(timeline), "f")
    columns = (right + 50, right + 96)
    for x, word in zip(columns, ("idle", "peak"), strict=True):
        sheet.text(x, top + HEAD - 5, word, "f e")
    rows = boxes(timeline)
    widths = sorted((box.end - box.start) * scale for row in rows for box in row)
    usual = widths[len(widths) // 10] if widths else 0.0
    size = _number_size(usual, timeline.schedule.microbatches)
    edge = min(0.8, 0.12 * usual)
    for rank, row in enumerate(rows):
        y = top + HEAD + rank * (ROW + GAP)
        sheet.text(LEFT - 10, y + ROW / 2 + 4, f"rank {rank}", "r")
        sheet.out.append(
            f'<rect x="{_n(LEFT)}" y="{_n(y)}" width="{_n(right - LEFT)}" height="{_n(ROW)}" fill="url(#idle)"/>'
        )
        sheet.out.append(f'<g class="b" stroke-width="{_n(edge)}">')
        for box in row:
            _box(sheet, box, timeline, y, scale, tooltips)
        sheet.out.append("</g>")
        if size:
            sheet.numbered = True
            sheet.out.append(f'<g class="n" font-size="{_n(size)}">')
            for box in row:
                _numbers(sheet, box, timeline, y, scale, size)
            sheet.out.append("</g>")
        sheet.text(columns[0], y + ROW / 2 + 4, number(timeline.idle[rank], 3), "e")
        sheet.text(columns[1], y + ROW / 2 + 4, str(timeline.peak_activations[rank]), "e")
    _axis(sheet, timeline, top + HEAD + len(rows) * (ROW + GAP), scale)


def _facts(timeline: Timeline) -> str:
    return (
        f"{cost_words(timeline)} · makespan {number(timeline.makespan)} · bubble ratio {timeline.bubble_ratio:.4f} "
        f"(idle / busy) · bubble rate {timeline.bubble_rate:.4f} (idle / p·makespan)"
    )


def _halves(box: Box, y: float) -> list[tuple[float, float]]:
    """(y, height) of each of the box's actions: one over the other in a pair."""
    part = ROW / len(box.actions)
    return [(y + index * part, part) for index in range(len(box.actions))]


def _box(sheet: _Sheet, box: Box, timeline: Timeline, y: float, scale: float, tooltips: bool) -> None:
    x, wide = LEFT + box.start * scale, (box.end - box.start) * scale
    if wide <= 0:
        return
    words = ""
    if tooltips:
        what = " with ".join(action.words for action in box.actions)
        words = f"<title>{what}, {number(box.start)} to {number(box.end)}, {box.phase}</title>"
    for (top, high), action, chunk in zip(_halves(box, y), box.actions, box.chunks, strict=True):
        name = sheet.fill(palette.color(action.kind, chunk, timeline.schedule.chunks))
        shape = f'<rect class="{name}" x="{_n(x)}" y="{_n(top)}" width="{_n(wide)}" height="{_n(high)}"'
        sheet.out.append(f"{shape}>{words}</rect>" if words else f"{shape}/>")


def _number_size(usual: float, microbatches: int) -> float:
    """The font size at which boxes `usual` wide hold the longest micro-batch number; 0 if that is too small."""
    size = min(12.0, (usual - 1) / (DIGIT * len(str(microbatches - 1))))
    return size if size >= 5.5 else 0.0


def _numbers(sheet: _Sheet, box: Box, timeline: Timeline, y: float, scale: float, size: float) -> None:
    wide = (box.end - box.start) * scale
    x = LEFT + (box.start + box.end) / 2 * scale
    for (top, high), action, chunk in zip(_halves(box, y), box.actions, box.chunks, strict=True):
        content = str(action.microbatch)
        if wide >= len(content) * DIGIT * size:
            ink = palette.ink_on(palette.color(action.kind, chunk, timeline.schedule.chunks))
            baseline = top + high / 2 + 0.36 * size
            sheet.out.append(
                f'<text class="{"w" if ink == "#ffffff" else "k"}" x="{_n(x)}" y="{_n(baseline)}">{content}</text>'
            )


def _axis(sheet: _Sheet, timeline: Timeline, y: float, scale: float) -> None:
    step = nice_step(timeline.makespan, max(1, int(timeline.makespan * scale / 70)))
    for count in range(int(timeline.makespan / step * (1 + 1e-9)) + 1):
        x = LEFT + count * step * scale
        sheet.out.append(f'<path d="M{_n(x)} {_n(y - 3)}v6" stroke="{palette.FAINT_INK}"/>')
        sheet.text(x, y + 16, number(count * step), "f m")
    sheet.text(LEFT - 10, y + 16, "time", "f r")


def _legend(sheet: _Sheet, timelines: Sequence[Timeline], y: float) -> None:
    """A swatch for each action, from the first chunk to the last, and one for idle."""
    chunks = max(timeline.schedule.chunks for timeline in timelines)
    kinds = {action.kind for t in timelines for row in boxes(t) for box in row for action in box.actions}
    x = LEFT
    for kind in (kind for kind in KINDS if kind in kinds):
        for chunk in range(chunks):
            name = sheet.fill(palette.color(kind, chunk, chunks))
            sheet.out.append(f'<rect class="{name}" x="{_n(x)}" y="{_n(y)}" width="16" height="16"/>')
            x += 17
        x = _word(sheet, x, y, f"{kind} {KIND_WORDS[kind]}")
    sheet.out.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="16" height="16" fill="url(#idle)"/>')
    x = _word(sheet, x + 17, y, "idle")
    notes = (["chunk 0 is the darkest"] if chunks > 1 else []) + (["numbers: micro-batch"] if sheet.numbered else [])
    sheet.text(x, y + 12.5, " · ".join(notes), "f")


def _word(sheet: _Sheet, x: float, y: float, word: str) -> float:
    """Writes a legend's word at `x` and returns where the next entry starts."""
    sheet.text(x + 5, y + 12.5, word)
    return x + 5 + 6.3 * len(word) + 16


def _n(value: float) -> str:
    """A coordinate, to a hundredth of a pixel, without needless zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
