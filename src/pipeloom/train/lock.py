"""A lock on an open file or directory, released at the latest when the process that holds it ends."""

from __future__ import annotations

import fcntl
import time

LOCK_SECONDS = 10.0  # to wait for another holder: a process that was killed may take a moment to exit
_POLL_SECONDS = 0.1


def locked(descriptor: int) -> bool:
    """Lock an open file exclusively until its descriptor is closed. Return False if another process holds it for LOCK_SECONDS.

    On a file system without locks nothing is locked, and the result is True.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return True
        else:
            return True
