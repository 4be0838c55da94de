"""R and the block (R;B), executed: bitwise the gradients of the schedule without them, dropout on, and only the inputs held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, mse
from pipeloom.errors import UsageError
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import LocalPipeline
from pipeloom.schedule import Schedule, simulate
from pipeloom.schedule.transforms import recompute
from segmented import Experts

S = pl.schedules


class Noisy(Block):
    """A block with torch's dropout, a counter and a running mean."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.dropout, self.calls = nn.Dropout(0.4), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(self.dropout(x) * (1 + self.calls / 8)) + self.mean


def result(schedule: Schedule, modules: list[nn.Module]) -> tuple[list[Any], LocalPipeline]:
    """Losses, gradients and buffers of two steps without an optimizer, every micro-batch with other data."""
    torch.manual_seed(3)
    pipeline = LocalPipeline(modules, schedule, loss=mse)
    losses = [pipeline.step(*batch(2 * schedule.microbatches + 1, seed)) for seed in range(2)]
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return [*losses, *gradients, *(buffer for module in modules for buffer in module.buffers())], pipeline


SCHEDULES = {
    "1f1b": S.one_f_one_b(2, 4),
    "interleaved": S.interleaved(2, 4),
    "zb-h1": S.zb_h1(2, 4),
    "zbv": S.zbv(2, 4),
    "dualpipev": S.dualpipev(2, 4),
    "one rank": S.gpipe(1, 3),
}


@pytest.mark.parametrize("whole", [False, True], ids=["block", "whole"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [Noisy, lambda seed: Experts(seed, 3, None)], ids=["dropout", "segments"])
def test_every_bit_is_that_of_the_schedule_without_recomputation(name: str, whole: bool, kind: Any) -> None:
    plain = SCHEDULES[name]
    want, _ = result(plain, [kind(seed) for seed in range(4)])
    schedule = recompute(plain, whole)
    got, pipeline = result(schedule, [kind(seed) for seed in range(4)])
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert tuple(stats.peak_activations for stats in pipeline.stats) == simulate(schedule).peak_activations


@pytest.mark.parametrize("whole", [False, True], ids=["block", "whole"])
def test_a_recomputed_schedule_equals_one_process(whole: bool) -> None:
    schedule = recompute(S.zb_h1(2, 4), whole, [(0, 0), (0, 3), (1, 1), (1, 2)])  # some stages and micro-batches
    pl.verify([Noisy(seed) for seed in range(4)], schedule, *batch(9), loss=mse)


class Wide(nn.Module):
    """Saves 32 times the bytes of its input, and has a table that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(8, 16 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).square())


def held(schedule: Schedule) -> tuple[int, int]:
    """The most bytes alive in a step, and the most when a loss is computed, at the end of a forward."""
    live, at_loss = LiveBytes(), [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        at_loss.append(live.now)
        return mse(output, target)

    pipeline = LocalPipeline([Wide() for _ in range(4)], schedule, loss=loss)
    pipeline.step(*batch(64))
    inputs, targets = batch(64)
    at_loss.clear()
    with live:
        pipeline.step(inputs, targets)
    return live.peak, max(at_loss[: schedule.microbatches])


def test_until_r_only_the_stages_input_is_held() -> None:
    """All forwards first: 8 micro-batches of 4 layers, of which a whole stage of 4, or one layer, is there at once."""
    plain = S.gpipe(1, 8)
    (everything, _), (whole, at_loss), (block, _) = map(held, (plain, recompute(plain, whole=True), recompute(plain)))
    assert whole < 0.25 * everything
    assert block < 0.7 * whole
    assert at_loss < 0.4 * whole  # F saves nothing, not even while it runs, and keeps no copy of the table


def test_what_cannot_be_recomputed_is_refused() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2.0))

    class Differentiates(Changes):
        def forward(self, x: Tensor) -> Tensor:
            slope = torch.autograd.grad(self.linear(x).square().sum(), self.linear.weight)[0].norm()
            return self.linear(x) / slope

    schedule = recompute(S.one_f_one_b(2, 2), whole=True)
    with pytest.raises(UsageError, match="stage 1 is recomputed, and a layer changes the stage's input in place"):
        LocalPipeline([Block(0), Changes()], schedule, loss=mse).step(*batch(4))
    with pytest.raises(UsageError, match=r"recompute it in blocks \(R;B\)"):
        LocalPipeline([Block(0), Differentiates()], schedule, loss=mse).step(*batch(4))
    pl.verify([Block(0), Differentiates()], recompute(S.one_f_one_b(2, 2)), *batch(4), loss=mse)


def test_evaluation_of_a_recomputed_schedule_recomputes_nothing() -> None:
    modules = [Noisy(seed) for seed in range(2)]
    pipeline = LocalPipeline(modules, recompute(S.one_f_one_b(2, 2), whole=True), loss=mse)
    pipeline.evaluate(*batch(4))
    assert [module.calls for module in modules] == [2, 2]
