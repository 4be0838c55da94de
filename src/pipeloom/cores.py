"""The number of cores that this process may use. Processes that have a core each can wait by polling."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores that this process may run on; if the system does not tell, the machine's cores."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
