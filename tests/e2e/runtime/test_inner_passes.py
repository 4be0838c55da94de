"""Passes that a layer starts itself: their gradients are theirs, and the training gradient is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from inner_passes import KINDS, Adversarial, Force, Functional, Learned, Nested, Reentrant, inner_layers
from models import batch, gradients, mse, serial, worst
from pipeloom.config import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.batch import split_sizes
from pipeloom.schedule.model import Schedule
from processes import run_ranks


def data(rows: int) -> tuple[Tensor, Tensor]:
    x, y = batch(rows)
    return x.double(), y.double()


def agree(kind: Any, schedule: Schedule, **options: Any) -> None:
    """Two steps, whose gradients add up, have the loss and gradients of one process."""
    layers, (x, y) = inner_layers(kind, schedule.positions), data(2 * schedule.microbatches + 1)
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(**options))
    want_loss, want = serial(layers, x, y, split_sizes(len(x), schedule.microbatches))
    for _ in range(2):
        assert pipeline.step(x, y).item() == pytest.approx(want_loss.item(), rel=1e-6)
    assert worst(gradients(pipeline), {name: 2 * gradient for name, gradient in want.items()}) <= 1e-9


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_a_pass_inside_a_layer_leaves_the_training_gradient_alone(name: str, kind: Any, recompute: str) -> None:
    if kind is Functional and recompute == "full":
        with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's own checkpoint refuses transforms
            agree(kind, pl.schedules.build(name, 2, 4), recompute=recompute)
        return
    agree(kind, pl.schedules.build(name, 2, 4), recompute=recompute)


@pytest.mark.parametrize("kind", [Force, Adversarial, Nested])
def test_weight_gradients_of_the_head_that_wait_for_the_cool_down(kind: Any) -> None:
    agree(kind, pl.schedules.defer_last_stage_weights(pl.schedules.build("1f1b", 2, 4), 2))


def test_what_the_inner_pass_returns_can_be_differentiated() -> None:
    """With respect to the weights too, through a linear layer whose weight gradient is put off."""
    differentiable: list[bool] = []

    class Keeping(Learned):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.body(x).square().mean()
            (slope,) = torch.autograd.grad(inner, self.first.weight, create_graph=True)
            differentiable.append(slope.requires_grad)
            return x + self.body(x) + slope.square().sum()

    agree(Keeping, pl.schedules.build("zb-h1", 2, 4))
    assert all(differentiable)


MESHES = [
    (MeshShape(pp=2), "zb-h1", {"main_gradients": True}),
    (MeshShape(pp=2), "1f1b", {"main_gradients": True, "recompute": "full"}),
    (MeshShape(dp=2), "1f1b", {}),
    (MeshShape(dp=2), "1f1b", {"recompute": "full"}),
    (MeshShape(dp=2), "zb-h1", {"shard_gradients": True}),
]


def kinds(options: dict[str, Any]) -> list[Any]:
    return [kind for kind in (*KINDS, TwiceReentrant) if kind is not Functional or options.get("recompute") != "full"]


def _replicas(rank: int) -> list[tuple[float, dict[str, Any]]]:
    results = []
    for shape, name, options in MESHES:
        for kind in kinds(options):
            mesh = Mesh.of(shape)
            assert mesh is not None
            schedule = pl.schedules.build(name, shape.pp, 4 // shape.dp)
            pipeline = Pipeline(inner_layers(kind, 2), schedule, loss=mse, mesh=mesh, options=RuntimeOptions(**options))
            x, y = (part.chunk(shape.dp)[mesh.place.dp] for part in data(8))
            for _ in range(3):  # a bucket is reduced early from the second step on
                pipeline.zero_grad()
                loss = pipeline.step(x, y)
            assert pipeline.sync is not None
            found: dict[str, Any] = {}
            for bucket in pipeline.sync.buckets:
                for slot, view in bucket.views(bucket.flat):
                    found[slot.held.name] = view.tolist()
            results.append((loss.item(), {} if options.get("shard_gradients") and mesh.place.dp else found))
            pipeline.close()
    return results


class TwiceReentrant(Reentrant):
    """A weight whose gradient the outer pass accumulates before the last inner one does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_replicas_and_main_gradients() -> None:
    ranks = run_ranks(_replicas, 2, timeout=200)
    x, y = data(8)
    at = 0
    for shape, name, options in MESHES:
        for kind in kinds(options):
            want_loss, want = serial(inner_layers(kind, 2), x, y, [2, 2, 2, 2])
            found: dict[str, Any] = {}
            for rank in ranks:
                loss, part = rank[at]
                assert loss == pytest.approx(want_loss.item(), rel=1e-6)
                found |= part
            got = {key: torch.tensor(value, dtype=torch.float64) for key, value in found.items()}
            if not options.get("shard_gradients"):
                assert worst(got, want) <= 1e-9, (shape, name, options, kind)
            at += 1
