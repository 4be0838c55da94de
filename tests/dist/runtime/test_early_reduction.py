"""A pipeline starts the sum of a stage's gradients as soon as they are there, beside the backwards that are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.ops.segments import Compute, Segment, in_order
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks
from segmented import NotedMove

pytestmark = pytest.mark.core


class Wide(nn.Linear):
    """In fp64, so that its gradients have a bucket of their own."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class Reentrant(nn.Module):
    """A weight used inside a reentrant checkpoint, whose backward is a pass of its own, and behind it; in fp64 too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Wide()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(checkpoint(self.linear, x, use_reentrant=True))
        return out


class Twice(nn.Linear):
    """Its weight is used on both sides of a communication, so that two backward passes add to its gradient."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def segments(self) -> tuple[Segment, ...]:
        use = Compute("use", lambda values: (nn.functional.linear(values[0], self.weight, self.bias),))
        return use, NotedMove("exchange", []), use

    def forward(self, x: Tensor) -> Tensor:
        (out,) = in_order(self.segments(), (x,))
        return out  # type: ignore[no-any-return]


CASES: dict[str, tuple[pl.Schedule, list[type[nn.Module] | Any]]] = {
    "two stages": (pl.schedules.interleaved(1, 2, 2), [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)]),
    "two stages, split": (pl.schedules.interleaved_zb(1, 2), [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)]),
    "one stage": (pl.schedules.gpipe(1, 2), [lambda: nn.Linear(4, 4), Wide]),
}


def started(rank: int) -> tuple[dict[str, list[int]], list[float]]:
    """For each backward of the first layer in the second step: how many sums of gradients had started by then; a gradient."""
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    return {case: second_step(mesh, *CASES[case]) for case in CASES}, first_gradient(mesh)


def first_gradient(mesh: Mesh) -> list[float]:
    """After a first step of one micro-batch, of the weight that two passes add to; every replica has the same batch."""
    layers = [Layer("l0", lambda: nn.Linear(4, 4)), Layer("l1", Reentrant)]
    options = RuntimeOptions(monitor=False, transport="individual", seed=3)
    pipeline = Pipeline(layers, pl.schedules.gpipe(1, 1), loss=nn.functional.mse_loss, mesh=mesh, options=options)
    pipeline.step(torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.float64))
    (weight,) = [p for name, p in pipeline.named_parameters() if name == "l1.linear.weight"]
    pipeline.close()
    return [] if weight.grad is None else weight.grad.flatten().tolist()


def second_step(mesh: Mesh, schedule: pl.Schedule, kinds: list[Any]) -> list[int]:
    layers = [Layer(f"l{at}", kind) for at, kind in enumerate(kinds)]
    options = RuntimeOptions(monitor=False, transport="individual")
    pipeline = Pipeline(layers, schedule, loss=nn.functional.mse_loss, mesh=mesh, options=options)
    targets = torch.zeros(4, 4, dtype=torch.float64 if Wide in kinds else torch.float32)
    pipeline.step(torch.ones(4, 4), targets)
    sums: list[int] = []
    seen: list[int] = []
    original = dist.all_reduce

    def logged(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if tensor.numel() > 3:  # a step's own numbers are three
            sums.append(tensor.numel())
        return original(tensor, *arguments, **keywords)

    pipeline.modules["l0"].register_full_backward_pre_hook(lambda *_: seen.append(len(sums)))
    dist.all_reduce = logged
    try:
        pipeline.step(torch.ones(4, 4), targets)
    finally:
        dist.all_reduce = original
    assert pipeline.sync is not None
    assert len(sums) == len(pipeline.sync.buckets) == 2
    pipeline.close()
    return seen


def test_the_last_layers_sum_starts_before_the_first_layers_last_backward() -> None:
    options = RuntimeOptions(seed=3)
    layers = [Layer("l0", lambda: nn.Linear(4, 4)), Layer("l1", Reentrant)]
    serial = LocalPipeline(layers, pl.schedules.gpipe(1, 2), loss=nn.functional.mse_loss, options=options)
    serial.step(torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.float64))
    want = dict(serial.named_parameters())["l1.linear.weight"].grad
    assert want is not None
    for found, gradient in run_ranks(started, 2):
        assert gradient == pytest.approx(
            want.flatten().tolist(), rel=1e-6
        )  # a first step starts no sum within a backward
        for case, seen in found.items():
            assert seen[0] == 0, case  # not a micro-batch too early
            assert seen[-1] == 1, case


def after_two_passes(rank: int) -> list[float]:
    """The gradient of the second step, the first in which sums may start early; each replica has data of its own."""
    original = dist.all_reduce

    def ended(*arguments: Any, **keywords: Any) -> Any:
        """A sum that has read all that it sums by the time it has started."""
        work = original(*arguments, **keywords)
        if work is not None:
            work.wait()
        return work

    dist.all_reduce = ended
    options = RuntimeOptions(monitor=False, transport="individual", seed=3)
    mesh, loss = Mesh.of(MeshShape(dp=2)), nn.functional.mse_loss
    pipeline = Pipeline([Layer("l0", Twice)], pl.schedules.gpipe(1, 1), loss=loss, mesh=mesh, options=options)
    x = torch.arange(16.0).view(4, 4)[2 * rank : 2 * rank + 2] / 16
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.step(x, torch.zeros(2, 4))
    gradient = dict(pipeline.named_parameters())["l0.weight"].grad
    pipeline.close()
    assert gradient is not None
    return gradient.flatten().tolist()  # type: ignore[no-any-return]


def test_a_sum_waits_for_every_backward_of_a_stage_with_communications() -> None:
    options, loss = RuntimeOptions(seed=3), nn.functional.mse_loss
    alone = LocalPipeline([Layer("l0", Twice)], pl.schedules.gpipe(1, 2), loss=loss, options=options)
    alone.step(torch.arange(16.0).view(4, 4) / 16, torch.zeros(4, 4))
    want = dict(alone.named_parameters())["l0.weight"].grad
    assert want is not None
    for gradient in run_ranks(after_two_passes, 2):
        assert gradient == pytest.approx(want.flatten().tolist(), rel=1e-5)
