"""What torch's own pipeline runtime does where ours gives serial gradients or one sentence.

A test that fails here says that torch has changed, and that a claim of ours is no longer true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import pipeloom as pl
from awkward import MODELS, SPLIT
from models import WIDTH, Block, batch, blocks, serial, worst
from processes import run_ranks
from torch_runtime import TorchPipeline

S = pl.schedules
GPIPE = S.gpipe(2, 4)
pytestmark = [pytest.mark.torch_behaviour]


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x).flatten(0, 1)).view(x.shape)


def quiet_failures(rank: int, folder: Path) -> dict[str, Any]:
    """What runs to its end, and is wrong."""
    x, y = batch(8)
    wanted = serial(blocks(2), x, y, [2] * 4)[1]
    pipeline = TorchPipeline(rank, blocks(2), GPIPE, folder)
    pipeline.step(x, y)
    once = pipeline.gradients()
    pipeline.evaluate(x, y)
    evaluated = pipeline.gradients()
    torch_schedule = pipeline.runtime
    (stage,) = torch_schedule._stages
    buffers = [info.buffer for infos in stage.args_recv_info.values() for info in infos if info.buffer is not None]
    second = TorchPipeline(rank, blocks(2), GPIPE, folder)
    second.step(x, y)
    second.step(x, y)
    twice = second.gradients()
    normed = TorchPipeline(rank, [lambda: Normed(0), lambda: Normed(1)], GPIPE, folder)
    normed.step(x, y)
    (module,) = normed.modules.values()
    return {
        "one step": worst(once, {name: wanted[name] for name in once}),
        "evaluation before the optimizer": worst(evaluated, {name: wanted[name] for name in once}),
        "two steps": worst(twice, {name: 2 * wanted[name] for name in twice}),
        "counter": module.norm.num_batches_tracked.item(),
        "buffers": len({buffer.data_ptr() for buffer in buffers}),
    }


def test_gradients_are_rescaled_and_counters_advanced(tmp_path: Path) -> None:
    first, last = run_ranks(quiet_failures, 2, tmp_path)
    for report in (first, last):
        assert report["one step"] <= 1e-6
        assert report["evaluation before the optimizer"] == pytest.approx(0.75, rel=1e-3)  # divided by m = 4 again
        assert report["two steps"] == pytest.approx(0.375, rel=1e-3)  # (g / 4 + g) instead of 2 g
        assert report["counter"] == 5  # four micro-batches, and one of the shape discovery
    assert last["buffers"] == 4  # one a micro-batch


def frozen(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    layers = MODELS["frozen leading layers"]()
    x, y = batch(4)
    pipeline = TorchPipeline(rank, layers, SPLIT, folder)
    pipeline.step(x, y)
    want = serial(layers, x, y, [2, 2])[1]
    own = {f"layer{stage}" for stage in SPLIT.stages_of[rank]}
    return sorted(pipeline.gradients()), sorted(name for name in want if name.partition(".")[0] in own)


def test_frozen_leading_layers_with_split_backward(tmp_path: Path) -> None:
    """The first stage that trains, on rank 0, gets no gradient for its matrices."""
    got, want = run_ranks(frozen, 2, tmp_path)[0]
    assert "layer2.linear.weight" in want
    assert "layer2.linear.weight" not in got
