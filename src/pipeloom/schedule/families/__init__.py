"""The schedule families, one file each, and the table that finds them by name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.chimera import chimera
from pipeloom.schedule.families.cooldown import COOLDOWNS, split_cooldown
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
from pipeloom.schedule.model import Schedule

Family = Callable[..., Schedule]

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

__all__ = ["FAMILIES", "Family", "build"]


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    options: Mapping[str, Any] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule called `name`: a family, or `module:function` (called as a family is).

    `chunks` None takes the family's own default; `costs` (of a stage) go to the families that plan with them. The option
    `cooldown="split"` is every family's, see `split_cooldown`. Raises UsageError for an unknown name, an option that the
    family does not take, or a value that it refuses, with the nearest valid ones.
    """
    family = _find(name)
    try:
        parameters = inspect.signature(family).parameters
    except ValueError as error:
        raise UsageError(f"schedule {name!r}: {error}") from None
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, **(options or {})}
    cooldown = "whole" if "cooldown" in parameters else arguments.pop("cooldown", "whole")
    if cooldown not in COOLDOWNS:
        raise UsageError(f"cooldown is {cooldown!r}{did_you_mean(str(cooldown), COOLDOWNS)}")
    if chunks is not None and ("chunks" in parameters or open_ended):
        arguments["chunks"] = chunks
    for key in arguments:
        if (key not in parameters and not open_ended) or key == "costs":
            known = [p for p in (*parameters, "cooldown") if p not in ("ranks", "microbatches", "chunks", "costs")]
            raise UsageError(f"schedule {name} has no option {key!r}{did_you_mean(key, known)}")
    if costs is not None and "costs" in parameters:
        arguments["costs"] = costs
    made = family(**arguments)
    if not isinstance(made, Schedule):
        raise UsageError(f"{name} returned {type(made).__name__}, not a Schedule")
    if chunks is not None and made.chunks != chunks:
        looped = ", ".join(n for n, f in FAMILIES.items() if "chunks" in inspect.signature(f).parameters)
        held = f"{made.chunks} chunk{'s' if made.chunks > 1 else ''} a rank"
        raise UsageError(f"schedule {name} holds {held}, not {chunks}; {looped} take chunks")
    return split_cooldown(made, costs) if cooldown == "split" else made


def _find(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    if ":" in name:
        module_name, _, function = name.partition(":")
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a command's own path does not hold the folder that it was started in
        try:
            found = getattr(importlib.import_module(module_name), function)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"schedule {name!r}: {error}") from None
        if not callable(found):
            raise UsageError(f"schedule {name!r} is not a function")
        return found  # type: ignore[no-any-return]
    raise UsageError(f"there is no schedule {name!r}{did_you_mean(name, FAMILIES)}")
