"""Recomputation: the same bits, twice the forwards, and what a forward keeps in between."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, blocks, gradients, mse, worst
from pipeloom.errors import ConfigError
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions

S = pl.schedules
SCHEDULES = [
    S.gpipe(2, 3),
    S.one_f_one_b(3, 4),
    S.interleaved(2, 5, 2),
    S.zb_h1(2, 4),
    S.zbv(2, 4),
    S.build("1f1b-overlap", 2, 5),
    S.build("dualpipe", 2, 4),
]


class Log:
    """What the layers of one pipeline did."""

    def __init__(self) -> None:
        self.forwards = 0
        self.inner: list[weakref.ref[Tensor]] = []

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.inner)


class Dropping(nn.Module):
    """Linear, dropout, a counter in a buffer; logs its forwards and holds weak references to what autograd keeps."""

    def __init__(self, seed: int, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.log = log
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.log.forwards += 1
        inner = torch.tanh(self.linear(x))  # tanh keeps its output
        self.log.inner.append(weakref.ref(inner))
        return x + self.dropout(inner) * inner


def run(schedule: pl.Schedule, recompute: Any, frozen: int = 0) -> tuple[Log, list[int], float, LocalPipeline]:
    """A step; the log, how many inner tensors were alive at each loss, and the loss."""
    log = Log()
    alive: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        alive.append(log.alive)
        return mse(output, target)

    def make(number: int) -> nn.Module:
        return Dropping(number, log).requires_grad_(number >= frozen)

    layers = [Layer(f"layer{number}", lambda number=number: make(number)) for number in range(schedule.positions)]
    pipeline = LocalPipeline(layers, schedule, loss=loss, options=RuntimeOptions(recompute=recompute))
    torch.manual_seed(5)
    x, y = batch(2 * schedule.microbatches)
    return log, alive, pipeline.step(x, y).item(), pipeline


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_same_bits_as_without(schedule: pl.Schedule, frozen: int) -> None:
    """Dropout draws the same mask again, counters count once, and a forward keeps its input only."""
    plain, kept, loss, reference = run(schedule, "none", frozen)
    log, held, again, pipeline = run(schedule, "full", frozen)
    assert again == loss
    assert worst(gradients(pipeline), gradients(reference)) == 0
    passes = schedule.positions * schedule.microbatches
    assert plain.forwards == passes
    assert log.forwards == 2 * passes - frozen * schedule.microbatches  # nothing to recompute before the first gradient
    assert sum(held) < sum(kept)
    assert max(held) <= 1 + frozen  # what the present layer's caller still holds
    for name, module in pipeline_modules(pipeline).items():
        assert module.seen.item() == schedule.microbatches, name


def pipeline_modules(pipeline: LocalPipeline) -> dict[str, Any]:
    return {name: module for assembly in pipeline._assemblies for name, module in assembly.modules.items()}


def test_selected_layers() -> None:
    schedule = S.interleaved(2, 5, 2)
    _, _, loss, reference = run(schedule, "none")
    log, _, again, pipeline = run(schedule, frozenset({"layer1", "layer3"}))
    assert again == loss
    assert worst(gradients(pipeline), gradients(reference)) == 0
    assert log.forwards == 4 * 5 + 2 * 5


def test_random_numbers_that_are_not_replayed_are_seen() -> None:
    """A layer that draws from a generator of its own gets another mask the second time: the gradients tell."""
    own = torch.Generator().manual_seed(0)

    class Private(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            with torch.no_grad():
                self.linear.weight.fill_(0.1)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(x.shape, generator=own) > 0.5
            return torch.tanh(self.linear(x) * mask)

    def step(recompute: Any) -> dict[str, Tensor]:
        own.manual_seed(0)
        layers = [Layer("private", Private), *blocks(1)]
        pipeline = LocalPipeline(layers, S.gpipe(2, 3), loss=mse, options=RuntimeOptions(recompute=recompute))
        pipeline.step(*batch(6))
        return gradients(pipeline)

    assert worst(step("full"), step("none")) > 1e-2


def test_what_it_may_be() -> None:
    with pytest.raises(ConfigError, match="recompute is 'some'; it must be 'none', 'full' or a frozenset"):
        RuntimeOptions(recompute="some")  # type: ignore[arg-type]
