"""Faults made on purpose, so that what happens then can be tested and shown."""

from __future__ import annotations

import os
import signal
from typing import Any

from pipeloom.schedule.actions import Action


class InjectedFault(RuntimeError):
    """Raised where a fault asked for it."""


class Faults:
    """Reads a fault (an object with `kind`, and the values of that kind) for one rank; without one, does nothing.

    Kinds: swap-microbatches (a, b): the first stage gets their inputs exchanged. drop-send (rank, number): that rank's send
    of this number, from 0, is lost. raise (rank, action): an exception there. kill (rank, step): SIGKILL as that step
    starts.
    """

    def __init__(self, fault: Any, rank: int) -> None:
        self._kind = getattr(fault, "kind", None)
        self._fault = fault
        self._mine = getattr(fault, "rank", None) == rank
        self._sent = 0

    def input_of(self, microbatch: int) -> int:
        """The micro-batch whose inputs this one really gets."""
        if self._kind != "swap-microbatches":
            return microbatch
        swapped: dict[int, int] = {self._fault.a: self._fault.b, self._fault.b: self._fault.a}
        return swapped.get(microbatch, microbatch)

    def drops(self, sends: int) -> range:
        """Which of the next `sends` sends are lost, as positions among them."""
        first, self._sent = self._sent, self._sent + sends
        if self._kind != "drop-send" or not self._mine:
            return range(0)
        at = self._fault.number - first
        return range(at, at + 1) if 0 <= at < sends else range(0)

    def before(self, action: Action) -> None:
        if self._kind == "raise" and self._mine and str(action) == str(self._fault.action):
            raise InjectedFault(f"--debug.fault raised at {action}")

    def at_step(self, step: int) -> None:
        if self._kind == "kill" and self._mine and step == self._fault.step:
            os.kill(os.getpid(), signal.SIGKILL)
