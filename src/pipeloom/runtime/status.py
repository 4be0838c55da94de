"""Where a rank is, for the watchdog: written by the engine, read by the monitor thread."""

from __future__ import annotations

import time

from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message


class Status:
    """The action that a rank is in and the message that it waits for; plain attributes, so that writing costs nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = -1
        self.action: Action | None = None
        self.waiting: Message | None = None
        self.since = time.monotonic()
        self.done = 0

    def wait_for(self, action: Action, message: Message) -> None:
        self.action, self.waiting, self.since = action, message, time.monotonic()

    def enter(self, action: Action) -> None:
        self.action, self.waiting, self.since = action, None, time.monotonic()

    def leave(self) -> None:
        """Between steps."""
        self.action, self.waiting, self.since = None, None, time.monotonic()

    @property
    def words(self) -> str:
        """One clause: what the rank is in, what it waits for and from whom, and for how long."""
        for_seconds = f"for {time.monotonic() - self.since:.1f} s"
        step = f"step {self.step}"
        if self.action is None:
            return f"between actions, {step} ({for_seconds})"
        if self.waiting is not None:
            return (
                f"{step}, {self.action.words}: waits for {self.waiting.words} from rank {self.waiting.channel.source} "
                f"({for_seconds})"
            )
        return f"{step}, in {self.action.words} ({for_seconds})"
