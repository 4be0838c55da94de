"""The JSON form: everything that a Schedule holds, routes and options included."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from typing import Any

from pipeloom.errors import ScheduleError, UsageError, shortened
from pipeloom.foreign import unknown_keys
from pipeloom.limits import MOST_NESTED, depth
from pipeloom.schedule.model import Schedule

SCHEDULE_FORMAT = "pipeloom.schedule/1"
_REQUIRED = ("programs", "microbatches", "placement")
_SHAPES: dict[str, tuple[Any, str]] = {
    "name": (str, "a string"),
    "options": (dict, "an object"),
    "ranks": (int, "a whole number"),
    "microbatches": (int, "a whole number"),
    "placement": ([int], "a list of whole numbers"),
    "routes": ([[int]], "a list of lists of stages"),
    "route_of": ([int], "a list of whole numbers"),
    "programs": ([[str]], 'one list of cells such as "0F0" for each rank'),
    "tensors": ([(str, int, [int])], "a list of [name, producer, [consumers]]"),
    "slots": (dict, "an object"),
    "slices": (int, "a whole number"),
}

# What commands write beside a schedule.
_FIGURES = """
    costs makespan busy idle idle_by_cause spans bubble_ratio bubble_rate span_bubble_rate period peak_activations peak_memory
    peak_bytes messages lower_bound gap search segments
"""


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """The keys of the JSON form, ready for `json.dumps`: format, name, options, ranks, microbatches, placement (stage
    -> rank), routes, route_of (micro-batch -> route), programs (rank -> cells as in the CSV form), and where stages read
    tensors by name, tensors ([name, position of the producer, positions of the consumers] of each); where it has slots, slots
    (value -> how many); where sequences are cut, slices (how many)."""
    more = {
        "tensors": [[tensor.name, tensor.producer, list(tensor.consumers)] for tensor in schedule.tensors],
        "slots": dict(schedule.slots),
        "slices": schedule.slices if schedule.slices > 1 else None,
    }
    return {
        "format": SCHEDULE_FORMAT,
        "name": schedule.name,
        "options": {key: _plain(value) for key, value in schedule.options},
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "routes": [list(route) for route in schedule.routes],
        "route_of": list(schedule.route_of),
        "programs": [[str(schedule.decode(code)) for code in program] for program in schedule.codes],
        **{key: value for key, value in more.items() if value},
    }


def to_json(schedule: Schedule) -> str:
    """`to_dict` as text, one line."""
    return json.dumps(to_dict(schedule), allow_nan=False) + "\n"


def from_json(text: str, source: str = "json") -> Schedule:
    """The schedule written in `text`; a key that is not known is named in the log. Does not run `check`.

    Args:
        source: the file, for messages.

    Raises:
        UsageError: no JSON (with file:line:column), another format, a missing key, a value of the wrong type.
        ScheduleError: a cell that is not an action, or a rank, stage, route or micro-batch out of range.
    """
    try:
        form = json.loads(text.removeprefix("\ufeff"), parse_int=_integer)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}:{error.lineno}:{error.colno}: this is not JSON: {error.msg}") from None
    except RecursionError:
        raise UsageError(f"{source}: lists and objects are nested too deeply; at most {MOST_NESTED} levels") from None
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    if depth(form) > MOST_NESTED:
        raise UsageError(f"{source}: lists and objects are nested too deeply; at most {MOST_NESTED} levels")
    if not isinstance(form, dict):
        raise UsageError(f"{source}: a schedule is a JSON object, and this is a {type(form).__name__}")
    if form.get("format") != SCHEDULE_FORMAT:
        raise UsageError(
            f"{source}: format is {form.get('format')!r:.200}; this version reads {SCHEDULE_FORMAT!r:.200}"
        )
    _require_shapes(form, source)
    if unread := unknown_keys(form, {"format", *_SHAPES, *_FIGURES.split()}):
        logging.getLogger("pipeloom").warning("%s: nothing reads %s", source, shortened(", ".join(unread), 200))
    programs, microbatches, placement = form["programs"], form["microbatches"], form["placement"]
    ranks = form.get("ranks", len(programs))
    if ranks != len(programs):
        raise ScheduleError(f"{source}: ranks is {ranks}, and there are programs for {len(programs)}")
    cells = sum(map(len, programs))
    if microbatches * form.get("slices", 1) * len(placement) > 4 * cells:
        raise ScheduleError(
            f"{source}: {cells} actions are too few for {microbatches} micro-batches through {len(placement)} stages"
        )
    try:
        return (
            Schedule.of(
                programs,
                placement=placement,
                microbatches=microbatches,
                name=form.get("name", "json"),
                options={key: _frozen(value) for key, value in form.get("options", {}).items()},
                routes=form.get("routes"),
                route_of=form.get("route_of"),
                slices=form.get("slices", 1),
            )
            .with_tensors(form.get("tensors", []))
            .with_slots(form.get("slots", {}))
        )
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"{digits[:20]}… is a number of {len(digits):,} digits; whole numbers here have at most 20")
    return int(digits)


def _require_shapes(form: dict[str, Any], source: str) -> None:
    """Raise UsageError for a key that is missing or holds a value of another shape than `_SHAPES` gives."""
    for key, (shape, words) in _SHAPES.items():
        if key not in form:
            if key in _REQUIRED:
                raise UsageError(f"{source}: the key {key!r:.60} is missing")
        elif not _fits(form[key], shape):
            raise UsageError(f"{source}: {key} is {form[key]!r:.200}; it must be {words}")


def _fits(value: Any, shape: Any) -> bool:
    """Return whether `value` has the shape: of a type, a list of one shape, or as many values as a tuple has shapes."""
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape))
    return isinstance(value, shape) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """An option in the types of JSON: tuples as lists, a dataclass as an object, non-finite numbers as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: _plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _frozen(value: Any) -> Any:
    """An option as a Schedule can hold and hash it: lists as tuples, objects as tuples of (key, value)."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value
