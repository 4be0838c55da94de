"""Timelines as one self-contained page to zoom, trace waits, edit and export. No server, no request, no outside file.

Notebooks show schedules, timelines and search results as the page in a frame, or as an SVG where frames are removed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from typing import Any

from pipeloom.draw import palette
from pipeloom.draw.boxes import byte_curves, queue_names
from pipeloom.draw.figures import assumptions, full_rank, heading, messages, number, time_unit
from pipeloom.draw.svg import LEAST_WIDTH, svg
from pipeloom.errors import PipeloomError, printable
from pipeloom.schedule import Schedule, Timeline, lower_bound, simulate
from pipeloom.schedule.actions import COMPUTE, EVENTS, KEPT, MOST_KINDS, PENDING, SAVED, Kind, kind_of, kinds
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE, StageCosts
from pipeloom.schedule.json_form import to_dict
from pipeloom.schedule.model import actions_of
from pipeloom.schedule.timeline import CAUSES, timelines_of

PAGE_FORMAT = "pipeloom.page/1"
MOST_BOXES = 4000  # of an SVG in a notebook: 0.5 MB
MOST_ACTIONS = 100_000  # of a page in a notebook: 5 MB


def html(
    timelines: Timeline | Sequence[Timeline],
    title: str | None = None,
    below: str = "",
    bound: float | None = None,
    limit: float | None = None,
    rows: Sequence[Timeline] = (),
) -> str:
    """A page with the timelines under one another on one axis of time; a browser opens it from disk, offline.

    The page contains everything: the data as columns, and the script that draws, simulates and checks edits by the rules of
    `simulate` and `check`. A content security policy lets the page load nothing and run nothing else.

    Args:
        title: of the page; default: the heading of the timeline, or the names of several schedules.
        below: an SVG document of ours to show below the timelines, such as a pair's segments.
        bound: a lower bound on the makespan, such as a search's; default: of each timeline's placement and costs.
        limit: of a rank's memory, in bytes where the costs have them, else in the unit of `Costs.activation`.
        rows: timelines that are compared with the others, and not drawn.
    """
    panels = timelines_of(timelines)
    names = list(dict.fromkeys(timeline.name for timeline in panels))
    given = title if title is not None else heading(panels[0]) if len(panels) == 1 else " · ".join(names)
    name = printable(given) or "Pipeloom"
    style, script = _resource("page.css"), _script()
    styles = " ".join(f"'{_hash(text)}'" for text in (style, *re.findall(r"<style>(.*?)</style>", below)))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src {styles}; base-uri 'none'; form-action 'none'"
    )
    content = {
        "policy": policy,
        "title": escape(name),
        "style": style,
        "script": script,
        "below": below,
        "data": _embedded(document(panels, name, bound, limit, rows)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: content[slot[1]], _resource("page.html"))


def document(
    timelines: Sequence[Timeline],
    title: str,
    bound: float | None = None,
    limit: float | None = None,
    rows: Sequence[Timeline] = (),
) -> dict[str, Any]:
    """Return the data of the page, ready for `json.dumps`: the table of kinds, the unit of time, and a pane for each timeline.

    Args: as of `html`.
    """
    every = [*timelines, *rows]
    factor, unit = time_unit(every)
    mixed = len({timeline.source for timeline in every}) > 1
    panes = [
        _pane(timeline, (factor, unit))
        | {"heading": f"{timeline.source}: {heading(timeline)}" if mixed else heading(timeline)}
        | {"lower_bound": lower_bound(timeline.schedule, timeline.costs) if bound is None else bound}
        for timeline in every
    ]
    return {
        "format": PAGE_FORMAT,
        "title": title,
        "unit": {"factor": factor, "name": unit},
        "kinds": [_kind(kind) for kind in kinds()],
        "limit": limit,
        "panes": panes[: len(timelines)],
        "rows": panes[len(timelines) :],
    }


def _kind(kind: Kind) -> dict[str, Any]:
    need = kind.waits_for
    return {
        "letter": kind.letter,
        "words": kind.words,
        "produces": [EVENTS.index(event) for event in kind.produces],
        "need": None
        if need is None
        else {
            "event": EVENTS.index(need.value),
            "step": need.step,
            "at_end": None if need.at_end is None else EVENTS.index(need.at_end),
        },
        "memory": [(value in kind.makes) - (value in kind.frees) for value in (SAVED, PENDING, KEPT)],
        "fuses": kind.fuses,
        "of_stage": kind.of_stage,
        "duration": kind.time,
        "needs": [[need.value, need.step, need.at_end] for need in kind.needs],
        "makes": kind.makes,
        "frees": kind.frees,
    }


def _still(timeline: Timeline) -> dict[str, Any] | None:
    """Return what the page's simulator does not compute: rows of queues, curves of memory, gaps, and what each entry waited for.

    None where it computes all of it, so that actions can be moved. Rows are the ranks' computation, then the other queues.
    """
    schedule = timeline.schedule
    used = {kind_of(action.kind) for action in actions_of(schedule)}
    if not (
        schedule.has_queues
        or schedule.slices > 1  # the page's simulator moves actions without regard to the order of slices
        or timeline.costs.bytes
        or timeline.costs.sends != "free"
        or any(kind.part or set(kind.makes) & set(kind.frees) for kind in used)
    ):
        return None
    rows = [(rank, COMPUTE) for rank in range(schedule.ranks)]
    rows += [(rank, name) for rank in range(schedule.ranks) for name in queue_names(timeline)[1:]]
    positions = [schedule.queues[rank].get(name, ()) for rank, name in rows]
    place = {(rank, p): (row, at) for row, (rank, _) in enumerate(rows) for at, p in enumerate(positions[row])}
    origin = timeline.begin
    gaps = [
        [
            (gap.start - origin, gap.end - origin, CAUSES.index(gap.cause), place.get((rank, gap.at), (0, len(row)))[1])
            for gap in timeline.gaps[rank]
        ]
        for rank, row in enumerate(positions[: schedule.ranks])
    ]
    held = [[(time - origin, level) for time, level in curve] for curve in timeline.memory_curve]
    curves: dict[str, Any] = byte_curves(timeline) or {"": held}
    return {
        "rows": [{"rank": rank, "queue": name} for rank, name in rows],
        "positions": positions,
        "gaps": gaps,
        "curves": [{"pool": pool, "ranks": ranks} for pool, ranks in curves.items()],
        "waited_for": [
            [place.get(timeline.waited_for(rank, at) or (-1, -1)) for at in row]
            for (rank, _), row in zip(rows, positions, strict=True)
        ],
        "peak_activations": timeline.peak_activations,
    }


def _pane(timeline: Timeline, unit: tuple[float, str]) -> dict[str, Any]:
    schedule = timeline.schedule
    sent = messages(schedule, timeline.costs)
    form = to_dict(schedule)
    del form["programs"], form["format"]
    colours = {
        kind.letter: [palette.color(kind.letter, chunk, schedule.chunks) for chunk in range(schedule.chunks)]
        for kind in kinds()
    }
    return form | {
        "still": _still(timeline),
        "bytes": {
            name: [pool, sizes]
            for pool in sorted({DEVICE, *dict(timeline.costs.pools).values()})
            for name, sizes in timeline.costs.bytes_in(pool, schedule.stages).items()
        },
        "left": {stage * schedule.units + unit: sorted(values) for (stage, unit), values in schedule._remade.items()},
        "source": timeline.source,
        "full": full_rank(schedule),
        "assumptions": assumptions(timeline, unit),
        "overlap_p2p": timeline.overlap_p2p,
        "messages": sent | {"words": size_words(sent["size"]) if sent["size"] else ""},
        "most_kinds": MOST_KINDS,
        "origin": _short(timeline.begin),
        "codes": schedule.codes,
        "remade": [
            stage * schedule.units + unit for (stage, unit), values in schedule._remade.items() if SAVED in values
        ],
        "starts": [list(map(_short, starts)) for starts in timeline.starts],
        "ends": [list(map(_short, ends)) for ends in timeline.ends],
        "costs": _costs(timeline),
        "exposed": [dict(each.inside) for each in timeline.exposed],
        "colours": colours,
        "inks": {letter: [palette.ink_on(colour) for colour in shades] for letter, shades in colours.items()},
    }


def _costs(timeline: Timeline) -> dict[str, Any]:
    """Return the costs for the page's simulator: a value for each stage, matrices where they were given."""
    costs, stages = timeline.costs, timeline.schedule.stages
    spread = StageCosts(costs, stages)
    return {
        **{kind.time: spread.time_of(kind.time) for kind in kinds() if isinstance(kind.time, str)},
        "activation": costs.per_stage("activation", stages),
        "held": costs.per_stage("held", stages),
        "kept": costs.per_stage("kept", stages),
        "share": costs.per_stage("all_to_all", stages),
        "pair": _given(costs.pair, stages),
        "pair_split": _given(costs.pair_split, stages),
        "p2p": costs.p2p,
        "message": costs.message,
        "tensors": dict(costs.tensors),
        "bandwidth": costs.bandwidth if math.isfinite(costs.bandwidth) else None,
        "factors": costs.microbatch if timeline.schedule.slices == 1 else costs.size_factors(timeline.schedule),
    }


def _given(value: Any, stages: int) -> Any:
    """A pair's time as one value for each stage, or a matrix."""
    return value if value is None or isinstance(value, tuple) else (value,) * stages


def _short(value: float) -> float:
    """The same number, without the `.0` of a whole one."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _embedded(value: Any) -> str:
    """Return JSON for the inside of a script element: without `<`, and without the line ends that only JavaScript recognises."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c")


@lru_cache(maxsize=4)
def _resource(name: str) -> str:
    return (resources.files("pipeloom.draw") / "page" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _script() -> str:
    files: Iterable[str] = map(_resource, ("schedule.js", "paint.js", "app.js"))
    return '"use strict";\n(() => {\n' + "\n".join(files) + "})();\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# -- notebooks ------------------------------------------------------------------------------------------------------------


def svg_of(subject: Schedule | Timeline) -> str | None:
    """The drawing (of a schedule: with unit costs); None where it is too large or the schedule cannot run."""
    timeline = _timeline(subject)
    if not isinstance(timeline, Timeline) or timeline.schedule.actions > MOST_BOXES:
        return None
    return svg(timeline)


def html_of(subject: Schedule | Timeline, bound: float | None = None, limit: float | None = None) -> str | None:
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
    page = escape(html(timeline, bound=bound, limit=limit))
    return (
        f'<iframe sandbox="allow-scripts allow-downloads allow-modals" srcdoc="{page}" '
        f'style="width:100%;height:{height}px;border:0" title="{words}">{words}</iframe>'
    )


def forms_of(timeline: Timeline) -> dict[str, Callable[[], str]]:
    """Return extension of a file -> what draws it."""
    return {".svg": lambda: svg(timeline), ".html": lambda: html(timeline)}


class SideBySide:
    """Timelines that a notebook shows beside one another, drawn at one width."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self._timelines = timelines_of(timelines)

    def _repr_html_(self) -> str:
        drawings = [
            f'<img style="flex:1 1 24em;min-width:0" alt="{escape(heading(timeline))}" src="data:image/svg+xml;base64,'
            f'{base64.b64encode(svg(timeline, LEAST_WIDTH, tooltips=False).encode()).decode()}">'
            for timeline in self._timelines
        ]
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(drawings)}</div>'


def _timeline(subject: Schedule | Timeline) -> Timeline | PipeloomError:
    if isinstance(subject, Timeline):
        return subject
    try:
        return simulate(subject)
    except PipeloomError as error:
        return error
