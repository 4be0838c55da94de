"""Is another rank's process still there? On this machine the system knows; from elsewhere only its signs of life tell."""

from __future__ import annotations

import os
import time
from pathlib import Path


def identity() -> str:
    """This process among all those that were ever here: machine, process namespace, number, start; "" where unknown."""
    return f"{_here()} {os.getpid()} {_stat(os.getpid())[1]}" if _here() else ""


def is_stopped(who: str) -> bool:
    """Return whether the process with this `identity` is known to be stopped (SIGSTOP, a debugger)."""
    place, _, process = who.partition(" ")
    if not place or place != _here():
        return False
    try:
        number, _, start = process.partition(" ")
        state, since = _stat(int(number))
        return since == start and state in "Tt"
    except OSError:
        return False


def seconds_running() -> float | None:
    """Return how long this process has been there; None where the system does not tell."""
    try:
        ticks = float(_stat(os.getpid())[1])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def machine(*namespaces: str) -> str:
    """This machine since its start, and these namespaces of this process in it; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in namespaces)])
    except OSError:
        return ""


def _here() -> str:
    return machine("pid")


def _stat(number: int) -> tuple[str, str]:
    """(state, start in clock ticks since boot) of a process; OSError when there is none (proc(5), /proc/PID/stat)."""
    text = Path(f"/proc/{number}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], fields[19]
