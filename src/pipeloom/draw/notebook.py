"""Notebook representations of schedules, timelines and search results: the page in a frame, or an SVG without frames."""

from __future__ import annotations

from html import escape

from pipeloom.draw.figures import heading, number
from pipeloom.draw.html import html
from pipeloom.draw.svg import svg
from pipeloom.errors import PipeloomError
from pipeloom.schedule import Schedule, Timeline, simulate

MOST_BOXES = 4000  # of an SVG in a notebook: 0.5 MB
MOST_ACTIONS = 100_000  # of a page in a notebook: 5 MB


def svg_of(subject: Schedule | Timeline) -> str | None:
    """The drawing (of a schedule: with unit costs); None where it is too large or the schedule cannot run."""
    timeline = _timeline(subject)
    if not isinstance(timeline, Timeline) or timeline.schedule.actions > MOST_BOXES:
        return None
    return svg(timeline)


def html_of(subject: Schedule | Timeline) -> str | None:
    """The page in a sandboxed frame; the reason where a schedule cannot run; None where it is too large.

    The text inside the iframe element is shown by viewers that remove frames.
    """
    timeline = _timeline(subject)
    if not isinstance(timeline, Timeline):
        return f"<pre>{escape(repr(subject))}\n{escape(str(timeline))}</pre>"
    if timeline.schedule.actions > MOST_ACTIONS:
        return None
    height = min(900, 300 + 85 * timeline.schedule.ranks)
    words = escape(f"{heading(timeline)}: makespan {number(timeline.makespan)}")
    return (
        f'<iframe sandbox="allow-scripts allow-downloads allow-modals" srcdoc="{escape(html(timeline))}" '
        f'style="width:100%;height:{height}px;border:0" title="{words}">{words}</iframe>'
    )


def _timeline(subject: Schedule | Timeline) -> Timeline | PipeloomError:
    if isinstance(subject, Timeline):
        return subject
    try:
        return simulate(subject)
    except PipeloomError as error:
        return error
