"""A process that gets no time is not dead; one that is gone, or on another machine and silent, is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from pipeloom.runtime import monitor as watching
from pipeloom.runtime.life import identity, is_there
from pipeloom.runtime.monitor import Monitor
from pipeloom.runtime.status import Status

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")

SLEEPER = "from pipeloom.runtime.life import identity; import time; print(identity(), flush=True); time.sleep(60)"


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
    assert is_there(identity()) is True
    assert is_there(who) is True
    process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: "T" in _state(process.pid))
    assert is_there(who) is True
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


@pytest.mark.parametrize("silent", ["stopped", "elsewhere"])
def test_the_watchdog_waits_for_a_process_that_is_there(
    silent: str, sleeper: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, who = sleeper
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(watching, "DEAD_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(watching, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watching, "REPORT_SECONDS", 0.1)
    store = dist.HashStore()
    store.set("run/process/1", who if silent == "stopped" else f"elsewhere{who}")
    store.set("run/beat/1", "1")
    ended: list[str] = []
    watch = Monitor(store, "run", Status(0), [1], 2, timeout=60, end=ended.append)
    watch.start()
    if silent == "stopped":
        time.sleep(1.5)
        assert not ended
        assert watch.cause() is None
        process.kill()
    assert wait_for(lambda: bool(ended))
    assert "rank 1 is dead: no sign of life for" in str(watch.cause())
    watch.close()
