"""`[debug] fault`: a failure injected on purpose, to test the code that reports failures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

from pipeloom.errors import ScheduleError, UsageError, did_you_mean
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.actions import parse_action
from pipeloom.schedule.model import parts

FaultKind = Literal["swap-microbatches", "drop-send", "flip-bit", "raise", "kill"]
# Kind -> how its arguments are written, and the fields that they set.
_FORMS: dict[FaultKind, tuple[str, tuple[str, str]]] = {
    "swap-microbatches": ("A,B", ("a", "b")),
    "drop-send": ("RANK:N", ("rank", "number")),
    "flip-bit": ("RANK:N", ("rank", "number")),
    "raise": ("RANK:ACTION", ("rank", "action")),
    "kill": ("RANK:STEP", ("rank", "step")),
}


@dataclass(frozen=True)
class Fault:
    """One failure to inject. Fields that a kind does not use keep their defaults.

    Attributes:
        name: its name in error messages.
        kind: the kind of failure.
        a, b: `swap-microbatches`: the two micro-batches whose inputs are swapped, while their targets stay.
        rank: the pipeline rank on which it happens; -1 for `swap-microbatches`.
        number: `drop-send`: number of the rank's send that is lost, counted from 0 over the run.
            `flip-bit`: number of the send in which one bit is flipped.
        action: `raise`: the action at which the rank raises an exception.
        step: `kill`: the step, counted from 0, at whose start the rank kills itself with SIGKILL.
    """

    name: ClassVar[str] = "--debug.fault"
    kind: FaultKind
    a: int = -1
    b: int = -1
    rank: int = -1
    number: int = -1
    action: Action | None = None
    step: int = -1


def parse_fault(text: str) -> Fault | None:
    """Return the fault that `text` describes, or None if it is empty. Raises UsageError with the syntax."""
    if not text:
        return None
    kind, _, rest = text.partition(":")
    if kind not in get_args(FaultKind):
        forms = ", ".join(f"{name}:{form}" for name, (form, _) in _FORMS.items())
        raise UsageError(f"unknown fault {kind!r:.200}{did_you_mean(kind, _FORMS)} (write {forms})")
    form, names = _FORMS[cast(FaultKind, kind)]
    values = dict(zip(names, rest.split("," if "," in form else ":", 1), strict=False))
    if len(values) < 2 or not all(re.fullmatch(r"\d{1,9}", values[name]) for name in names if name != "action"):
        raise UsageError(f"{text!r:.200} is not a fault; {kind} is written {kind}:{form}")
    try:
        fields: dict[str, Any] = {
            name: parse_action(value) if name == "action" else int(value) for name, value in values.items()
        }
    except ScheduleError as error:
        raise UsageError(str(error)) from None
    return Fault(cast(FaultKind, kind), **fields)


def fault_problem(fault: Fault, schedule: Schedule, steps: int) -> str | None:
    """Return the reason why `fault` cannot happen in `schedule` over `steps` steps, or None if it can."""
    m = schedule.microbatches
    if fault.kind == "swap-microbatches":
        if fault.a == fault.b:
            return f"it swaps micro-batch {fault.a} with itself"
        if max(fault.a, fault.b) >= m:
            return f"there is no micro-batch {max(fault.a, fault.b)}; the schedule has {m} (0..{m - 1})"
        return None
    if fault.rank >= schedule.ranks:
        return f"there is no rank {fault.rank}; the schedule has {schedule.ranks} (0..{schedule.ranks - 1})"
    if fault.kind == "raise":
        runs = [str(action) for cell in schedule.programs[fault.rank] for action in parts(cell)]
        if str(fault.action) not in runs:
            held = ", ".join(map(str, schedule.stages_of[fault.rank]))
            return f"rank {fault.rank} does not run {fault.action}; it holds stages {held} and micro-batches 0..{m - 1}"
    if fault.kind == "kill" and fault.step >= steps:
        return f"there is no step {fault.step}; the run has {steps} (0..{steps - 1})"
    return None
