"""A pipeline starts the sum of a stage's gradients as soon as they are there, beside the backwards that are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.config import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from processes import run_ranks


class Wide(nn.Linear):
    """In fp64, so that its gradients have a bucket of their own."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


CASES: dict[str, tuple[pl.Schedule, list[type[nn.Module] | Any]]] = {
    "two stages": (pl.schedules.interleaved(1, 2, 2), [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)]),
    "two stages, split": (pl.schedules.interleaved_zb(1, 2), [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)]),
    "one stage": (pl.schedules.gpipe(1, 2), [lambda: nn.Linear(4, 4), Wide]),
}


def started(rank: int) -> dict[str, list[int]]:
    """For each backward of the first layer in the second step: how many sums of gradients had started by then."""
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    return {case: second_step(mesh, *CASES[case]) for case in CASES}


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
        if tensor.numel() > 1:  # the sum of the micro-batches' weights has one element
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


@pytest.mark.dist
def test_the_last_layers_sum_starts_before_the_first_layers_last_backward() -> None:
    for found in run_ranks(started, 2):
        for case, seen in found.items():
            assert seen[0] == 0, case  # not a micro-batch too early
            assert seen[-1] == 1, case
