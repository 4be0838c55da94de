"""I now, W later: gradients equal the fused backward's, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, gradients, mse, serial, worst
from one_process import Plain, differences
from pipeloom.errors import UsageError
from pipeloom.ops import deferred
from pipeloom.ops.deferred import add_weight_gradient
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.schedule.actions import Action
from pipeloom.schedule.model import Schedule
from pipeloom.shapes.cut import even_sizes
from processes import run_ranks

pytestmark = pytest.mark.core


def zero_bubble(m: int = 6) -> Schedule:
    return pl.schedules.build("zb-h1", 2, m)


def agree(layers: list[Layer], schedule: Schedule, rows: int = 13, tolerance: float = 1e-6) -> LocalPipeline:
    """A step of `schedule` has the loss and gradients of one process; returns the pipeline."""
    x, y = batch(rows)
    pipeline = LocalPipeline(layers, schedule, loss=mse)
    loss = pipeline.step(x, y)
    want_loss, want = serial(layers, x, y, even_sizes(rows, schedule.microbatches))
    assert abs(loss - want_loss) <= 1e-6
    assert worst(gradients(pipeline), want) <= tolerance
    return pipeline


def seeded(seed: int, make: Callable[[], nn.Module]) -> Layer:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make()

    return Layer(f"layer{seed}", build)


class LinearLast(nn.Module):
    """Its last operation hands the output's gradient to a linear layer as it is: the queue holds the received buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(x))


class Shared(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [LinearLast, Shared, lambda: Block(1)])
def test_gradients_are_those_of_the_fused_backward(make: Callable[[], nn.Module]) -> None:
    agree([seeded(i, make) for i in range(4)], zero_bubble())


class Mixed(nn.Module):
    """fp32 weights, products in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block(x).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", [zero_bubble(), pl.schedules.build("1f1b", 2, 6, None, {"cooldown": "split"})])
def test_autocast_inside_a_layer(schedule: Schedule) -> None:
    pipeline = agree([seeded(i, Mixed) for i in range(4)], schedule, tolerance=2e-3)
    assert {gradient.dtype for gradient in gradients(pipeline).values()} == {torch.float32}


@pytest.mark.parametrize("split", [True, False])
def test_whole_backwards_beside_split_ones_add_in_place(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any backward is split, the layers' own function adds all weight gradients, autograd those of no micro-batch."""
    schedule = pl.schedules.build("1f1b", 2, 6, None, {"cooldown": "split"} if split else None)
    assert sum(str(cell).count("B") for program in schedule.programs for cell in program) == 12 - split
    added: list[nn.Parameter] = []
    queued: list[Any] = []
    put = deferred.WeightGradQueue.put

    def note(queue: deferred.WeightGradQueue, *work: Any, **more: Any) -> None:
        queued.append(work)
        put(queue, *work, **more)

    def add(weight: nn.Parameter, *rest: Any) -> None:
        added.append(weight)
        add_weight_gradient(weight, *rest)

    monkeypatch.setattr(deferred, "add_weight_gradient", add)
    monkeypatch.setattr(deferred.WeightGradQueue, "put", note)
    agree([seeded(i, Shared) for i in range(2)], schedule)
    assert len(added) == (2 * 2 * 6 if split else 0)
    assert len(queued) == (2 if split else 0)  # a backward that is one B keeps nothing for later


@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_the_first_trainable_stage_after_frozen_ones_gets_its_gradient(frozen: int) -> None:
    def build(i: int) -> nn.Module:
        return Block(i).requires_grad_(i >= frozen)

    agree([Layer(f"block{i}", lambda i=i: build(i)) for i in range(4)], pl.schedules.build("zb-h1", 4, 6))


def test_activations_go_at_i_and_weight_inputs_at_w() -> None:
    """Between I and W only what the weight gradient needs is alive."""
    pipeline = agree([seeded(i, LinearLast) for i in range(2)], zero_bubble())
    assert pipeline.peak_activations == pl.simulate(zero_bubble()).peak_activations


class Clamped(Plain):
    """A hook changes a gradient in place that a linear layer's output has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        inner.register_hook(lambda gradient: gradient.clamp_(-0.001, 0.001))
        return inner + self.linear(x)


class OfABuffer(Plain):
    """A linear layer of a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.3)
        return x + self.linear(self.mean)


@pytest.mark.parametrize("kind", [Clamped, OfABuffer])
def test_what_changes_between_i_and_w_is_refused(kind: Callable[[], nn.Module]) -> None:
    """The gradient by a hook, or the input by another forward; one B finds both as they were."""
    assert differences([Plain, Plain, Plain, kind], pl.schedules.build("1f1b", 2, 4)) == []
    with pytest.raises(UsageError, match="changed in place between its I and its W"):
        differences([Plain, Plain, Plain, kind], pl.schedules.build("zb-h1", 2, 4))


class LinearFirst(nn.Module):
    """Its first operation is a linear layer: the queue holds the received activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


def _late(m: int) -> Schedule:
    """Two ranks whose W all come at the end: every received tensor is held while later ones arrive."""
    orders = [
        [("F", mb) for mb in range(m)] + [("I", mb) for mb in range(m)],
        [(kind, mb) for mb in range(m) for kind in "FI"],
    ]
    programs = [
        [Action(kind, rank, mb) for kind, mb in (*order, *(("W", mb) for mb in range(m)))]
        for rank, order in enumerate(orders)
    ]
    return Schedule.of(programs, placement=(0, 1), microbatches=m)


def _ends() -> list[Layer]:
    """Each of two stages begins and ends with a linear layer."""
    return [seeded(i, make) for i, make in enumerate((LinearFirst, LinearLast, LinearFirst, LinearLast))]


def _work(rank: int, schedule: Schedule, transport: str) -> list[tuple[dict[str, Any], int]]:
    """The gradients of four steps as lists, and the buffers made until then."""
    pipeline = Pipeline(_ends(), schedule, loss=mse, options=RuntimeOptions(transport=transport))
    x, y = batch(17)
    found = []
    for _ in range(4):  # buffers are used again from the second step on
        pipeline.zero_grad()
        pipeline.step(x, y)
        values = {name: gradient.tolist() for name, gradient in gradients(pipeline).items()}
        found.append((values, pipeline.stats.receive_buffers))
    pipeline.close()
    return found


@pytest.mark.parametrize("transport", ["shared", "individual"])
@pytest.mark.parametrize("schedule", [pl.schedules.build("zb-h2", 2, 8), _late(8)], ids=["zb-h2", "late"])
def test_what_was_received_is_not_overwritten_while_a_weight_gradient_waits(schedule: Schedule, transport: str) -> None:
    """zb-h2's last rank holds activations, the other schedule's ranks hold all that they receive."""
    x, y = batch(17)
    _, want = serial(_ends(), x, y, even_sizes(17, 8))
    results = run_ranks(_work, 2, schedule, transport)
    for step in range(4):
        got = {name: torch.tensor(value) for found in results for name, value in found[step][0].items()}
        assert worst(got, want) <= 1e-6
    for found in results:
        assert found[-1][1] <= found[1][1] + 2, "the pool does not grow"
