"""A lock on an open file or directory, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import time

LOCK_SECONDS = 10.0  # for another holder to end: a process that was killed may take a moment to go
_POLL_SECONDS = 0.1


def locked(descriptor: int) -> bool:
    """Return whether the open file is this process's alone from now on, until the descriptor is closed.

    True too on a file system without locks, where nobody can tell.
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
