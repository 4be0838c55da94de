"""Megatron-LM's timers in a log (`--timing-log-option all --timing-log-level 2`): F and B of each rank, never an order."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pipeloom.errors import UsageError
from pipeloom.limits import SCHEDULE_BYTES, read_text
from pipeloom.plan.layout import PlannedLayout

_HEAD = "times across ranks (ms):"
_TIMERS = ("forward-compute", "backward-compute")
_PREFIX = r"(?:\[[^\]]*\]:?|\d+:)?\s*"  # of torchrun or srun
_TIMER = re.compile(_PREFIX + r"([a-z][a-z0-9-]*):\s*")
_RANK = re.compile(_PREFIX + r"rank\s*(\d{1,7}):\s*(\d+(?:\.\d+)?)\s*")


def accepts(path: Path) -> bool:
    """Return whether the file is a log, by its name or its timers of all ranks."""
    return path.is_file() and (path.suffix.lower() in (".log", ".txt", ".out") or _HEAD in _text(path))


def _text(path: Path) -> str:
    try:
        return read_text(path, SCHEDULE_BYTES, "a log")
    except UsageError:
        return ""


def read(path: Path, layout: PlannedLayout) -> list[tuple[tuple[int, ...], float, float]]:
    """Return (stages of a pipeline rank, seconds of F, of B) of one micro-batch, for each pipeline rank.

    Medians over the steps, without the first of several, and over the devices of a pipeline rank; the devices of a run are in
    the order tp, cp, dp, pp.

    Raises UsageError for a log without these timers, of another number of devices, or with times of 0.
    """
    samples = _samples(_text(path))
    middle: dict[str, list[float]] = {}  # timer -> milliseconds of each device
    for name in _TIMERS:
        if name not in samples:
            raise UsageError(f"{path}: there is no timer {name}; log with --timing-log-level 2 --timing-log-option all")
        devices = sorted(samples[name])
        if devices != list(range(layout.world)):
            raise UsageError(
                f"{path}: {name} has the times of {len(devices)} ranks, and the job has {layout.world} devices"
            )
        middle[name] = [median(samples[name][at][len(samples[name][at]) > 1 :]) for at in devices]
        for at, value in enumerate(middle[name]):
            if not 0 < value < math.inf:
                raise UsageError(f"{path}: {name} of rank {at} takes {value:g} ms; a time is above 0 and finite")
    each = layout.world // layout.pp
    times = [
        [median(middle[name][rank * each : (rank + 1) * each]) / (1e3 * layout.m) for name in _TIMERS]
        for rank in range(layout.pp)
    ]
    return [(tuple(range(rank, layout.pp * layout.v, layout.pp)), *both) for rank, both in enumerate(times)]  # type: ignore[misc]


def _samples(text: str) -> dict[str, dict[int, Sequence[float]]]:
    """Return timer -> rank -> its milliseconds in each report."""
    samples: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    timer = ""
    for line in text.splitlines():
        if match := _TIMER.fullmatch(line):
            timer = match[1]
        elif (match := _RANK.fullmatch(line)) and timer:
            samples[timer][int(match[1])].append(float(match[2]))
        else:
            timer = ""
    return samples  # type: ignore[return-value]
