"""Where a rank is, for the watchdog: written by the engine, read by the monitor thread."""

from __future__ import annotations

import time

from pipeloom.runtime.names import Names
from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message


class Status:
    """The action that a rank is in and what it waits for; plain attributes, so that writing costs nothing.

    Attributes:
        number: the rank's, in the whole run.
        waiting: a message of the schedule, or words for anything else.
    """

    def __init__(self, rank: int, names: Names = Names()) -> None:
        self.number = names.number(rank)
        self.names = names
        self.name = names.of(self.number)
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
        """Inside the action that is under way: waits for `what`; None: no longer."""
        self.waiting, self.since = what, time.monotonic()

    def wait_between(self, what: str) -> None:
        """Outside the schedule's actions: waits for `what` ("the loss")."""
        self.action, self.waiting, self.since = None, what, time.monotonic()

    def leave(self) -> None:
        """Between steps."""
        self.action, self.waiting, self.since = None, None, time.monotonic()

    @property
    def words(self) -> str:
        """One clause: what the rank is in, what it waits for and from whom, and for how long."""
        for_seconds = f"for {time.monotonic() - self.since:.1f} s"
        step = f"step {self.step}"
        if isinstance(self.waiting, str):
            where = f"{self.action.words}: " if self.action is not None else ""
            return f"{step}, {where}waits for {self.waiting} ({for_seconds})"
        if self.action is None:
            return f"between actions, {step} ({for_seconds})"
        if self.waiting is not None:
            source = self.names.on_line(self.waiting.channel.source)
            return f"{step}, {self.action.words}: waits for {self.waiting.words} from {source} ({for_seconds})"
        return f"{step}, in {self.action.words} ({for_seconds})"

    def signed(self, text: str) -> str:
        """`text` with this rank's number in front: how every line of a report begins."""
        where = self.names.place(self.number)
        return f"[rank {self.number}] {f'({where}) ' if where else ''}{text}"
