"""The lane on a GPU, with streams that only write down what they are asked: the order, not the device."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.ops.segments import Compute, Done, Values, in_order
from pipeloom.runtime import Layer, LocalPipeline
from pipeloom.runtime.overlap import CommStream


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

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"time on {stream.name}")

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
    lane = CommStream(torch.device("cuda"), timed)
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
    assert log == [*begun, "time on computation", waited, "time on computation"] if timed else log == [*begun, waited]
    assert lane.exposed() == ({"all-to-all": 0.25} if timed else None)
    assert lane.exposed() == ({} if timed else None)


class OnDevice(torch.Tensor):
    """A tensor that counts as one on a GPU, and writes down the streams that it is protected for."""

    name = ""
    log: list[str]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        self.log.append(f"{self.name} is used on {stream.name}")


def on_device(name: str, log: list[str]) -> OnDevice:
    tensor = torch.ones(2).as_subclass(OnDevice)
    tensor.name, tensor.log = name, log
    return tensor


def test_tensors_that_cross_streams_are_protected_from_reuse(log: list[str]) -> None:
    """What a communication reads, for its stream; what it makes, for the stream that waits for it, behind the wait."""
    lane = CommStream(torch.device("cuda"))

    class Made:
        def wait(self) -> Values:
            return on_device("result", log), None

    pending = lane.start(Made, (on_device("input", log), None, "splits"))
    assert log[-2:] == ["event on communication", "input is used on communication"]
    lane.wait(pending, "dispatch")
    assert log[-2:] == ["computation waits for event of communication", "result is used on computation"]


@dataclass
class Plan:
    """Any other object that travels between segments: it may hold tensors."""

    order: torch.Tensor


def test_tensors_inside_objects_are_protected_too(log: list[str]) -> None:
    """Those that the communication makes are; those that it reads are kept until the computation waits for it."""
    gc.freeze()  # what earlier tests of this process left takes a second to walk
    lane = CommStream(torch.device("cuda"))
    given = Plan(on_device("known", log))
    alive = weakref.ref(given.order)

    class Made:
        def __init__(self, *others: Any) -> None:
            self.others = others

        def wait(self) -> Values:
            return (*self.others, {"plans": [Plan(on_device("made", log))]})

    pending = lane.start(lambda plan=given: Made(plan), (given,))  # type: ignore[misc]
    lane.wait(pending, "dispatch")
    assert log[-2:] == ["computation waits for event of communication", "made is used on computation"]
    assert not any(line.startswith("known") for line in log)
    pending = lane.start(Made, (given,))
    del given
    gc.collect()
    assert alive() is not None
    lane.wait(pending, "dispatch")
    gc.collect()
    gc.unfreeze()
    assert alive() is None


class Keeping:
    """A communication whose backward reads what its forward was given."""

    name, quick = "keeping", False

    def start(self, values: Values) -> Done:
        return Done(values)

    def start_backward(self, gradients: Values, saved: Values) -> Done:
        return Done((gradients[0] * saved[1], *gradients[1:]))


class Kept(torch.nn.Module):
    def segments(self) -> tuple[Any, ...]:
        return (
            Compute("before", lambda values: (values[0] * 2, torch.full((2,), 3.0))),
            Keeping(),
            Compute("after", lambda values: (values[0],)),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return in_order(self.segments(), (x,))[0]


def test_a_backward_communication_protects_what_its_forward_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved tensors are freed on the compute stream while the communication reads them on its own."""
    reads: list[Values] = []
    start = CommStream.start

    def noted(self: CommStream, begin: Any, given: Values) -> Any:
        reads.append(given)
        return start(self, begin, given)

    monkeypatch.setattr(CommStream, "start", noted)
    layers = [Layer("first", lambda: torch.nn.Linear(2, 2)), Layer("kept", Kept)]
    schedule = pl.schedules.build("1f1b-overlap", 1, 2)
    pipeline = LocalPipeline(layers, schedule, loss=lambda out, target: (out - target).square().mean())
    pipeline.step(torch.ones(2, 2), torch.zeros(2, 2))
    saved = [
        given
        for given in reads
        if any(isinstance(v, torch.Tensor) and torch.equal(v, torch.full((2,), 3.0)) for v in given)
    ]
    assert len(saved) == len(reads) == 4  # there and back, of two micro-batches
