"""Progress of a rank, for the watchdog: written by the executor, read by the watchdog's thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message

if TYPE_CHECKING:
    from pipeloom.runtime.health.names import Names

_SLOWEST_STEPS = 20.0  # the limit of a step, as a multiple of the slowest one so far; within these bounds, in seconds
_SHORTEST_LIMIT = 30.0
_LONGEST_LIMIT = 300.0
_PHASES = {  # seconds; longer than any of them takes without a fault, also on a busy machine
    "start-up": 300.0,
    "first step": 300.0,
    "evaluation": 300.0,
    "search": 330.0,
    "save": 900.0,
    "load": 900.0,
    "device": 300.0,  # a GPU may lag behind its host by most of a step
}


@dataclass(frozen=True)
class Limits:
    """Longest time that a rank may go without progress.

    Attributes:
        timeout: seconds, in every phase ("device": at least that phase's constant); None: in steps 20 times the slowest measured
            one, at least 30 and at most 300 seconds, and in other phases a constant per phase.
    """

    timeout: float | None = None

    def of(self, phase: str, slowest: float) -> float:
        """Return the limit of a phase in seconds; `slowest`: seconds of the slowest step so far."""
        if (
            self.timeout is not None
        ):  # a limit for one action, while a wait for the device may take the time of a whole step
            return max(self.timeout, _PHASES[phase]) if phase == "device" else self.timeout
        return _PHASES.get(phase, min(_LONGEST_LIMIT, max(_SHORTEST_LIMIT, _SLOWEST_STEPS * slowest)))


class Status:
    """The action that a rank is in and what it waits for; plain attributes, so that writing costs nothing.

    Attributes:
        number: number of the rank in the whole run.
        phase: "step", or a phase with its own limit (`Limits`).
        slowest: seconds of the slowest step so far, without the first.
        waiting: a message of the schedule, or the name of anything else.
        since: when the present wait, action or pause began (time.monotonic).
    """

    def __init__(self, rank: int, names: Names | None = None) -> None:
        self.names = names
        self.number = rank if names is None else names.number(rank)
        self.name = f"rank {rank}" if names is None else names.of(self.number)
        self.phase = "start-up"
        self.slowest = 0.0
        self.step = -1
        self.action: Action | None = None
        self.waiting: Message | str | None = None
        self.since = time.monotonic()
        self.done = 0

    def wait_for(self, action: Action, message: Message) -> None:
        self.action, self.waiting, self.since = action, message, time.monotonic()

    def enter(self, action: Action) -> None:
        self.action, self.waiting, self.since = action, None, time.monotonic()

    def wait_inside(self, what: str | None) -> None:
        """Note, inside the present action, that the rank waits for `what`; None: it does not any more."""
        self.waiting, self.since = what, time.monotonic()

    def wait_between(self, what: str) -> None:
        """Note, outside the schedule's actions, that the rank waits for `what` ("the loss")."""
        self.action, self.waiting, self.since = None, what, time.monotonic()

    def leave(self) -> None:
        """Note that the rank is between steps."""
        self.action, self.waiting, self.since = None, None, time.monotonic()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Apply the limit of `phase` inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def source(self) -> int | None:
        """The number in the run of the rank from which this one awaits a message."""
        if not isinstance(self.waiting, Message):
            return None
        source = self.waiting.channel.source
        return source if self.names is None else self.names.number(source)

    @property
    def kind(self) -> str:
        """Return "evaluation" or "step", for the message about a stall."""
        return "evaluation" if self.phase == "evaluation" else "step"

    @property
    def doing(self) -> str:
        """Return `"step 3"`, or the name of the rank's phase outside of steps."""
        if self.phase not in ("step", "first step", "device"):
            return self.phase
        return f"step {self.step}" if self.step >= 0 else "start-up"

    @property
    def words(self) -> str:
        """Return a clause: the present action, what the rank waits for and from which rank, and for how long."""
        for_seconds = f"for {time.monotonic() - self.since:.1f} s"
        step = self.doing
        waiting, action = self.waiting, self.action  # the executor continues while this is read
        if isinstance(waiting, str):
            where = f"{action.words}: " if action is not None else ""
            return f"{step}, {where}waits for {waiting} ({for_seconds})"
        if action is None:
            return f"start-up ({for_seconds})" if step == "start-up" else f"between actions, {step} ({for_seconds})"
        if waiting is not None:
            source = waiting.channel.source
            name = f"rank {source}" if self.names is None else self.names.on_line(source)
            return f"{step}, {action.words}: waits for {waiting.words} from {name} ({for_seconds})"
        return f"{step}, in {action.words} ({for_seconds})"

    def signed(self, text: str) -> str:
        """Return `text` after this rank's name, as every line of a report begins."""
        where = "" if self.names is None else self.names.place(self.number)
        return f"[rank {self.number}] {f'({where}) ' if where else ''}{text}"
