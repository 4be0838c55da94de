"""Report of an exception to all other ranks, with the name of the action, before the process exits."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pipeloom.errors import DistributedError, from_machine
from pipeloom.runtime.health.status import Status, communicates
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.schedule.channels import Message

if TYPE_CHECKING:
    import torch

_PATIENCE_SECONDS = 1.5  # for the rank that failed to tell the cause: its watchdog's poll and a message on the way
_REPORTED_KEY = "__pipeloom_reported__"  # in an error's __dict__, which works for every class of errors
_TIMED_OUT = re.compile(r"timed out|time-?out", re.IGNORECASE)
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(?:cc|cpp|h|hpp):\d+\]\s*")
_ADVICE = re.compile(r"\.?\s*This is typically caused by a remote worker crashing\..*", re.DOTALL)


class PeerGone(RuntimeError):
    """The connection to a rank is closed.

    Attributes:
        rank: the rank in this process's pipeline.
    """

    def __init__(self, rank: int, reason: object) -> None:
        super().__init__(str(reason))
        self.rank = rank


def lost_peer(error: BaseException) -> bool:
    """Return whether `error` is from a communication with another rank, by its type and by where it was raised, not by its text:
    an error in the user's code never is.
    """
    if isinstance(error, PeerGone):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, (NotImplementedError, RecursionError)):
        return False
    # Communications allocate buffers, and read the device, which reports failures of earlier kernels there.
    if from_machine(error) is not None or type(error).__name__ == "AcceleratorError":
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and communicates(frames[-1].f_code.co_filename)


def timed_out(error: BaseException) -> bool:
    """Return whether a communication timed out, so that the other rank may be alive.

    torch's backends have no type for it, so the text decides; only errors for which `lost_peer` is true are read.
    """
    return _TIMED_OUT.search(str(error)) is not None


def plain_words(error: BaseException) -> str:
    """Return the error's text without the places in C++ sources and the general advice that torch and gloo add to it."""
    return _ADVICE.sub("", _CPP_PLACE.sub("", str(error))).strip()


class FailureReporter:
    """Reporter of one rank's failures, through its watchdog."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.watchdog: Watchdog | None = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an exception inside to the other ranks.

        Raises DistributedError in place of an error that only reports the loss of another rank.
        """
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self.tell(error)
            raise

    @contextlib.contextmanager
    def waiting(self, what: str, phase: str | None = None) -> Iterator[None]:
        """As `reporting`, for a communication outside the schedule's actions: the rank waits for `what` inside."""
        with self.reporting(), self.status.during(phase or self.status.phase):
            self.status.wait_between(what)
            yield
            self.status.leave()

    def waiting_for_device(self, device: torch.device) -> AbstractContextManager[None]:
        """As `waiting`, for a value of `device` that the host reads: a GPU may compute it only after messages of other ranks.

        Under NCCL a wait for a message blocks a stream, not the host, so a lost message is noticed here.
        """
        return contextlib.nullcontext() if device.type == "cpu" else self.waiting("its GPU", "device")

    def tell(self, error: BaseException) -> None:
        """Report an error to the other ranks, once; raises DistributedError as `reporting` does."""
        if error.__dict__.get(_REPORTED_KEY):
            return
        status, watchdog, place = self.status, self.watchdog, self.status.place_of(error)
        if not lost_peer(error):
            if watchdog is not None:
                trace = "".join(traceback.format_exception(error)).rstrip()
                what = " ".join("".join(traceback.format_exception_only(error)).split())
                watchdog.failed(f"{status.name} failed: {place}: {what}", (status.number,), trace)
            error.__dict__[_REPORTED_KEY] = True
            return
        late = timed_out(error)
        # A connection may be closed because its other end has failed, and itself waits for the cause before it reports that.
        patience = _PATIENCE_SECONDS if late else 2 * _PATIENCE_SECONDS
        known = watchdog.cause(patience) if watchdog is not None else None
        if known is not None:
            text, blames = known.text, known.blames
        else:
            # A peer that is late may be alive, and a lost message is not a fault of any rank.
            peer, why = None if late else _peer(error, status), plain_words(error)
            blames = () if peer is None else (peer,)
            if late:
                what = f"the {status.kind} stalls: {status.name},"
            elif peer is None:
                what = f"{status.name} has lost a peer:"
            else:  # not "is gone": no watchdog has reported that, and it may have closed its connections while alive
                what = f"the connection to {status.names.of(peer)} is closed: {status.name},"
            text = f"{what} {place}: {why}"
        if watchdog is not None:
            text = watchdog.failed(text, blames).shown_on(watchdog.output)
        stopped = status.signed(f"stopped, because {text}")
        reported = DistributedError(f"{status.signed(status.words)}\n{stopped}")
        reported.__dict__[_REPORTED_KEY] = True
        raise reported from None


def _peer(error: BaseException, status: Status) -> int | None:
    """Return the number in the run of the lost rank, if the error names one."""
    if isinstance(error, PeerGone):
        return status.names.number(error.rank)
    return status.source if isinstance(status.waiting, Message) else None
