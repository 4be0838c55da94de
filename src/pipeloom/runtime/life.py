"""Is another rank's process still there? On this machine the system knows; from elsewhere only its signs of life tell."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def identity() -> str:
    """This process among all those that were ever here: machine, process namespace, number, start; "" where unknown."""
    try:
        return f"{_here()} {os.getpid()} {_stat(os.getpid())[1]}"
    except OSError:
        return ""


def is_there(who: str) -> bool | None:
    """Whether the process with this `identity` is there and not dead; None: it is not this system's to know.

    A process that is stopped, or that a busy machine gives no time, is there.
    """
    place, _, process = who.partition(" ")
    try:
        if place != _here():
            return None
    except OSError:
        return None
    number, _, start = process.partition(" ")
    try:
        state, since = _stat(int(number))
    except OSError:
        return False
    return since == start and state not in "ZX"


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _stat(number: int) -> tuple[str, str]:
    """(state, start in clock ticks since boot) of a process; OSError when there is none (proc(5), /proc/PID/stat)."""
    text = Path(f"/proc/{number}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], fields[19]
