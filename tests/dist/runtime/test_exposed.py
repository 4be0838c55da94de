"""The time for which computation stands still for experts: with the exchange of counts before the tokens', too."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.config import load
from pipeloom.models import layers, token_loss
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

LATE = 1.0  # seconds, of each of two micro-batches


class Late(nn.Module):
    """Keeps one rank busy before the experts of every micro-batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def step(rank: int, late: int, spread: dict[str, Any], schedule: pl.Schedule) -> float:
    """Seconds that computation stood still in a step in which rank `late` comes late."""
    nodes = spread.get("nodes", 1)
    mesh = Mesh.of(MeshShape(1, 2, 1, 2, nodes))
    assert mesh is not None
    shape = load("tiny", {"model.num_hidden_layers": 1, "model.num_experts": 4, "model.hidden_size": 16}).model
    levels = (mesh.inside, mesh.across) if nodes > 1 else (None, None)
    expert = ExpertParallel(mesh.ep, nodes, *levels, spread.get("chunks", 1), spread.get("blocks", 1))
    embedding, block, head = layers(shape, 5, torch.float32, "cpu", None, expert)
    model = [embedding, Layer("late", lambda: Late(LATE if rank == late else 0.0)), block, head]
    pipeline = Pipeline(model, schedule, loss=token_loss(shape), mesh=mesh, options=RuntimeOptions(monitor=False))
    tokens = torch.randint(0, 256, (4, 8), generator=torch.Generator().manual_seed(rank))
    pipeline.step(tokens, tokens)
    pipeline.close()
    assert pipeline.exposed is not None
    return pipeline.exposed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "schedule"),
    [
        ({}, pl.schedules.gpipe(1, 2)),
        ({}, pl.schedules.one_f_one_b_overlap(1, 2)),
        ({"nodes": 2}, pl.schedules.gpipe(1, 2)),
        ({"chunks": 2}, pl.schedules.gpipe(1, 2)),
        ({"blocks": 2}, pl.schedules.gpipe(1, 2)),
    ],
    ids=["flat", "pairs", "two levels", "chunks", "blocks"],
)
def test_waiting_for_the_counts_is_reported(spread: dict[str, Any], schedule: pl.Schedule) -> None:
    """The rank that is not late waits for the other's counts, twice."""
    assert (
        run_ranks(step, 2, 1, spread, schedule)[0] > 1.2 * LATE
    )  # the other rank comes late too, by what the machine needs
