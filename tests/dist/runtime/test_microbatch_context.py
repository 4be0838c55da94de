"""Every layer that asks is told which micro-batch it works on, and how much that one counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.runtime import Layer, LocalPipeline

pytestmark = pytest.mark.core


class Asking(nn.Module):
    """Keeps what it was told with the value that it worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.told: list[tuple[float, MicrobatchContext]] = []

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        assert microbatch is not None
        self.told.append((float(x.detach()[0, 0]), microbatch))
        return x * self.scale


class Any_(nn.Module):
    """Takes any keyword, so it must get the user's only."""

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        assert set(keywords) == {"extra"}
        return x


@pytest.mark.parametrize("family", ["gpipe", "interleaved", "zbv"])
def test_shares_and_numbers_reach_the_layers_under_any_schedule(family: str) -> None:
    asking = [Asking() for _ in range(4)]
    layers = [Layer(f"layer{at}", partial(asking.__getitem__, at)) for at in range(4)]
    layers.append(Layer("any", Any_))
    schedule = pl.schedules.build(family, ranks=2, microbatches=3)
    pipeline = LocalPipeline(layers, schedule, loss=lambda y, t: (y - t).square().mean())
    rows = torch.arange(7.0).reshape(7, 1)  # micro-batches of 3, 2 and 2 rows start with 0, 3 and 5
    pipeline.step(rows, torch.zeros(7, 1), extra=torch.ones(7, 1))
    expected = {0.0: (0, 3 / 7), 3.0: (1, 2 / 7), 5.0: (2, 2 / 7)}
    for layer in asking:
        assert {first: (told.index, told.share) for first, told in layer.told} == expected
