"""What a rank does with an exception: it tells all other ranks, in words that name the action, before it ends."""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Iterator

from pipeloom.errors import DistributedError
from pipeloom.runtime.monitor import Monitor
from pipeloom.runtime.status import Status
from pipeloom.runtime.transport import PeerGone
from pipeloom.schedule.channels import Message

_LOST = re.compile(r"[Cc]onnection (closed|reset)|gloo/transport|remote process exited|remote error|ncclRemoteError")
_PATIENCE_SECONDS = 1.5


class Alarm:
    """One rank's failures, told through its monitor."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.monitor: Monitor | None = None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An exception inside is told to the other ranks.

        Raises DistributedError in place of an error that only says that another rank has gone.
        """
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        status = self.status
        peer = _peer(error, status)
        lost = peer is None and isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        if peer is not None:
            text = f"{status.names.on_line(peer)} is gone: {status.name}, {status.words}: {error}"
        elif lost:  # inside a collective: which rank it was, others may know
            text = self._known_cause() or f"{status.name} has lost a peer: {status.words}: {error}"
        else:
            trace = "".join(traceback.format_exception(error)).rstrip()
            text = f"{status.name} failed: {status.words}\n{trace}"
        if self.monitor is not None:
            text = self.monitor.failed(text)
            self.monitor = None
        if peer is not None or lost:
            stopped = status.signed(f"stopped, because {text}")
            raise DistributedError(f"{status.signed(status.words)}\n{stopped}") from None

    def _known_cause(self) -> str | None:
        """Waits a moment for whoever knows who is gone."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.monitor is not None and time.monotonic() < until:
            cause = self.monitor.cause()
            if cause is not None:
                return cause
            time.sleep(0.05)
        return None


def _peer(error: Exception, status: Status) -> int | None:
    """The pipeline rank that is gone, if that is what the error says."""
    if isinstance(error, PeerGone):
        return error.rank
    if isinstance(status.waiting, Message) and isinstance(error, RuntimeError):  # gloo's words for a closed connection
        return status.waiting.channel.source
    return None
