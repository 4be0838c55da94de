"""The loss of a float64 model reaches every rank, whatever the default dtype is; a scaled loss that overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import pipeloom as pl
from models import WIDTH, batch, blocks, mse, serial
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules
SCHEDULES = {"one route": S.one_f_one_b(2, 3), "two routes": S.chimera(2, 3)}


def layers() -> list[Layer]:
    def build(layer: Layer) -> nn.Module:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # the same weights under both
        try:
            return layer().double()
        finally:
            torch.set_default_dtype(default)

    return [Layer(layer.name, lambda layer=layer: build(layer)) for layer in blocks(2)]


def steps(rank: int, schedule: pl.Schedule, dp: int, default: torch.dtype) -> list[float]:
    x, y = (value.double() for value in batch(7))
    torch.set_default_dtype(default)
    mesh = Mesh.of(MeshShape(pp=2, dp=dp))
    pipeline = Pipeline(layers(), schedule, loss=mse, mesh=mesh)
    losses = [pipeline.step(x, y).item(), pipeline.evaluate(x, y).item()]
    pipeline.close()
    return losses


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "dp"), [("one route", 1), ("two routes", 1), ("one route", 2)])
def test_a_float64_loss_arrives(name: str, dp: int, default: torch.dtype) -> None:
    x, y = (value.double() for value in batch(7))
    want: Any = serial(layers(), x, y, [3, 2, 2])[0].item()
    for losses in run_ranks(steps, 2 * dp, SCHEDULES[name], dp, default):
        assert losses == pytest.approx([want, want], rel=1e-6)


def dropped(rank: int, schedule: pl.Schedule) -> float:
    """The loss of the second of two steps, when nobody has asked for that of the first."""
    x, y = (value.double() for value in batch(7))
    pipeline = Pipeline(layers(), schedule, loss=mse)
    pipeline.forward_backward(x, y)
    loss = pipeline.forward_backward(2 * x, y).wait().item()
    pipeline.close()
    return loss


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_loss_that_nobody_asked_for_is_not_taken_for_the_next(name: str) -> None:
    x, y = (value.double() for value in batch(7))
    want: Any = serial(layers(), 2 * x, y, [3, 2, 2])[0].item()
    assert run_ranks(dropped, 2, SCHEDULES[name]) == pytest.approx([want, want], rel=1e-6)


class Steep(nn.Module):
    """A linear layer whose gradient overflows, though its output does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.detach() + (y - y.detach()) * 1e30


def scaled(rank: int) -> tuple[bool, float]:
    """(whether the step was made, the scale after it), where the first rank alone has an overflow."""
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**40, process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))
    layers = [Layer("steep", Steep), Layer("last", lambda: nn.Linear(WIDTH, WIDTH))]
    pipeline = Pipeline(layers, pl.schedules.one_f_one_b(2, 2), loss=lambda out, target: scaler.scale(mse(out, target)))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    before = [p.detach().clone() for p in pipeline.parameters()]
    pipeline.step(*batch(2))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    made = not all(map(torch.equal, before, pipeline.parameters()))
    pipeline.close()
    return made, scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """With the scaler that docs/parallel.md names."""
    assert run_ranks(scaled, 2) == [(False, 2.0**39)] * 2
