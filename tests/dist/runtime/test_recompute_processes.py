"""R and the block (R;B) in processes: bitwise the gradients of the schedule without them, over data-parallel replicas too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import Block, batch, mse
from pipeloom.config import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline
from pipeloom.schedule import Schedule, simulate
from pipeloom.schedule.transforms import recompute
from processes import run_ranks

S = pl.schedules
SCHEDULES = [S.one_f_one_b(2, 4), S.interleaved(2, 4), S.zb_h1(2, 4), S.zbv(2, 4), S.dualpipev(2, 4)]


class Noisy(Block):
    """A block with torch's dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


def step(schedule: Schedule, layers: list[Layer], mesh: Mesh) -> tuple[list[Tensor], int]:
    torch.manual_seed(dist.get_rank())
    pipeline = Pipeline(layers, schedule, loss=mse, mesh=mesh)
    loss = pipeline.step(*batch(2 * schedule.microbatches + 1, seed=mesh.dp.index))
    gradients = [parameter.grad for parameter in pipeline.parameters()]
    peak = pipeline.stats.peak_activations
    pipeline.close()
    return [loss, *gradients], peak


def work(rank: int) -> list[str]:
    """The schedules whose results differ, or whose peak is not the simulated one."""
    mesh = Mesh.of(MeshShape(pp=2, dp=2))
    assert mesh is not None
    layers = [Layer(f"block{at}", lambda at=at: Noisy(at)) for at in range(4)]
    wrong = []
    for plain in SCHEDULES:
        want, _ = step(plain, layers, mesh)
        for schedule in (recompute(plain), recompute(plain, whole=True)):
            got, peak = step(schedule, layers, mesh)
            same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            if not same or peak != simulate(schedule).peak_activations[mesh.place.pp]:
                wrong.append(f"{schedule} rank {rank}: same {same}, peak {peak}")
    return wrong


@pytest.mark.core
def test_every_bit_over_two_replicas() -> None:
    assert run_ranks(work, 4) == [[]] * 4
