"""Drawings of a timeline: in the terminal, as SVG, as a trace for Perfetto. Needs no torch."""

from pipeloom.draw.figures import figures
from pipeloom.draw.svg import svg
from pipeloom.draw.terminal import terminal
from pipeloom.draw.trace import trace

__all__ = ["figures", "svg", "terminal", "trace"]
