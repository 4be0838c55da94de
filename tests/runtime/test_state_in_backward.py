"""State that forwards leave for backwards, and backwards for forwards: as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import Plain, differences
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH
from pipeloom.errors import UsageError
from pipeloom.schedule.model import Schedule

ALONE = pl.schedules.build("1f1b", 1, 4)
ONE_ROUTE = [
    *(pl.schedules.build(name, 2, 4) for name in ("1f1b", "gpipe", "zb-h1", "zbv")),
    pl.schedules.interleaved(ranks=2, chunks=2, microbatches=4),
]
TWO_ROUTES = pl.schedules.build("dualpipe", 2, 4)
schedules = pytest.mark.parametrize("schedule", ONE_ROUTE, ids=lambda schedule: schedule.name)
recomputing = pytest.mark.parametrize("recompute", ["none", "full"])


class _Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.module.last.mean(), None


class InAFunction(Plain):
    """A function's backward reads what the forward left in the module."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        return _Scales.apply(out, self)


class InATensorHook(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        out.register_hook(lambda gradient: gradient * self.last)
        return out * 1.0


class InModuleHooks(Plain):
    """Keeps the linear layer's outputs on a stack, as per-sample gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Tensor] = []
        self.linear.register_forward_hook(self.after)
        self.linear.register_full_backward_hook(self.behind)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.stack.append(output.detach())

    def behind(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        last = self.stack.pop().tanh()
        return tuple(None if gradient is None else gradient * last for gradient in inputs)


class InABuffer(Plain):
    """The function's backward reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach().mean((0, 1))
        return _Scales.apply(out, self)


READERS = [InAFunction, InATensorHook, InModuleHooks, InABuffer]


@pytest.mark.parametrize("kind", READERS)
@recomputing
@schedules
def test_a_backward_that_reads_the_state_of_another_forward_is_refused(
    schedule: Schedule, recompute: str, kind: type[Plain]
) -> None:
    if recompute == "none" or kind is not InModuleHooks:  # a recomputed forward puts its output on the stack twice
        assert differences([Plain, kind, Plain, kind], ALONE, recompute) == []
    with pytest.raises(
        UsageError, match=r"the backward of a layer of stage \d reads .*\.(last|stack)', which the forward of"
    ):
        differences([Plain, kind, Plain, kind], schedule, recompute)


class Keeps(Plain):
    """Keeps its output for others to look at, and a hook of its own with the tensor that it needs."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = seen = out.detach()
        out.register_hook(lambda gradient: gradient * seen)
        return out * 1.0


class WritesFirst(Plain):
    """Its hook reads the attribute, but writes it before."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        out.register_hook(self.halve)
        return out * 1.0

    def halve(self, gradient: Tensor) -> Tensor:
        self.last = gradient
        return 0.5 * self.last


class Notes(Plain):
    """Notes its forwards and backwards in one list, and counts them in one dict and one number, as tests and monitors do."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.counts = {"F": 0, "B": 0}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.note("F", out.detach().mean().item())
        out.register_hook(lambda _: self.note("B"))
        return out * 1.0

    def note(self, kind: str, *values: float) -> None:
        self.notes.append((kind, *values))
        self.counts[kind] += 1
        self.calls += 1


@recomputing
@schedules
def test_records_and_counts_of_forwards_and_backwards_are_kept(schedule: Schedule, recompute: str) -> None:
    built: list[Notes] = []

    def kept() -> Notes:
        built.append(Notes())
        return built[-1]

    assert differences([Plain, kept, Plain, kept], schedule, recompute) == []
    layers = [layer for layer in built if layer.calls]
    assert layers
    for layer in layers:
        assert layer.calls == len(layer.notes) == sum(layer.counts.values())
        assert layer.counts["B"]


class ReadsCount(Plain):
    """Its hook takes the number of the micro-batch from its own count."""

    def __init__(self) -> None:
        super().__init__()
        self.index = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.index += 1
        out.register_hook(lambda gradient: gradient * (1 + 0.1 * self.index))
        return out * 1.0


@schedules
def test_a_count_of_forwards_that_a_backward_uses_is_refused(schedule: Schedule) -> None:
    assert differences([Plain, ReadsCount, Plain, ReadsCount], ALONE) == []
    with pytest.raises(UsageError, match=r"the backward of a layer of stage \d reads 'layer\d.index'"):
        differences([Plain, ReadsCount, Plain, ReadsCount], schedule)


@pytest.mark.parametrize("kind", [Keeps, WritesFirst])
@recomputing
@schedules
def test_what_a_backward_does_not_read_or_writes_first_is_as_in_one_process(
    schedule: Schedule, recompute: str, kind: type[Plain]
) -> None:
    assert differences([Plain, kind, Plain, kind], schedule, recompute) == []


class Average(Plain):
    """Keeps a running mean of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(self.behind)
        return out * 1.0

    def behind(self, gradient: Tensor) -> None:
        self.mean.mul_(0.9).add_(gradient.abs().mean())


class ReadsAverage(Average):
    """Reads it in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.mean.clone()


@recomputing
@schedules
def test_a_forward_that_reads_what_backwards_write_is_refused(schedule: Schedule, recompute: str) -> None:
    assert differences([Plain, Average, Plain, Average], schedule, recompute) == []
    assert differences([Plain, ReadsAverage, Plain, ReadsAverage], ALONE, recompute) == []
    with pytest.raises(
        UsageError, match=r"the forward of a layer of stage \d reads 'layer\d.mean', which its backward writes"
    ):
        differences([Plain, ReadsAverage, Plain, ReadsAverage], schedule, recompute)


def test_buffers_that_backwards_change_are_refused_under_two_routes() -> None:
    with pytest.raises(UsageError, match=r"the backward of layer 'layer\d' changes its buffer 'mean'.* one route"):
        differences([Plain, Average, Plain, Average], TWO_ROUTES)


class StepsInBackward(Plain):
    """An optimizer in hooks on its weights."""

    def __init__(self, unseen: bool) -> None:
        super().__init__()
        self.unseen = unseen
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        (parameter.data if self.unseen else parameter).sub_(0.1 * parameter.grad)
        parameter.grad = None


@pytest.mark.parametrize("unseen", [False, True], ids=["in place", "through .data"])
@recomputing
@schedules
def test_an_optimizer_in_the_backward_is_refused(schedule: Schedule, recompute: str, unseen: bool) -> None:
    layers = [Plain, lambda: StepsInBackward(unseen), Plain, Plain]
    assert differences(layers, ALONE, recompute) == []
    with pytest.raises(UsageError, match=r"the backward of layer 'layer1' changes its weight 'linear.weight'"):
        differences(layers, schedule, recompute)


class Pair(Plain):
    """Keeps two tensors in a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.pair = (x.detach(), out.detach())
        return out


def test_tuples_of_tensors_are_compared_by_object() -> None:
    with pytest.raises(UsageError, match="changes its attribute 'pair'"):
        differences([Plain, Pair, Plain, Plain], TWO_ROUTES)
