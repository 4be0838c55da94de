"""The schedule families, one file each, and the table that finds them by name."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.chimera import chimera
from pipeloom.schedule.families.dualpipe import dualpipe
from pipeloom.schedule.families.dualpipev import dualpipev
from pipeloom.schedule.families.gpipe import gpipe
from pipeloom.schedule.families.hanayo import hanayo
from pipeloom.schedule.families.interleaved import interleaved
from pipeloom.schedule.families.interleaved_overlap import interleaved_overlap
from pipeloom.schedule.families.interleaved_zb import interleaved_zb
from pipeloom.schedule.families.looped_bfs import looped_bfs
from pipeloom.schedule.families.one_f_one_b import one_f_one_b
from pipeloom.schedule.families.one_f_one_b_overlap import one_f_one_b_overlap
from pipeloom.schedule.families.v_half import v_half
from pipeloom.schedule.families.v_min import v_min
from pipeloom.schedule.families.zb_auto import zb_auto
from pipeloom.schedule.families.zb_h1 import zb_h1
from pipeloom.schedule.families.zb_h2 import zb_h2
from pipeloom.schedule.families.zbv import zbv
from pipeloom.schedule.functions import importable_from, run_user_code, user_object
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import split_cooldown

Family = Callable[..., Schedule]

COOLDOWNS = ("whole", "split")

_ARGUMENTS = ("ranks", "microbatches", "costs")  # parameters of families that are not options

FAMILIES: dict[str, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-auto": zb_auto,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "1f1b-overlap": one_f_one_b_overlap,
    "interleaved-overlap": interleaved_overlap,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "hanayo": hanayo,
    "chimera": chimera,
}

# Name of a placement -> the families made for it that a searched schedule is compared with, in order of preference.
BASELINES: dict[str, tuple[str, ...]] = {
    "linear": ("1f1b",),
    "loop": ("interleaved", "interleaved-zb"),
    "vee": ("zbv", "v-half", "v-min"),
}
# The same -> all families of one route that are made for it: searches start from them.
ONE_ROUTE: dict[str, tuple[str, ...]] = {
    "linear": (*BASELINES["linear"], "zb-h1", "zb-h2", "zb-auto", "gpipe", "1f1b-overlap"),
    "loop": (*BASELINES["loop"], "looped-bfs", "interleaved-overlap"),
    "vee": (*BASELINES["vee"], "dualpipev", "hanayo"),
}

# Other names of the families, as `_plain` writes them. A leading "Schedule" (torch's classes) is dropped before the look-up.
ALIASES: dict[str, str] = {
    "afab": "gpipe",
    "allforwardallbackward": "gpipe",
    "fthenb": "gpipe",
    "pipedreamflush": "1f1b",
    "dapple": "1f1b",
    "interleaved1f1b": "interleaved",
    "vpp": "interleaved",
    "virtualpipeline": "interleaved",
    "bfs": "looped-bfs",
    "breadthfirst": "looped-bfs",
    "interleavedzerobubble": "interleaved-zb",
    "zbvpp": "interleaved-zb",
    "zbvzerobubble": "zbv",
}

__all__ = [
    "ALIASES",
    "BASELINES",
    "FAMILIES",
    "ONE_ROUTE",
    "Family",
    "build",
    "canonical_name",
    "require",
]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_CANONICAL = {_plain(name): name for name in FAMILIES} | ALIASES


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
    hint = f"; did you mean {nearest}?" if nearest else did_you_mean(name, FAMILIES)
    return UsageError(f"there is no schedule {name!r:.200}{hint}")


def require(name: str, options: Iterable[str] = (), folder: str | Path | None = None) -> None:
    """Raise the errors of `build` that need no sizes: for an unknown name, a user's module, and names of options."""
    name = canonical_name(name)
    with contextlib.nullcontext() if name in FAMILIES else importable_from(folder):
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
    family accepts the option `cooldown="split"`, see `split_cooldown`. Raises UsageError for an unknown name, an option that the
    family does not take, or a value that it refuses, with the nearest valid ones. An exception in a user's function is a
    UsageError with its file and line, or a ScheduleError where the function raised one. The user's module is imported from
    `folder` (None: the working directory), after everything that is installed.
    """
    name = canonical_name(name)
    with contextlib.nullcontext() if name in FAMILIES else importable_from(folder):
        return _build(name, ranks, microbatches, chunks, options, costs, Path(folder or "."))


def _build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    options: Mapping[str, Any] | None,
    costs: Costs | None,
    folder: Path,
) -> Schedule:
    family = _find(name, folder)
    parameters = _parameters(name, family)
    _check_options(name, parameters, options or ())
    open_ended = _open_ended(parameters)
    arguments: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, **(options or {})}
    cooldown = "whole" if "cooldown" in parameters else arguments.pop("cooldown", "whole")
    if cooldown not in COOLDOWNS:
        raise UsageError(f"cooldown is {cooldown!r:.200}{did_you_mean(str(cooldown), COOLDOWNS)}")
    if chunks is not None and ("chunks" in parameters or open_ended):
        arguments["chunks"] = chunks
    if costs is not None and "costs" in parameters:
        arguments["costs"] = costs
    schedule = family(**arguments) if name in FAMILIES else run_user_code(name, "schedule", lambda: family(**arguments))
    if not isinstance(schedule, Schedule):
        raise UsageError(f"{name} returned {type(schedule).__name__}, not a Schedule")
    if chunks is not None and schedule.chunks != chunks:
        looped = ", ".join(n for n, f in FAMILIES.items() if "chunks" in inspect.signature(f).parameters)
        held = f"{schedule.chunks} chunk{'s' if schedule.chunks > 1 else ''} per rank"
        raise UsageError(f"schedule {name} holds {held}, not {chunks}; {looped} take chunks")
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
        if key in _ARGUMENTS or not (key in parameters or key == "cooldown" or _open_ended(parameters)):
            known = [p for p in (*parameters, "cooldown") if p not in _ARGUMENTS]
            raise UsageError(f"schedule {name} has no option {key!r:.200}{did_you_mean(key, known)}")


def _find(name: str, folder: Path) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    if ":" in name:
        return user_object(name, folder, "schedule")  # type: ignore[no-any-return]
    raise _unknown_name(name)
