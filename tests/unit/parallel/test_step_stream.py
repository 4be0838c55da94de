"""Reductions that autograd starts by hooks are in order with the step's stream: shown by streams that keep a log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.ops.deferred import StageBackward
from pipeloom.parallel import data, mesh
from pipeloom.parallel.buckets import BucketParameter
from pipeloom.parallel.data import StepStream
from pipeloom.parallel.mesh import Axis
from pipeloom.shapes.mesh import MeshShape


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("hook", ["step", "node"])
def test_work_of_a_hook_is_in_order_with_the_step_on_both_sides(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    streams = {name: FakeStream(name, log) for name in ("step", "node")}
    current = [streams["step"]]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    stream = StepStream(torch.device("cuda", 0))
    stream.begin()
    with on(streams[hook]), stream.in_order():
        log.append(f"reduces on {current[-1].name}")
    around = [["step waits for node"], ["node waits for step"]] if hook == "node" else [[], []]
    assert log == [*around[0], "reduces on step", *around[1]]


def test_a_reduction_that_a_backward_starts_is_started_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Noted(StepStream):
        def begin(self) -> None:
            log.append("begins")

        @contextlib.contextmanager
        def in_order(self) -> Iterator[None]:
            log.append("in order")
            yield
            log.append("done")

    def reduced(flat: torch.Tensor, axis: Axis) -> Any:
        log.append("reduces")
        return SimpleNamespace(wait=lambda: flat)

    monkeypatch.setattr(data, "StepStream", Noted)
    monkeypatch.setattr(data, "start_all_reduce", reduced)
    two, one = Axis((0, 1), 0, None), Axis((0,), 0, None)
    replicas: Any = SimpleNamespace(shape=MeshShape(dp=2), dp=two, edp=two, tp=one, everyone=two)
    weight = nn.Parameter(torch.ones(3))
    passes = StageBackward()
    sync = data.GradientSync([BucketParameter("weight", weight, (0,))], replicas, stage_backward=passes)
    for _ in range(2):  # the first step shows where passes of a layer's own are, and reduces at its end
        log.clear()
        sync.begin()
        sync.last_backward(0)
        passes.run([weight.sum()], [torch.ones(())])
        log.append("backward over")
        sync.stage_done(0)
        sync.finish()
    assert log == ["begins", "in order", "reduces", "done", "backward over"]


def test_a_group_of_some_ranks_is_made_without_the_device_of_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to a device, the default group's communicator would be split, which takes ranks that do not call."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 1))
    made: list[Any] = []

    def new_group(ranks: list[int], **options: Any) -> str:
        made.append((ranks, options, world.bound_device_id))
        if len(made) > 1:
            raise RuntimeError("no group")
        return "group"

    monkeypatch.setattr(mesh.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(mesh.dist, "new_group", new_group)
    monkeypatch.setattr(mesh.dist, "get_rank", lambda: 0)
    assert mesh.group_of_members((2, 3), backend="gloo") == "group"
    assert made == [([2, 3], {"use_local_synchronization": True, "backend": "gloo"}, None)]
    assert world.bound_device_id == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="no group"):
        mesh.group_of_members((2, 3))
    assert world.bound_device_id == torch.device("cuda", 1)
