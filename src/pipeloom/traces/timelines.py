"""Timelines as JSON: schedules, costs, starts and ends, as a run writes them to its folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom.errors import PipeloomError, ScheduleError, UsageError, did_you_mean, shortened
from pipeloom.limits import SCHEDULE_BYTES, read_text
from pipeloom.schedule import json_form
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import COMMUNICATIONS, Exposed, Timeline

TIMELINES_FORMAT = "pipeloom.timelines/1"


def to_dict(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The keys of the JSON form, ready for `json.dumps`: format, schedules (each once), timelines (in order)."""
    schedules = list(dict.fromkeys(timeline.schedule for timeline in timelines))
    return {
        "format": TIMELINES_FORMAT,
        "schedules": [json_form.to_dict(schedule) for schedule in schedules],
        "timelines": [
            {
                "schedule": schedules.index(timeline.schedule),
                "source": timeline.source,
                "overlap_p2p": timeline.overlap_p2p,
                "costs": costs_dict(timeline.costs),
                "starts": timeline.starts,
                "ends": timeline.ends,
                "exposed": [dataclasses.asdict(each) for each in timeline.exposed],
            }
            for timeline in timelines
        ],
    }


def costs_dict(costs: Costs, of: str = "") -> dict[str, Any]:
    """The fields of `Costs`, an infinite bandwidth as null, behind words for what they are the costs of."""
    values = {name: None if value == math.inf else value for name, value in dataclasses.asdict(costs).items()}
    return {"of": of, **values} if of else values


def costs_of_dict(form: Any, source: str) -> Costs:
    """The inverse of `costs_dict`; keys that are left out are at their defaults.

    Raises UsageError for a form that is not an object of numbers, ArgumentError for values that `Costs` refuses.
    """
    if not isinstance(form, dict):
        raise UsageError(f"{source}: costs are an object with keys such as forward, p2p and bytes")
    known = {spec.name for spec in dataclasses.fields(Costs)}
    if unknown := form.keys() - known - {"of"}:
        raise UsageError(f"{source}: there is no cost {min(unknown)!r:.100}{did_you_mean(min(unknown), known)}")
    costs = {name: value for name, value in form.items() if name in known}
    costs |= {name: math.inf for name, value in costs.items() if value is None and name.endswith("bandwidth")}
    try:
        return Costs(**costs | {"microbatch": tuple(costs.get("microbatch", ()))})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: {error}") from None


def load(path: str | Path) -> tuple[Timeline, ...]:
    """The timelines in the file `path`.

    Raises UsageError for a file that cannot be read or has another format, ScheduleError for an invalid schedule or times.
    """
    return from_json(read_text(path, SCHEDULE_BYTES, "timelines"), str(path))


def from_json(text: str, source: str = "json") -> tuple[Timeline, ...]:
    """The timelines in `text`; `source` is the file, for messages. Raises as `load`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != TIMELINES_FORMAT:
        given = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise UsageError(f"{source}: format is {given!r:.200}; this version reads '{TIMELINES_FORMAT}'")
    try:
        schedules = [json_form.from_json(json.dumps(form), source) for form in content["schedules"]]
        return tuple(_timeline(form, schedules, source) for form in content["timelines"])
    except PipeloomError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UsageError(f"{source}: not as a run writes it: {type(error).__name__} {shortened(str(error))}") from None


def _timeline(form: dict[str, Any], schedules: Sequence[Schedule], source: str) -> Timeline:
    schedule = schedules[form["schedule"]]
    starts, ends = (tuple(tuple(map(float, row)) for row in form[name]) for name in ("starts", "ends"))
    lengths = list(map(len, schedule.codes))
    for name, rows in (("starts", starts), ("ends", ends)):
        if list(map(len, rows)) != lengths or not all(math.isfinite(time) for row in rows for time in row):
            raise ScheduleError(f"{source}: {name} do not give each action of the schedule one finite time")
    exposed = tuple(_exposed(each) for each in form.get("exposed", ()))
    if exposed and len(exposed) != schedule.ranks:
        raise ScheduleError(f"{source}: exposed has {len(exposed)} rows; the schedule has {schedule.ranks} ranks")
    if form["source"] not in ("simulated", "measured"):
        raise UsageError(f"{source}: source is {form['source']!r:.60}; it is simulated or measured")
    return Timeline(
        schedule,
        costs_of_dict(form["costs"], source),
        starts,
        ends,
        source=form["source"],
        overlap_p2p=bool(form["overlap_p2p"]),
        exposed=exposed,
    )


def _exposed(form: dict[str, Any]) -> Exposed:
    """One rank's communications. Raises ValueError for an unknown kind or an invalid time."""
    inside, after = ({str(kind): float(form[name][kind]) for kind in form[name]} for name in ("inside", "after"))
    end = float(form["end"])
    if unknown := sorted((inside.keys() | after.keys()) - set(COMMUNICATIONS)):
        raise ValueError(f"kind of communication {unknown[0]!r:.60}; they are {', '.join(COMMUNICATIONS)}")
    if not all(math.isfinite(time) and time >= 0 for time in (*inside.values(), *after.values(), end)):
        raise ValueError("a communication takes a finite time of at least 0")
    return Exposed(inside, after, end)
