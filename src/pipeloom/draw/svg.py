"""Timelines as SVG: rows of ranks and their queues, colour by action, lightness by chunk, idle hatched; no script, no other file.

`png` turns an SVG into a PNG, with resvg (the extra `png`).
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from pipeloom.draw import palette
from pipeloom.draw.boxes import EntryBox, boxes, byte_curves, nice_step, queue_names, talk
from pipeloom.draw.figures import assumptions, heading, label_words, number, time_unit
from pipeloom.errors import UsageError, missing_packages, printable
from pipeloom.schedule import Timeline
from pipeloom.schedule.actions import COMPUTE, kind_of, kinds
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.timeline import CAUSES, Cause, plain, timelines_of

ROW, QUEUE_ROW, CURVE_ROW, GAP = 30.0, 15.0, 26.0, 5.0
SHEET_MARGIN, LEAST_LEFT, LEAST_IDLE, PEAK_RIGHT = 16.0, 66.0, 50.0, 54.0
LINE, AXIS, BETWEEN, LEGEND_LINE = 17.0, 30.0, 22.0, 22.0
DIGIT = 0.6  # width of a digit, in font sizes
BOLD = 1.12  # width of the bold heading, in widths of plain text
USUAL_WIDTH, LEAST_WIDTH = 960, 420
MOST_TOOLTIPS = 4000


@dataclass
class Sheet:
    """The elements of a document drawn so far; `width` is that of the document, in pixels."""

    width: float
    out: list[str] = field(default_factory=list, kw_only=True)

    def text(self, x: float, y: float, content: str, style: str = "") -> None:
        name = f' class="{style}"' if style else ""
        self.out.append(f'<text x="{_n(x)}" y="{_n(y)}"{name}>{escape(printable(content))}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self.out.append(f'<rect {shape} fill="{fill}"/>')

    def flow(self, widths: Sequence[float], y: float, line: float) -> Iterator[tuple[float, float]]:
        """Yield the place of each entry of a legend that begins at height `y`, with lines `line` high."""
        x = SHEET_MARGIN
        for width in widths:
            if x > SHEET_MARGIN and x + width > self.width - SHEET_MARGIN:
                x, y = SHEET_MARGIN, y + line
            yield x, y
            x += width + 14


@dataclass
class _TimelineSheet(Sheet):
    """A sheet with timelines, the colours in use, and the settings that all timelines share.

    Attributes:
        left: where time 0 is.
        scale: pixels per unit of time.
        unit: (factor, name) of the times that are written.
        idle_room: pixels between the end of a row and the right end of its idle time.
        limit: bytes of a device, or None.
    """

    left: float
    scale: float
    unit: tuple[float, str]
    idle_room: float
    classes: dict[str, str] = field(default_factory=dict)
    causes: set[Cause] = field(default_factory=set)
    numbered: bool = False
    limit: float | None = None

    def fill(self, color: str) -> str:
        """The class of boxes filled with `color`."""
        return self.classes.setdefault(color, f"c{len(self.classes)}")

    def idle(self, x: float, y: float, width: float, height: float, cause: Cause) -> None:
        self.causes.add(cause)
        self.box(x, y, width, height, f"url(#{_pattern(cause)})")

    def time(self, value: float) -> str:
        """A time in the unit of the sheet, without its name."""
        return number(plain(value * self.unit[0]))


def svg(
    timelines: Timeline | Sequence[Timeline],
    width: float = USUAL_WIDTH,
    tooltips: bool = True,
    below: Callable[[float], str] | None = None,
    limit: float | None = None,
) -> str:
    """An SVG document of `width` pixels: the timelines under one another, on one scale of time, so that they compare.

    A box holds its micro-batch where there is room; a pair has its forward above and its backward below. Every queue beside
    computation has a lane under the rank's row, and every pool whose bytes the costs give has a curve under the lanes. Idle is
    hatched by its cause. Idle and the peak of activations are written at the right of each rank. With `tooltips` each box shows
    its action, times and phase under the pointer (left out above `MOST_TOOLTIPS` boxes).

    Args:
        below: width -> another SVG document to draw below the timelines, such as a pair's segments.
        limit: bytes of a device, drawn as a dashed line over the curves.

    Raises:
        UsageError: no timeline, or a width below `LEAST_WIDTH`.
    """
    panels = timelines_of(timelines)
    if not panels:
        raise UsageError("svg needs at least one timeline")
    if not width >= LEAST_WIDTH:
        raise UsageError(f"an SVG is at least {LEAST_WIDTH} pixels wide, not {width:g}")
    longest = max(timeline.makespan for timeline in panels) or 1.0
    ranks = max(timeline.schedule.ranks for timeline in panels)
    names = [f"rank {ranks - 1}", *(name for t in panels for name in (*queue_names(t), *byte_curves(t)))]
    left = max(LEAST_LEFT, *(26 + text_width(name, 12) for name in names))
    unit = time_unit(panels)
    idle = [number(plain(value * unit[0])) for timeline in panels for value in timeline.idle]
    idle_room = max(LEAST_IDLE, *(text_width(words, 11.5) + 6 for words in idle))
    sheet = _TimelineSheet(width, left, (width - left - idle_room - PEAK_RIGHT) / longest, unit, idle_room, limit=limit)
    top = 0.0
    for timeline in panels:
        top = (
            _panel(sheet, timeline, top, tooltips and sum(t.schedule.actions for t in panels) <= MOST_TOOLTIPS)
            + BETWEEN
        )
    height = _legend(sheet, panels, top - BETWEEN / 2) + 10
    if below is not None and (other := below(width)):
        sheet.out.append(other.replace("<svg ", f'<svg y="{_n(height)}" ', 1))
        height += float(other.split('height="', 1)[1].split('"')[0])
    title = "; ".join(heading(timeline) for timeline in panels)
    return svg_document((width, height), title, svg_style(sheet.classes), sheet.out, _hatches(sheet))


def svg_document(
    size: tuple[float, float], title: str, style: str, elements: Sequence[str], definitions: str = ""
) -> str:
    """Return an SVG document of `size` (width, height) on paper, with the text style of all drawings and `style`."""
    width, height = map(_n, size)
    words = escape(printable(title))
    text_style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px;"
        f"fill:{palette.INK};font-variant-numeric:tabular-nums}}.h{{font-size:15px;font-weight:600}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{words.replace(chr(34), "&quot;")}">\n'
        f"<title>{words}</title>\n<style>{text_style}{style}</style>\n<defs>{definitions}</defs>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{palette.PAPER}"/>\n' + "\n".join(elements) + "\n</svg>\n"
    )


def text_width(text: str, size: float) -> float:
    """The width of `text` in DejaVu Sans, the widest of the usual system fonts, or a little more."""
    return size * sum(map(_advance, text))


def _advance(char: str) -> float:
    if char in " .,:;|'!()[]ijlIt·/":
        return 0.40
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 1.0 if char in "mwMW%@—" else 0.78 if char.isupper() or char in "+=<>Σ−" else 0.645


def wrapped(text: str, size: float, room: float) -> list[str]:
    """`text` as lines of at most `room` pixels, broken at spaces; a longer word is cut."""
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if text_width(joined, size) <= room:
            line = joined
            continue
        lines += [line] if line else []
        while text_width(word, size) > room and len(word) > 1:
            cut = next(n for n in range(len(word), 0, -1) if n == 1 or text_width(word[:n], size) <= room)
            lines.append(word[:cut])
            word = word[cut:]
        line = word
    return [*lines, line]


_LINES = {
    "dependency": "M-1 9L9 -1M-1 1L1 -1M7 9L9 7",
    "message": "M4 0V8",
    "memory": "M-1 9L9 -1M-1 -1L9 9",
    "end of step": "",
    "overhead": "M0 4H8",
}


def _pattern(cause: Cause) -> str:
    return f"idle-{cause.replace(' ', '-')}"


def _hatches(sheet: _TimelineSheet) -> str:
    """The patterns of idle time: the direction of their lines shows the cause."""
    return "".join(
        f'<pattern id="{_pattern(cause)}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{palette.IDLE_COLOUR}"/>'
        f'<path d="{_LINES[cause]}" stroke="{palette.IDLE_LINE}"/></pattern>'
        for cause in CAUSES
        if cause in sheet.causes
    )


def svg_style(classes: Mapping[str, str] | None = None) -> str:
    """Return the rules of a document's texts and boxes; `classes`: colour -> the class of boxes of that colour."""
    rules = [
        f".f{{fill:{palette.FAINT_INK};font-size:11.5px}}",
        ".r,.e{text-anchor:end}.m{text-anchor:middle}.e{font-size:11.5px}",
        ".n text{text-anchor:middle;font-size:inherit}",
        f".b rect{{stroke:{palette.PAPER}}}",
        "text.w{fill:#ffffff}text.k{fill:#000000}",
        *(f".{name}{{fill:{color}}}" for color, name in (classes or {}).items()),
    ]
    return "".join(rules)


def _panel(sheet: _TimelineSheet, timeline: Timeline, top: float, tooltips: bool) -> float:
    """Draw one timeline from `top` on; return where it ends."""
    left, scale, room = sheet.left, sheet.scale, sheet.width - 2 * SHEET_MARGIN
    right = left + timeline.makespan * scale
    y = top + 8
    for style, size, content in (("h", BOLD * 15, heading(timeline)), ("f", 11.5, _facts(sheet, timeline))):
        for line in wrapped(content, size, room):
            y += LINE + (style == "h")
            sheet.text(SHEET_MARGIN, y, line, style)
    columns = (right + sheet.idle_room, right + sheet.idle_room + 46)
    y += LINE
    for x, word in zip(columns, ("idle", "peak"), strict=True):
        sheet.text(x, y, word, "f e")
    y += 5
    rows, names, pools = boxes(timeline), queue_names(timeline), byte_curves(timeline)
    times = [box.end - box.start for row in rows for box in row if box.queue == COMPUTE]
    widths = sorted(time * scale for time in times if time > 0)
    typical_width = widths[len(widths) // 10] if widths else 0.0
    size = _number_size(typical_width, timeline.schedule.unit_names[-1])
    edge = min(0.8, 0.12 * typical_width)
    origin = timeline.begin
    for rank, row in enumerate(rows):
        sheet.text(left - 10, y + ROW / 2 + 4, f"rank {rank}", "r")
        for gap in timeline.gaps[rank]:
            sheet.idle(left + (gap.start - origin) * scale, y, (gap.end - gap.start) * scale, ROW, gap.cause)
        _boxes(sheet, [box for box in row if box.queue == COMPUTE], timeline, y, (edge, size, tooltips))
        sheet.text(columns[0], y + ROW / 2 + 4, sheet.time(timeline.idle[rank]), "e")
        sheet.text(columns[1], y + ROW / 2 + 4, str(timeline.peak_activations[rank]), "e")
        y += ROW
        for name in names[1:]:
            y += 2
            sheet.text(left - 10, y + QUEUE_ROW / 2 + 4, name, "f r")
            sheet.box(left, y, right - left, QUEUE_ROW, palette.IDLE_COLOUR)
            lane = [box for box in row if box.queue == name]
            _boxes(sheet, lane, timeline, y, (edge, min(size, 10.0), tooltips))
            y += QUEUE_ROW
        for pool, curves in pools.items():
            _curve(sheet, timeline, pool, curves[rank], y + 2)
            sheet.text(columns[1], y + CURVE_ROW - 4, size_words(timeline.peak_bytes[pool][rank]), "f e")
            y += 2 + CURVE_ROW
        y += GAP
    _axis(sheet, timeline, y)
    return y + AXIS


def _facts(sheet: _TimelineSheet, timeline: Timeline) -> str:
    # Of a run, whose times have a unit, the rate alone: a schedule's ratio beside it would be read as the rate of another.
    unit = f" {sheet.unit[1]}" if sheet.unit[1] else f" · bubble ratio {timeline.bubble_ratio:.4f} (idle / busy)"
    return (
        f"{assumptions(timeline, sheet.unit)} · makespan {sheet.time(timeline.makespan)}{unit} · bubble rate "
        f"{timeline.bubble_rate:.4f} (idle / p·makespan)"
    )


def _boxes(
    sheet: _TimelineSheet, row: Sequence[EntryBox], timeline: Timeline, y: float, style: tuple[float, float, bool]
) -> None:
    """Draw the boxes of a queue from `y` on; `style`: width of their edges, font size of their numbers (0: none), tooltips."""
    edge, size, tooltips = style
    sheet.out.append(f'<g class="b" stroke-width="{_n(edge)}">')
    for box in row:
        _box(sheet, box, timeline, y, tooltips)
    sheet.out.append("</g>")
    if _foot(timeline) and any(box.queue == COMPUTE for box in row):
        sheet.out.append('<g class="t">')
        for box in row:
            _talk(sheet, box, timeline, y)
        sheet.out.append("</g>")
    if size:
        sheet.numbered = True
        sheet.out.append(f'<g class="n" font-size="{_n(size)}">')
        for box in row:
            _numbers(sheet, box, timeline, y, size)
        sheet.out.append("</g>")


def _curve(
    sheet: _TimelineSheet, timeline: Timeline, pool: str, curve: Sequence[tuple[float, float]], y: float
) -> None:
    """Draw the bytes in a pool of one rank, from 0 to the most of any rank or the limit, and the limit where it is a device."""
    limit = sheet.limit if pool == DEVICE else None
    scale = (CURVE_ROW - 2) / max(*timeline.peak_bytes[pool], limit or 0.0)
    right, foot = sheet.left + timeline.makespan * sheet.scale, y + CURVE_ROW
    steps = "".join(f"H{_n(sheet.left + time * sheet.scale)}V{_n(foot - level * scale)}" for time, level in curve)
    sheet.text(sheet.left - 10, foot - 8, pool, "f r")
    sheet.out.append(
        f'<path d="M{_n(sheet.left)} {_n(foot)}{steps}H{_n(right)}V{_n(foot)}Z" fill="{palette.CURVE_COLOUR}" '
        f'stroke="{palette.FAINT_INK}" stroke-width=".6"/>'
    )
    if limit:
        line = f'd="M{_n(sheet.left)} {_n(foot - limit * scale)}H{_n(right)}" stroke="{palette.LIMIT_COLOUR}"'
        sheet.out.append(f'<path class="limit" {line} stroke-dasharray="5 3"/>')


def _halves(box: EntryBox, timeline: Timeline, y: float) -> list[tuple[float, float]]:
    """(y, height) of each of the box's actions: one over the other in a pair."""
    part = (ROW - _foot(timeline) if box.queue == COMPUTE else QUEUE_ROW) / len(box.actions)
    return [(y + index * part, part) for index in range(len(box.actions))]


def _box(sheet: _TimelineSheet, box: EntryBox, timeline: Timeline, y: float, tooltips: bool) -> None:
    x, wide = sheet.left + box.start * sheet.scale, (box.end - box.start) * sheet.scale
    if wide <= 0:
        return
    words = ""
    if tooltips:
        what = " with ".join(action.words for action in box.actions)
        words = f"<title>{what}, {sheet.time(box.start)} to {sheet.time(box.end)}, {box.phase}</title>"
    for (top, high), action, chunk in zip(_halves(box, timeline, y), box.actions, box.chunks, strict=True):
        name = sheet.fill(palette.color(action.kind, chunk, timeline.schedule.chunks))
        shape = f'<rect class="{name}" x="{_n(x)}" y="{_n(top)}" width="{_n(wide)}" height="{_n(high)}"'
        sheet.out.append(f"{shape}>{words}</rect>" if words else f"{shape}/>")


FOOT = 6.0  # height of the row with a box's all-to-all


def _foot(timeline: Timeline) -> float:
    """The height that boxes leave for their all-to-all: 0 where no stage declares any."""
    shares = timeline.costs.per_stage("all_to_all", timeline.schedule.stages)
    return FOOT if any(shares) else 0.0


def _talk(sheet: _TimelineSheet, box: EntryBox, timeline: Timeline, y: float) -> None:
    """Draw the box's all-to-all in a row at its foot, for as long as the links are busy, the forward's first."""
    x, wide = sheet.left + box.start * sheet.scale, (box.end - box.start) * sheet.scale
    top = y + ROW - FOOT
    sheet.out.append(f'<rect x="{_n(x)}" y="{_n(top)}" width="{_n(wide)}" height="{_n(FOOT)}" fill="{palette.PAPER}"/>')
    chunk_of = dict(zip(box.actions, box.chunks, strict=True))
    for action, share in talk(timeline, box):
        name = sheet.fill(palette.color(action.kind, chunk_of[action], timeline.schedule.chunks))
        shape = f'x="{_n(x)}" y="{_n(top + 1)}" width="{_n(share * wide)}" height="{_n(FOOT - 1)}"'
        sheet.out.append(f'<rect class="{name}" {shape}/>')
        x += share * wide


def _number_size(typical_width: float, longest: str) -> float:
    """The font size at which boxes `typical_width` wide hold the longest label; 0 if that is too small."""
    size = min(12.0, (typical_width - 1) / (DIGIT * len(longest)))
    return size if size >= 5.5 else 0.0


def _numbers(sheet: _TimelineSheet, box: EntryBox, timeline: Timeline, y: float, size: float) -> None:
    wide = (box.end - box.start) * sheet.scale
    x = sheet.left + (box.start + box.end) / 2 * sheet.scale
    for (top, high), action, chunk in zip(_halves(box, timeline, y), box.actions, box.chunks, strict=True):
        content = action.unit
        if wide >= len(content) * DIGIT * size and not kind_of(action.kind).of_stage:
            ink = palette.ink_on(palette.color(action.kind, chunk, timeline.schedule.chunks))
            baseline = top + high / 2 + 0.36 * size
            sheet.out.append(
                f'<text class="{"w" if ink == "#ffffff" else "k"}" x="{_n(x)}" y="{_n(baseline)}">{content}</text>'
            )


def _axis(sheet: _TimelineSheet, timeline: Timeline, y: float) -> None:
    factor, unit = sheet.unit
    span = timeline.makespan * factor
    step = nice_step(span, max(1, int(timeline.makespan * sheet.scale / 70)))
    for count in range(int(span / step * (1 + 1e-9)) + 1):
        x = sheet.left + count * step / factor * sheet.scale
        sheet.out.append(f'<path d="M{_n(x)} {_n(y - 3)}v6" stroke="{palette.FAINT_INK}"/>')
        sheet.text(x, y + 16, number(count * step), "f m")
    sheet.text(sheet.left - 10, y + 16, f"time, {unit}" if unit else "time", "f r")


def _legend(sheet: _TimelineSheet, timelines: Sequence[Timeline], y: float) -> float:
    """Draw a swatch for each action, from the first chunk to the last, one for each cause of idle, and notes; return its end."""
    chunks = max(timeline.schedule.chunks for timeline in timelines)
    letters = {action.kind for t in timelines for row in boxes(t) for box in row for action in box.actions}
    entries: list[tuple[list[str], str]] = []
    for kind in (kind for kind in kinds() if kind.letter in letters):
        classes = [sheet.fill(palette.color(kind.letter, chunk, chunks)) for chunk in range(chunks)]
        entries.append(([f'class="{name}"' for name in classes], f"{kind.letter} {kind.words}"))
    for cause in (cause for cause in CAUSES if cause in sheet.causes):
        entries.append(([f'fill="url(#{_pattern(cause)})"'], f"idle: {cause}"))
    notes = ["chunk 0 is the darkest"] if chunks > 1 else []
    if sheet.numbered:
        notes += [f"numbers: {words}" for words in dict.fromkeys(label_words(each.schedule) for each in timelines)]
    notes += ["foot of a box: its all-to-all"] if any(map(_foot, timelines)) else []
    if pools := sorted({pool for t in timelines for pool in byte_curves(t)}):
        dashed = f", dashed: the limit {size_words(sheet.limit)}" if sheet.limit else ""
        notes.append(f"under a rank: bytes in {' and '.join(pools)}, the peak at the right{dashed}")
    entries += [([], note) for note in notes]
    before = [17 * len(swatches) + 5 * bool(swatches) for swatches, _ in entries]
    widths = [room + text_width(words, 12) for room, (_, words) in zip(before, entries, strict=True)]
    places = sheet.flow(widths, y, LEGEND_LINE)
    for (x, y), room, (swatches, words) in zip(places, before, entries, strict=True):
        for at, swatch in enumerate(swatches):
            sheet.out.append(f'<rect {swatch} x="{_n(x + 17 * at)}" y="{_n(y)}" width="16" height="16"/>')
        sheet.text(x + room, y + 12.5, words, "" if swatches else "f")
    return y + LEGEND_LINE


def _n(value: float) -> str:
    """A coordinate, to a hundredth of a pixel, without needless zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def png(document: str, zoom: float = 2.0) -> bytes:
    """The picture of an SVG document, with `zoom` pixels per pixel of the document; raises UsageError without the extra `png`."""
    require_png()
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=document, zoom=zoom))


def require_png() -> None:
    """Raise UsageError without the extra `png`."""
    if importlib.util.find_spec("resvg_py") is None:
        raise missing_packages("a PNG", ["resvg-py"], "png")
