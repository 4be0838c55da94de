"""Signals to a worker: requests to stop after the present step, or to save and continue.

A handler only records the request. Workers exchange their requests in every step, so all of them stop, or save, after the
same one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass

STOP, INTERRUPT, SAVE = 1, 2, 4  # bits: SIGTERM, SIGINT, SIGUSR1


def together(flags: Iterable[float]) -> int:
    """Return the bits that any rank has set."""
    bits = 0
    for flag in flags:
        bits |= int(flag)
    return bits


@dataclass
class Requests:
    """The requests of one worker. The first signal that ends the run decides its exit code."""

    stop: bool = False
    interrupt: bool = False
    save: bool = False

    @property
    def flags(self) -> int:
        """Return the requests as bits."""
        return STOP * self.stop + INTERRUPT * self.interrupt + SAVE * self.save

    @property
    def ends(self) -> bool:
        """Return whether the run is to end."""
        return self.stop or self.interrupt

    def note(self, number: int) -> None:
        """Record a signal."""
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.ends:
            self.interrupt = number == signal.SIGINT
            self.stop = not self.interrupt

    def watch_save(self) -> None:
        """From now on SIGUSR1 requests a checkpoint, also one that was received while it was blocked."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda number, frame: self.note(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def watch_end(self) -> None:
        """From now on SIGTERM and SIGINT request a stop; before, they end the process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame: self.note(number))
