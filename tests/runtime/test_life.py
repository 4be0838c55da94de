"""What the system knows about another process: there, stopped, gone, or another machine's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from pipeloom.runtime.health.process_identity import identity, is_stopped, is_there

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")

SLEEPER = (
    "from pipeloom.runtime.health.process_identity import identity; import time\n"
    "print(identity(), flush=True); time.sleep(60)"
)


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, and its identity."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def wait_for(ready: Callable[[], bool], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not ready() and time.monotonic() < until:
        time.sleep(0.02)
    return ready()


def test_there_stopped_and_gone(sleeper: tuple[subprocess.Popen[str], str]) -> None:
    process, who = sleeper
    assert not is_stopped(who)
    assert is_there(identity()) is True
    assert is_there(who) is True
    process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: "T" in _state(process.pid))
    assert is_there(who) is True
    assert is_stopped(who)
    process.kill()
    assert wait_for(lambda: is_there(who) is False)  # a zombie: nobody has asked for its exit code
    process.wait()
    assert is_there(who) is False


def _state(number: int) -> str:
    with open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_another_machine_or_another_process_of_that_number() -> None:
    place, number, start = identity().split(" ")
    assert is_there(f"elsewhere{place} {number} {start}") is None
    assert is_there(f"{place} {number} {int(start) + 1}") is False
    assert is_there("") is None
