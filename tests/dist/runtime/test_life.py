"""Whether another process is known to be stopped: running, stopped, gone, of another machine, or another of its number."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeloom.runtime.health.status import is_stopped
from processes import wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")

SLEEPER = (
    "from pipeloom.runtime.health.status import identity; import time\nprint(identity(), flush=True); time.sleep(600)"
)


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, and its identity."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_stopped_and_gone(sleeper: tuple[subprocess.Popen[str], str]) -> None:
    process, who = sleeper
    assert not is_stopped(who)
    process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: "T" in _state(process.pid))
    assert is_stopped(who)
    machine, number, start = who.split(" ")
    assert not is_stopped(f"elsewhere{machine} {number} {start}")
    assert not is_stopped(f"{machine} {number} {int(start) + 1}")  # a later process of that number
    assert not is_stopped("")
    process.kill()
    process.wait()
    assert not is_stopped(who)


def _state(number: int) -> str:
    with open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
