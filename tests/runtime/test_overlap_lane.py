"""The lane on a GPU, with streams that only write down what they are asked: the order, not the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeloom.ops.segments import Values
from pipeloom.runtime.overlap import Lane


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cuda")

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("time")

    def synchronize(self) -> None:
        self.log.append("host waits")

    def elapsed_time(self, other: FakeEvent) -> float:
        return 250.0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    streams = [FakeStream("computation", found)]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("communication", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(found))
    return found


class Exchange:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append(f"begins on {torch.cuda.current_stream('cuda').name}")  # type: ignore[attr-defined]

    def wait(self) -> Values:
        self.log.append(f"is waited for on {torch.cuda.current_stream('cuda').name}")  # type: ignore[attr-defined]
        return torch.ones(2), None, "splits"


@pytest.mark.parametrize("timed", [False, True])
def test_computation_waits_on_the_device_when_it_needs_the_result_and_not_before(log: list[str], timed: bool) -> None:
    lane = Lane(torch.device("cuda"), timed)
    pending = lane.start(lambda: Exchange(log), (torch.ones(2), None))
    begun: list[Any] = [
        "communication waits for all of computation",
        "begins on communication",
        "is waited for on communication",
        "event on communication",
    ]
    assert log == begun
    values = lane.wait(pending, "dispatch")
    assert values[1:] == (None, "splits")
    waited = "computation waits for event of communication"
    assert log == [*begun, "time", waited, "time"] if timed else log == [*begun, waited]
    assert lane.exposed() == (0.25 if timed else None)
    assert lane.exposed() == (0.0 if timed else None)
