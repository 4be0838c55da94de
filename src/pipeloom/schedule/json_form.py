"""The JSON form: everything that a Schedule holds, routes and options included."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.limits import MOST_NESTED, depth
from pipeloom.schedule.model import Schedule

SCHEDULE_FORMAT = "pipeloom.schedule/1"


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """The keys of the JSON form, ready for `json.dumps`: format, name, options, ranks, microbatches, placement (stage
    -> rank), routes, route_of (micro-batch -> route), programs (rank -> cells as in the CSV form), and where stages read
    tensors by name, tensors ([name, position of the producer, positions of the consumers] of each)."""
    return {**_head(schedule), "programs": list(_programs_of(schedule)), **_tensors_of(schedule)}


def to_json(schedule: Schedule) -> str:
    """`to_dict` as text, one line."""
    return "".join(parts_of_json(schedule)) + "\n"


def parts_of_json(schedule: Schedule, more: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the text of `to_dict(schedule) | more` in parts, one for each rank, so that the whole is never in memory.

    Args:
        more: keys that `to_dict` does not have.
    """
    yield json.dumps(_head(schedule), allow_nan=False)[:-1] + ', "programs": ['
    for rank, program in enumerate(_programs_of(schedule)):
        yield (", " if rank else "") + json.dumps(program)
    tail = json.dumps({**_tensors_of(schedule), **(more or {})}, allow_nan=False)
    yield "]" + (", " if len(tail) > 2 else "") + tail[1:]


def _head(schedule: Schedule) -> dict[str, Any]:
    return {
        "format": SCHEDULE_FORMAT,
        "name": schedule.name,
        "options": {key: _plain(value) for key, value in schedule.options},
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "routes": [list(route) for route in schedule.routes],
        "route_of": list(schedule.route_of),
    }


def _programs_of(schedule: Schedule) -> Iterator[list[str]]:
    return ([str(schedule.decode(code)) for code in program] for program in schedule.codes)


def _tensors_of(schedule: Schedule) -> dict[str, Any]:
    tensors = [[tensor.name, tensor.producer, list(tensor.consumers)] for tensor in schedule.tensors]
    return {"tensors": tensors} if tensors else {}


def from_json(text: str, source: str = "json") -> Schedule:
    """The schedule written in `text`; unknown keys are ignored. Does not run `check`.

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
    programs = _programs(form, source)
    ranks = _whole(form, "ranks", source, default=len(programs))
    if ranks != len(programs):
        raise ScheduleError(f"{source}: ranks is {ranks}, and there are programs for {len(programs)}")
    microbatches = _whole(form, "microbatches", source)
    placement = _wholes(_key(form, "placement", source), "placement", source)
    cells = sum(map(len, programs))
    if microbatches * len(placement) > 4 * cells:
        raise ScheduleError(
            f"{source}: {cells} actions are too few for {microbatches} micro-batches through {len(placement)} stages"
        )
    name, options = form.get("name", "json"), form.get("options", {})
    if not isinstance(name, str) or not isinstance(options, dict):
        raise UsageError(f"{source}: name must be a string and options an object")
    try:
        return Schedule.of(
            programs,
            placement=placement,
            microbatches=microbatches,
            name=name,
            options={key: _frozen(value) for key, value in options.items()},
            routes=_routes(form, source),
            route_of=_wholes(form["route_of"], "route_of", source) if "route_of" in form else None,
        ).with_tensors(_tensors(form, source))
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"{digits[:20]}… is a number of {len(digits):,} digits; whole numbers here have at most 20")
    return int(digits)


def _key(form: dict[str, Any], key: str, source: str) -> Any:
    if key not in form:
        raise UsageError(f"{source}: the key {key!r:.200} is missing")
    return form[key]


def _whole(form: dict[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = form.get(key, default) if default is not None else _key(form, key, source)
    return _wholes([value], key, source)[0]


def _wholes(value: Any, key: str, source: str) -> list[int]:
    if not isinstance(value, list):
        raise UsageError(f"{source}: {key} must be a list of whole numbers, not {value!r:.60}")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool):
            raise UsageError(f"{source}: {key} holds {item!r:.60}, which is not a whole number")
    return value


def _routes(form: dict[str, Any], source: str) -> list[list[int]] | None:
    if "routes" not in form:
        return None
    routes = form["routes"]
    if not isinstance(routes, list) or not routes:
        raise UsageError(f"{source}: routes must be a list of lists of stages, not {routes!r:.60}")
    return [_wholes(route, "routes", source) for route in routes]


def _tensors(form: dict[str, Any], source: str) -> list[tuple[str, int, list[int]]]:
    tensors = form.get("tensors", [])
    if not isinstance(tensors, list):
        raise UsageError(f"{source}: tensors must be a list, not {tensors!r:.60}")
    for entry in tensors:
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise UsageError(f"{source}: tensors holds {entry!r:.60}; give [name, producer, [consumers]]")
        _wholes([entry[1]], "tensors", source)
        _wholes(entry[2], "tensors", source)
    return [(name, producer, consumers) for name, producer, consumers in tensors]


def _programs(form: dict[str, Any], source: str) -> list[list[str]]:
    programs = _key(form, "programs", source)
    if not isinstance(programs, list) or not all(isinstance(program, list) for program in programs):
        raise UsageError(f"{source}: programs must be one list of cells for each rank")
    for rank, program in enumerate(programs):
        for at, cell in enumerate(program):
            if not isinstance(cell, str):
                raise UsageError(f'{source}: rank {rank}, action {at}: {cell!r:.60} is not a string such as "0F0"')
    return programs


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
