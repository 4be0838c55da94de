"""Recomputation: the same bits, twice the forwards, and what a forward keeps in between."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from dying import run_until_dead
from models import WIDTH, Block, batch, gradients, mse, serial, worst
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions

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

    def __init__(self, seed: int, log: Log, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.logs = (log,)  # a tuple: what a recomputed forward changes in an object is undone
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen += 1
        self.logs[0].forwards += 1
        inner = torch.tanh(self.linear(x))  # tanh keeps its output
        self.logs[0].inner.append(weakref.ref(inner))
        return x + self.dropout(inner) * inner


def run(schedule: pl.Schedule, recompute: Any, frozen: int = 0) -> tuple[Log, list[int], float, LocalPipeline]:
    """A step; the log, how many inner tensors were alive at each loss, and the loss."""
    log = Log()
    alive: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        alive.append(log.alive)
        return mse(output, target)

    def make(number: int) -> nn.Module:
        return Dropping(number, log, counts=len(schedule.routes) == 1).requires_grad_(number >= frozen)

    layers = [Layer(f"layer{number}", lambda number=number: make(number)) for number in range(schedule.positions)]
    pipeline = LocalPipeline(layers, schedule, loss=loss, options=RuntimeOptions(recompute=recompute))
    torch.manual_seed(5)
    x, y = batch(2 * schedule.microbatches)
    return log, alive, pipeline.step(x, y).item(), pipeline


def pipeline_modules(pipeline: LocalPipeline) -> dict[str, Any]:
    return dict(pipeline.modules)


@pytest.mark.core
def test_selected_layers() -> None:
    schedule = S.interleaved(2, 5, 2)
    _, _, loss, reference = run(schedule, "none")
    log, _, again, pipeline = run(schedule, frozenset({"layer1", "layer3"}))
    assert again == loss
    assert worst(gradients(pipeline), gradients(reference)) == 0
    assert log.forwards == 4 * 5 + 2 * 5


class Normed(nn.Module):
    """Batch norm: its kernel changes the running statistics without their version."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block, self.norm = Block(seed), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))  # type: ignore[no-any-return]


class Averaged(nn.Module):
    """Reads a buffer, changes it, and reads it again; another is replaced, a third is one tensor in two places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = Block(seed).linear
        for name in ("mean", "ema", "steps"):
            self.register_buffer(name, torch.ones(1))
        self.register_buffer("table", torch.ones(2, WIDTH))
        self.other = nn.Module()
        self.other.register_buffer("steps", self.steps)

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(self.linear(x * self.mean.clone() * self.table[0].clone()))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * out.mean())
            self.ema = 0.5 * self.ema + out.std()
            self.steps.mul_(1.1)
            self.table[0] *= 0.95
        return torch.tanh(out * self.mean.clone() * self.ema * self.other.steps.clone())


class InsideOut(Averaged):
    """With a pass inside, for which the forward runs again before it has ended."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + 0.1 * slope


def state(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{n}.{inner}": b.clone() for n, module in modules.items() for inner, b in module.named_buffers()}


@pytest.mark.core
@pytest.mark.parametrize("kind", [Averaged, InsideOut])
@pytest.mark.parametrize("schedule", SCHEDULES[:-1], ids=repr)
def test_buffers_are_those_of_one_process_and_are_read_as_the_first_time(schedule: pl.Schedule, kind: Any) -> None:
    layers = [Layer(f"layer{at}", lambda at=at: kind(at)) for at in range(schedule.positions)]
    x, y = batch(2 * schedule.microbatches)
    modules = {layer.name: layer() for layer in layers}
    twins = [Layer(name, lambda module=module: module) for name, module in modules.items()]
    _, want = serial(twins, x, y, [2] * schedule.microbatches)
    assert all(gradient.isfinite().all() for gradient in want.values())
    for recompute in ("none", "full"):
        pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(recompute=recompute))
        pipeline.step(x, y)
        assert worst(gradients(pipeline), want) <= 1e-5
        for name, value in state(pipeline_modules(pipeline)).items():
            torch.testing.assert_close(value, state(modules)[name], msg=name)


TWO_ROUTES = [S.build("dualpipe", 2, 4), S.build("chimera", 2, 4)]


@pytest.mark.core
@pytest.mark.parametrize("schedule", TWO_ROUTES, ids=repr)
def test_statistics_over_two_routes_are_refused(schedule: pl.Schedule) -> None:
    def layers(make: Any) -> list[Layer]:
        return [Layer(f"layer{at}", lambda at=at: make(at)) for at in range(schedule.positions)]

    with pytest.raises(
        ConfigError, match=r"layer 'layer0' has running statistics \(BatchNorm1d\), .* '(dualpipe|chimera)'"
    ):
        LocalPipeline(layers(Normed), schedule, loss=mse)
    x, y = batch(8)
    frozen = layers(lambda at: Normed(at).eval())
    pipeline = LocalPipeline(frozen, schedule, loss=mse)
    pipeline.step(x, y)
    assert worst(gradients(pipeline), serial(frozen, x, y, [2] * 4)[1]) <= 1e-5


def _counting(rank: int, schedule: pl.Schedule) -> None:
    log = Log()
    pipeline = Pipeline([Layer(f"layer{n}", lambda n=n: Dropping(n, log)) for n in range(2)], schedule, loss=mse)
    pipeline.step(*batch(8))


@pytest.mark.core
@pytest.mark.parametrize(
    "schedule", [TWO_ROUTES[0], pl.schedules.chimera(ranks=2, microbatches=1)], ids=["half each", "all or nothing"]
)
def test_replicas_on_two_ranks_do_not_count_a_part_each(schedule: pl.Schedule, tmp_path: Path) -> None:
    """A single micro-batch comes through one of the two replicas only, and the other would not count it."""
    for end in run_until_dead(
        _counting, 2, tmp_path, schedule
    ):  # one raises; whoever waits for it may be ended by its watchdog
        assert end.code != 0
        assert re.search(r"the first step changed buffer 'layer\d.seen'", end.words), end.words


class Beside(nn.Module):
    """Returns one tensor twice: as two outputs, or as an output and a named tensor."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named

    def forward(self, x: Tensor) -> Any:
        return x, ({"again": x} if self.named else x)


class ChangingFirst(nn.Module):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return x.relu_() * (1 if other is None else other)


class Reading(nn.Module):
    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        return x + again


@pytest.mark.core
@pytest.mark.parametrize("named", [False, True])
def test_a_layer_that_changes_a_tensor_with_another_of_its_memory_is_refused(named: bool) -> None:
    """In one process the other one would change with it."""
    layers = [
        Layer("block", lambda: Block(0)),
        Layer("beside", lambda: Beside(named), writes=("again",) if named else ()),
        Layer("changing", ChangingFirst),
        *([Layer("reader", Reading, reads=("again",))] if named else []),
    ]
    options = RuntimeOptions(recompute=frozenset({"changing"}))
    with pytest.raises(UsageError, match="ChangingFirst is recomputed, and its forward changes its input in place"):
        LocalPipeline(layers, S.gpipe(1, 2), loss=mse, options=options).step(*batch(4))


class Jacobian(Block):
    def forward(self, x: Tensor) -> Tensor:
        out, pull = torch.func.vjp(torch.sin, x)
        return super().forward(out) + pull(out)[0]


@pytest.mark.core
def test_the_layer_is_named_that_torch_cannot_recompute() -> None:
    layers = [Layer(f"layer{n}", lambda n=n: Jacobian(n)) for n in range(2)]
    pipeline = LocalPipeline(layers, S.gpipe(2, 2), loss=mse, options=RuntimeOptions(recompute="full"))
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        pipeline.step(*batch(4))
    assert "(Jacobian is recomputed: leave the layer out of `recompute`)" in caught.value.__notes__
