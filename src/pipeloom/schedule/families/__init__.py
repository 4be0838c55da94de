"""The schedule families by name. Every module of this package registers its own with `@family`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.errors import ArgumentError, UsageError, did_you_mean
from pipeloom.limits import require_types
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.families.construct.layout import REGISTRY, Family, encoded, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import MemoryDeadlock, PriorityRule, programs_of, single_route
from pipeloom.schedule.families.one_f_one_b import seq1f1b
from pipeloom.schedule.functions import importable_from, run_user_code, user_object
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import NAMED, name_of
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.slices import by_slices
from pipeloom.schedule.transforms import split_cooldown

COOLDOWNS = ("whole", "split")

_UNIVERSAL = ("cooldown", "slices")  # options of every family
_ARGUMENTS = ("ranks", "microbatches", "costs")  # parameters of families that are not options

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
_ORDERED = sorted(REGISTRY.items(), key=lambda entry: entry[1].order)

FAMILIES: dict[str, Family] = {name: entry.function for name, entry in _ORDERED}
SLICED: dict[str, Family] = {"seq1f1b": seq1f1b}
"""Names of sliced schedules that are published as families; `build` makes them of any family with the option `slices`."""

# Name of a placement -> the families made for it that a searched schedule is compared with, in order of preference.
BASELINES: dict[str, tuple[str, ...]] = {
    placement: tuple(name for name, entry in _ORDERED if entry.baseline and entry.placement == placement)
    for placement in NAMED
}
# The same -> all families of one route that are made for it, the baselines first: searches start from them.
ONE_ROUTE: dict[str, tuple[str, ...]] = {
    placement: tuple(
        dict.fromkeys([*BASELINES[placement], *(name for name, entry in _ORDERED if entry.placement == placement)])
    )
    for placement in NAMED
}
# Other names of the families, as `_plain` writes them. A leading "Schedule" (torch's classes) is dropped before the look-up.
ALIASES: dict[str, str] = {alias: name for name, entry in _ORDERED for alias in entry.aliases}

__all__ = [
    "ALIASES",
    "BASELINES",
    "FAMILIES",
    "ONE_ROUTE",
    "SLICED",
    "Family",
    "baseline",
    "baseline_memory",
    "build",
    "canonical_name",
    "require",
]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_CANONICAL = {_plain(name): name for name in (*FAMILIES, *SLICED)} | ALIASES


def canonical_name(name: str) -> str:
    """The name in `FAMILIES` of the family that `name` means, else `name` itself.

    Upper and lower case, spaces, hyphens and underscores make no difference; torch's class names and the other names in
    `ALIASES` are known too: `ZB_H1`, `Schedule1F1B`, `ZBVZeroBubble`, `vpp`.
    """
    plain = _plain(name)
    return _CANONICAL.get(plain) or _CANONICAL.get(plain.removeprefix("schedule"), name)


def _unknown_name(name: str) -> UsageError:
    """Return the error for a `name` that no family has, with the nearest names."""
    plain = _plain(name).removeprefix("schedule")
    near = (_CANONICAL[word] for word in difflib.get_close_matches(plain, _CANONICAL, n=6, cutoff=0.55))
    nearest = " or ".join(map(repr, list(dict.fromkeys(near))[:3]))
    hint = f"; did you mean {nearest}?" if nearest else did_you_mean(name, (*FAMILIES, *SLICED))
    return UsageError(f"there is no schedule {name!r:.200}{hint}")


def require(name: str, options: Iterable[str] = (), folder: str | Path | None = None) -> None:
    """Raise the errors of `build` that need no sizes: for an unknown name, a user's module, and names of options."""
    name = canonical_name(name)
    with importable_from(folder):
        _check_options(name, _parameters(name, _find(name, Path(folder or "."))), options)


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    options: Mapping[str, Any] | None = None,
    costs: Costs | None = None,
    folder: str | Path | None = None,
) -> Schedule:
    """The schedule called `name`: a family, by any of its names (`canonical_name`), or `module:function` (called as a family is).

    `chunks` None takes the family's own default; `costs` (of a stage) are passed to the families that plan with them. Every
    family accepts the options `cooldown="split"`, see `split_cooldown`, and `slices=K`, see `by_slices`. Raises UsageError for an
    unknown name, an option that the family does not take, or a value that it refuses, with the nearest valid ones. An exception
    in a user's function is a UsageError with its file and line, or a ScheduleError where the function raised one. The user's
    module is imported from `folder` (None: the working directory), after everything that is installed.

    >>> schedule = build("1f1b", ranks=2, microbatches=3)
    >>> [str(action) for action in schedule.programs[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    require_types(build, {"options": options, "costs": costs})
    name = canonical_name(str(name))
    with importable_from(folder):
        costs = None if costs is None else replace(costs, sends="free")  # an order is chosen as if no sender waited
        family = _find(name, Path(folder or "."))
        parameters = _parameters(name, family)
        _check_options(name, parameters, options or ())
        arguments: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, **(options or {})}
        cooldown = "whole" if "cooldown" in parameters else arguments.pop("cooldown", "whole")
        if cooldown not in COOLDOWNS:
            raise UsageError(f"cooldown is {cooldown!r:.200}{did_you_mean(str(cooldown), COOLDOWNS)}")
        if chunks is not None and ("chunks" in parameters or _open_ended(parameters)):
            arguments["chunks"] = chunks
        slices = 1 if "slices" in parameters else arguments.pop("slices", 1)
        require_sizes(microbatches=microbatches, slices=slices)
        arguments["microbatches"] *= slices
        if "costs" in parameters and (costs is not None or slices > 1):
            arguments["costs"] = costs if slices == 1 else (costs or Costs()).even(1 / slices)
        schedule = run_user_code(name, "schedule", lambda: family(**arguments)) if ":" in name else family(**arguments)
    if not isinstance(schedule, Schedule):
        raise UsageError(f"{name} returned {type(schedule).__name__}, not a Schedule")
    if chunks is not None and schedule.chunks != chunks:
        looped = ", ".join(n for n, f in FAMILIES.items() if "chunks" in inspect.signature(f).parameters)
        held = f"{schedule.chunks} chunk{'s' if schedule.chunks > 1 else ''} per rank"
        raise UsageError(f"schedule {name} holds {held}, not {chunks}; {looped} take chunks")
    if slices > 1:
        schedule = by_slices(schedule, slices)
    return split_cooldown(schedule, costs) if cooldown == "split" else schedule


def _parameters(name: str, family: Family) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(family).parameters
    except ValueError as error:
        raise UsageError(f"schedule {name!r:.200}: {error}") from None


def _open_ended(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_options(name: str, parameters: Mapping[str, inspect.Parameter], options: Iterable[str]) -> None:
    """Raise UsageError for an option that the family does not take."""
    for key in options:
        if key in _ARGUMENTS or not (key in parameters or key in _UNIVERSAL or _open_ended(parameters)):
            known = [p for p in (*parameters, *_UNIVERSAL) if p not in _ARGUMENTS]
            raise UsageError(f"schedule {name} has no option {key!r:.200}{did_you_mean(key, known)}")


def _find(name: str, folder: Path) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    if name in SLICED:
        return SLICED[name]
    if ":" in name:
        return user_object(name, folder, "schedule")  # type: ignore[no-any-return]
    raise _unknown_name(name)


def baseline_memory(placement: Sequence[int], ranks: int, microbatches: int) -> tuple[float, str]:
    """Return (stage-micro-batches, family): the peak of the placement's first family, on its fullest rank.

    Without such a family, the peak of 1F1B: p micro-batches in every stage of a rank.
    """
    for schedule in _baselines(placement, (ranks, microbatches), None):
        return float(max(simulate(schedule).peak_activations)), schedule.name
    return float(ranks * max(placement.count(rank) for rank in range(ranks))), "1f1b"


def baseline(
    placement: Sequence[int], ranks: int, microbatches: int, memory: float, costs: Costs | None = None
) -> Schedule:
    """Return the placement's first family that fits the memory, else a list schedule.

    Args:
        memory: the largest peak memory of a rank, in units of `Costs.activation`.
        costs: of a stage, for the families that plan with them.

    Raises:
        ArgumentError: nothing fits the memory.
    """
    known = costs if costs is not None else Costs()
    for schedule in _baselines(placement, (ranks, microbatches), costs):
        if max(simulate(schedule, known).peak_memory) <= memory + TIME_TOLERANCE:
            return schedule
    for late in (True, False):
        # Every stage may hold its share of the memory, so that list scheduling cannot get stuck.
        caps = [max(1.0, memory // placement.count(rank)) for rank in placement]
        problem = single_route(placement, microbatches, known, [memory] * ranks, caps)
        try:
            programs = programs_of(problem, PriorityRule(late=late))
        except MemoryDeadlock:
            continue
        codes = encoded(programs, len(placement), microbatches)
        return Schedule.of(codes, placement=placement, microbatches=microbatches, name="list scheduling")
    raise ArgumentError("memory", f" is {memory:g}; no schedule was found that fits it; give more")


def _baselines(placement: Sequence[int], sizes: tuple[int, int], costs: Costs | None) -> Iterator[Schedule]:
    """Yield the families for this placement that accept the sizes."""
    kind = name_of(placement, sizes[0])
    for name in BASELINES.get(kind, ()):
        chunks = len(placement) // sizes[0] if kind == "loop" else None
        try:
            schedule = build(name, *sizes, chunks, {}, costs)
        except UsageError:  # sizes that this family refuses
            continue
        if schedule.placement == tuple(placement):
            yield schedule
