"""Identity and state of processes on this machine, from the system (proc(5))."""

from __future__ import annotations

import os
import time
from pathlib import Path


def identity() -> str:
    """Return an identity of this process that is never reused: machine, process namespace, number, start; "" if unknown."""
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
    """Return the seconds since the start of this process; None if the system does not provide it."""
    try:
        ticks = float(_stat(os.getpid())[1])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def machine(*namespaces: str) -> str:
    """Return an identity of this machine since its boot and of these namespaces of this process; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in namespaces)])
    except OSError:
        return ""


def _here() -> str:
    return machine("pid")


def _stat(number: int) -> tuple[str, str]:
    """Return (state, start in clock ticks since boot) of a process (proc(5), /proc/PID/stat). Raises OSError if there is none."""
    text = Path(f"/proc/{number}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any characters
    return fields[0], fields[19]
