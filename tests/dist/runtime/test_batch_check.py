"""Ranks of one replica that are passed different batches are told so before the step; replicas have batches of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.replicas import BatchCheck
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(x if mask is None else x * mask))


def pipeline_of(shape: MeshShape, every: int) -> Pipeline:
    layers = [Layer("first", Masked), Layer("last", lambda: nn.Linear(WIDTH, WIDTH))]
    options = RuntimeOptions(monitor=False, check_every=every)
    return Pipeline(layers, S.gpipe(shape.pp, 2), loss=mse, mesh=Mesh.of(shape), options=options)


def refusal(pipeline: Pipeline, inputs: Any, targets: Any, **keywords: Any) -> str:
    try:
        pipeline.step(inputs, targets, **keywords)
    except DistributedError as error:
        return str(error)
    return ""


def checked(rank: int) -> list[str]:
    """Four ranks, two pipelines: ranks 0 and 2, and 1 and 3."""
    pipeline = pipeline_of(MeshShape(pp=2, dp=2), every=1)
    first, replica = pipeline.rank == 0, pipeline.mesh.place.dp
    x, y = batch(4, seed=replica)
    mask = torch.ones(4, 1, 1)
    here = rank == 3
    told = [
        refusal(pipeline, x, y, mask=mask),
        refusal(pipeline, x if first else x.to("meta"), y, mask=mask if first else None),
        refusal(pipeline, (x,), y + here),
        refusal(pipeline, x, y, mask=torch.ones(1, 1) if here else mask),
        refusal(pipeline, x[:1] if here else x, y),  # too few rows for the micro-batches
    ]
    pipeline.close()
    return told


def test_a_difference_is_named_on_every_rank() -> None:
    for told in run_ranks(checked, 4):
        assert told[:2] == ["", ""]
        assert told[2].startswith(
            "step 2: 'targets of replica 1' differs between rank 1 (pp 0, dp 1) and rank 3 (pp 1, dp 1); pass the same"
        )
        assert "'mask of replica 1' is float32[4, 1, 1] on rank 1 (pp 0, dp 1) and float32[1, 1] on rank 3" in told[3]
        assert (
            "'inputs of replica 1' is float32[4, 3, 6] on rank 1 (pp 0, dp 1) and float32[1, 3, 6] on rank 3" in told[4]
        )


def every_second(rank: int) -> list[str]:
    """Tensor-parallel ranks with different batches in every step after the first."""
    pipeline = pipeline_of(MeshShape(tp=2), every=2)
    x, y = batch(4)
    told = [refusal(pipeline, x + rank * bool(step), y) for step in range(3)]
    pipeline.close()
    return told


def test_batches_are_compared_in_the_first_step_and_at_an_interval() -> None:
    for told in run_ranks(every_second, 2):
        assert told[:2] == ["", ""]
        assert "'inputs' differs between rank 0 (tp 0) and rank 1 (tp 1)" in told[2]


@pytest.mark.parametrize(
    ("ranks", "every", "steps"),
    [(2, 3, [0, 3, 6]), (2, 0, []), (1, 1, [])],
    ids=["an interval", "never", "one rank in each replica"],
)
def test_when_a_comparison_is_due(ranks: int, every: int, steps: list[int]) -> None:
    class OfShape:
        shape = MeshShape(pp=ranks, dp=2)

    check = BatchCheck(OfShape(), every)  # type: ignore[arg-type]
    assert [step for step in range(8) if check.due()] == steps
