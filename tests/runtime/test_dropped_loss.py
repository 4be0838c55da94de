"""A pipeline that is dropped while its last loss is on the way to or from it."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom import schedules as S
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.loss import LossBroadcast, PendingLoss
from processes import run_ranks

pytestmark = pytest.mark.dist


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(1.0)
        return gradient


class Slow(nn.Module):
    """Its backward takes a second, in which the last stage has long sent its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SlowGradient.apply(self.inner(x))  # type: ignore[no-any-return, no-untyped-call]


def steps(rank: int, drops: int) -> list[float]:
    """Two pipelines after each other in one process group; the rank `drops` drops each after its step, the other does not."""
    torch.manual_seed(0)
    if drops == 0:  # the loss is sent when rank 0 has dropped what would receive it
        start = LossBroadcast.start

        def late(self: LossBroadcast, share: torch.Tensor | None) -> PendingLoss:
            time.sleep(2.5 if share is not None else 0.0)
            return start(self, share)

        LossBroadcast.start = late  # type: ignore[method-assign]
    losses = []
    for _ in range(2):
        layers = [Slow(), nn.Linear(4, 4)]
        x = torch.randn(4, 4)
        options = RuntimeOptions(transport="individual", timeout=40)
        pipeline = Pipeline(layers, S.one_f_one_b(2, 2), loss=mse, options=options)
        pending = pipeline.forward_backward(x, x)
        if rank == drops:
            del pipeline, pending
            gc.collect()
        else:
            losses.append(float(pending.wait()))
            pipeline.close()
    return losses


@pytest.mark.parametrize("drops", [1, 0], ids=["sender", "receiver"])
def test_a_dropped_pipeline_still_sends_and_takes_its_loss(drops: int) -> None:
    found = run_ranks(steps, 2, drops, timeout=120.0)
    assert len(found[1 - drops]) == 2
    assert all(0 < value < 100 for value in found[1 - drops])
