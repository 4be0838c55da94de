"""Parameters without elements over two replicas, at every level of sharding: loss, every gradient, and checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, mse
from pipeloom import checkpoint
from pipeloom.config import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule.sharding import reduce_gradients, shard
from processes import run_ranks

RATE = 0.05
PLAIN = pl.schedules.interleaved(1, 2, chunks=3)
SCHEDULES = {0: PLAIN, 1: PLAIN, 2: reduce_gradients(PLAIN, 1), 3: shard(PLAIN, 2)}


class Partly(Block):
    """A block with a layer of no inputs, whose bias counts, and one of no outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with warnings.catch_warnings():  # torch warns that there is nothing to draw
            warnings.simplefilter("ignore")
            self.of_nothing, self.to_nothing = nn.Linear(0, WIDTH), nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.to_nothing(x)
        return super().forward(torch.cat((x, nothing), -1)) * (1 + self.of_nothing(nothing))


class Wholly(nn.Module):
    """A layer all of whose parameters are without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + (x @ self.weight.T).sum(-1, keepdim=True)


def layers() -> list[Layer]:
    return [Layer("first", lambda: Partly(1)), Layer("wholly", Wholly), Layer("last", lambda: Partly(2))]


def data(step: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of both replicas."""
    return [batch(4, seed=2 * step + replica) for replica in range(2)]


def trained(rank: int, folder: str) -> list[Any]:
    """One step at each level, from the checkpoint of the level before."""
    steps = []
    for step, level in enumerate((0, 1, 2, 3, 0)):
        options = RuntimeOptions(monitor=False, shard_gradients=level > 0)
        pipeline = Pipeline(layers(), SCHEDULES[level], loss=mse, mesh=Mesh.of(MeshShape(dp=2)), options=options)
        adam = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
        if step:
            checkpoint.load(folder, pipeline, adam)
        loss = float(pipeline.step(*data(step)[rank]))
        assert pipeline.sync is not None
        gradients = pipeline.sync.whole_gradients()
        steps.append((loss, {name: g if g is None else g.tolist() for name, g in gradients.items()}))
        adam.step()
        checkpoint.save(folder, step + 1, pipeline, adam)
        pipeline.close()
    return steps


@pytest.mark.core
def test_every_level_trains_as_one_process(tmp_path: Any) -> None:
    results = run_ranks(trained, 2, str(tmp_path))
    model = nn.Sequential()
    for layer in layers():
        model.add_module(layer.name, layer())
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(5):
        x, y = (torch.cat(each) for each in zip(*data(step), strict=True))
        adam.zero_grad()
        loss = mse(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        for steps in results:
            assert steps[step][0] == pytest.approx(loss.item(), rel=1e-6)
            assert steps[step][1].keys() == dict(model.named_parameters()).keys()
            for name, parameter in model.named_parameters():
                found = torch.tensor(steps[step][1][name]).view_as(parameter)
                torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6, msg=f"step {step}, {name}")
        adam.step()
