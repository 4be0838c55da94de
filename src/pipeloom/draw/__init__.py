"""Drawings of a timeline: in the terminal, as SVG, as a page, as a trace for Perfetto. Needs no torch."""

from pipeloom.draw.figures import figures
from pipeloom.draw.html import SideBySide, html
from pipeloom.draw.segments import largest_gain, segment_lanes, segment_table
from pipeloom.draw.svg import LEAST_WIDTH, USUAL_WIDTH, svg
from pipeloom.draw.tables import Table, compare
from pipeloom.draw.terminal import terminal
from pipeloom.draw.trace import trace

__all__ = [
    "LEAST_WIDTH",
    "USUAL_WIDTH",
    "SideBySide",
    "Table",
    "compare",
    "figures",
    "html",
    "largest_gain",
    "segment_lanes",
    "segment_table",
    "svg",
    "terminal",
    "trace",
]


def __dir__() -> list[str]:
    return __all__
