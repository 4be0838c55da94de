"""`[debug] fault`: a failure made on purpose, so that what reports failures can be tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pipeloom.errors import ScheduleError, UsageError, did_you_mean
from pipeloom.schedule import Action, Pair, Schedule
from pipeloom.schedule.actions import parse_cell

FaultKind = Literal["swap-microbatches", "drop-send", "raise", "kill"]
SYNTAX = "swap-microbatches:A,B, drop-send:RANK:N, raise:RANK:ACTION or kill:RANK:STEP"
_PATTERNS: dict[FaultKind, re.Pattern[str]] = {
    "swap-microbatches": re.compile(r"(\d+),(\d+)"),
    "drop-send": re.compile(r"(\d+):(\d+)"),
    "raise": re.compile(r"(\d+):(\S.*)"),
    "kill": re.compile(r"(\d+):(\d+)"),
}


@dataclass(frozen=True)
class Fault:
    """One failure to make on purpose. Fields that a kind does not use keep their defaults.

    Attributes:
        kind: what goes wrong.
        microbatches: `swap-microbatches`: the two that change places (inputs of one with targets of the other).
        rank: the rank that does it; -1 for `swap-microbatches`, which every rank does.
        send: `drop-send`: this send of the rank's step, counted from 0, is not made.
        action: `raise`: the action at which the rank raises an exception.
        step: `kill`: the rank ends itself with SIGKILL in this step, counted from 1.
    """

    kind: FaultKind
    microbatches: tuple[int, int] = (-1, -1)
    rank: int = -1
    send: int = -1
    action: Action | Pair | None = None
    step: int = -1


def parse_fault(text: str) -> Fault | None:
    """The fault written `text`, None for an empty one; raises UsageError that shows the syntax."""
    if not text:
        return None
    name, _, rest = text.partition(":")
    if name not in get_args(FaultKind):
        raise UsageError(f"there is no fault {name!r}{did_you_mean(name, get_args(FaultKind))} (write {SYNTAX})")
    kind: FaultKind = next(known for known in get_args(FaultKind) if known == name)
    match = _PATTERNS[kind].fullmatch(rest)
    if match is None:
        form = next(part for part in re.split(r", (?=[a-z])| or ", SYNTAX) if part.startswith(kind))
        raise UsageError(f"{text!r} is not a fault; {kind} is written {form}")
    if kind == "swap-microbatches":
        return Fault(kind, microbatches=(int(match[1]), int(match[2])))
    rank = int(match[1])
    if kind == "drop-send":
        return Fault(kind, rank=rank, send=int(match[2]))
    if kind == "kill":
        return Fault(kind, rank=rank, step=int(match[2]))
    try:
        return Fault(kind, rank=rank, action=parse_cell(match[2]))
    except ScheduleError as error:
        raise UsageError(str(error)) from None


def fault_problem(fault: Fault, schedule: Schedule, steps: int) -> str | None:
    """Why `fault` could never happen in `schedule` over `steps` steps, or None when it can."""
    m = schedule.microbatches
    if fault.kind == "swap-microbatches":
        a, b = fault.microbatches
        if a == b:
            return f"it swaps micro-batch {a} with itself"
        if max(a, b) >= m:
            return f"there is no micro-batch {max(a, b)}; the schedule has {m} (0..{m - 1})"
        return None
    if fault.rank >= schedule.ranks:
        return f"there is no rank {fault.rank}; the schedule has {schedule.ranks} (0..{schedule.ranks - 1})"
    if fault.kind == "raise" and fault.action not in schedule.programs[fault.rank]:
        return f"rank {fault.rank} does not run {fault.action}; it runs {_some(schedule, fault.rank)}"
    if fault.kind == "kill" and not 1 <= fault.step <= steps:
        return f"there is no step {fault.step}; nearest: {min(max(fault.step, 1), steps)}"
    return None


def _some(schedule: Schedule, rank: int) -> str:
    cells = [str(cell) for cell in schedule.programs[rank][:4]]
    return ", ".join(cells) + (", …" if len(schedule.programs[rank]) > 4 else "")
