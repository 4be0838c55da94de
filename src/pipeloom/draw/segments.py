"""A pair's segments on their resources, before and after overlapping: lanes in the SVG and on the page, and a table."""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom.draw import palette
from pipeloom.draw.boxes import nice_step
from pipeloom.draw.figures import number
from pipeloom.draw.svg import LINE, SHEET_MARGIN, Sheet, svg_document, svg_style, text_width
from pipeloom.schedule.segments import LayerSequence, ScheduledSegment, length, run_block
from pipeloom.schedule.timeline import plain

LANE, LANE_LEFT, LANE_RIGHT = 24.0, 124.0, 24.0
WAYS = ("one after the other", "overlapped", "overlapped, dW apart")


def before_and_after(layers: LayerSequence) -> dict[str, tuple[ScheduledSegment, ...]]:
    """Return the segments of F of one micro-batch and B of another, both of a stage with these layers, in the three `WAYS`."""
    forward, backward = run_block(layers, ()), run_block((), layers, "fused")
    end = length(forward)
    later = [each._replace(start=each.start + end, end=each.end + end) for each in backward]
    return dict(
        zip(WAYS, ((*forward, *later), *(run_block(layers, layers, w) for w in ("fused", "split"))), strict=True)
    )


def segment_table(stages: Mapping[str, LayerSequence]) -> list[list[str]]:
    """Return a head and a row for each label: the times of a pair in the three `WAYS`."""
    times = {label: map(length, before_and_after(layers).values()) for label, layers in stages.items()}
    head = "all-to-all" if len(stages) > 1 else "segments"
    return [[head, *WAYS], *([label, *(number(plain(time)) for time in row)] for label, row in times.items())]


def largest_gain(stages: Mapping[str, LayerSequence]) -> LayerSequence:
    """Return the layers whose pair is shortest, in its best way, against its segments one after another."""

    def left(layers: LayerSequence) -> float:
        serial, *overlapped = map(length, before_and_after(layers).values())
        return min(overlapped) / (serial or 1.0)

    return min(stages.values(), key=left)


def segment_lanes(layers: LayerSequence, width: float) -> str:
    """Return an SVG document of `width` pixels with the lanes of a pair in the three `WAYS`, on one scale of time."""
    sheet, blocks = Sheet(width), before_and_after(layers)
    longest = max(map(length, blocks.values())) or 1.0
    scale = (width - LANE_LEFT - LANE_RIGHT) / longest
    resources = ("computation", "communication", "inside")[: 2 + any(layer.inside for layer in layers)]
    title = f"F of one micro-batch and B of another, {len(layers)} layer{'s' * (len(layers) > 1)}: segments on their resources"
    sheet.text(SHEET_MARGIN, 28, title, "h")
    y = 28.0
    for way, block in blocks.items():
        y += LINE + 8
        sheet.text(SHEET_MARGIN, y, f"{way}: {number(plain(length(block)))}")
        y += 6
        for resource in resources:
            sheet.text(LANE_LEFT - 8, y + LANE / 2 + 4, "inside a node" if resource == "inside" else resource, "r")
            sheet.box(LANE_LEFT, y, length(block) * scale, LANE, palette.IDLE_COLOUR)
            for each in (segment for segment in block if segment.resource == resource):
                kind = "I" if way == WAYS[2] and each.name[0] == "B" and resource == "computation" else each.name[0]
                colour, wide = palette.color(kind), (each.end - each.start) * scale
                sheet.box(LANE_LEFT + each.start * scale, y, wide, LANE, colour)
                words = next((w for w in (each.name, each.name[0]) if text_width(w, 11) < wide), "")
                ink = "w" if palette.ink_on(colour) == "#ffffff" else "k"
                sheet.text(LANE_LEFT + (each.start + each.end) / 2 * scale, y + LANE / 2 + 4, words, f"m {ink}")
            y += LANE + 2
    step = nice_step(longest, max(1, int(longest * scale / 70)))
    for count in range(int(longest / step * (1 + 1e-9)) + 1):
        sheet.text(LANE_LEFT + count * step * scale, y + 16, number(count * step), "f m")
    return svg_document((width, y + 30), title, svg_style(), sheet.out)
