"""Layers as people write them train as in one process, gradients that are None too, or a sentence says why they do not."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from one_process import Plain, built, differences, in_a_pipeline, one_process
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import pipeloom as pl
from fuzz._layers import Straight
from models import WIDTH, batch, gradients, mse
from pipeloom.errors import UsageError
from pipeloom.ops.products import plain_operations_only
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule.model import Schedule
from processes import run_ranks

ONE_ROUTE = [pl.schedules.build(name, 2, 4) for name in ("1f1b", "zb-h1", "zbv")]
SPLIT = pl.schedules.build("zb-h1", 2, 4)

schedules = pytest.mark.parametrize("schedule", ONE_ROUTE, ids=lambda schedule: schedule.name)


# -- inputs and gradients ----------------------------------------------------------------------------------------------


class ByKeyword(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(input=x))


@pytest.mark.core
@schedules
def test_a_linear_layer_takes_its_input_by_keyword(schedule: Schedule) -> None:
    assert differences([ByKeyword, Plain, Plain, ByKeyword], schedule) == []


class Rounded(Plain):
    """Its function gives no gradient to its input: to that of the layer, or to a linear layer inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.scale = inside, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.linear(x) if self.inside else x, self.scale)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.core
@pytest.mark.parametrize("inside", [False, True])
@schedules
def test_a_function_that_gives_its_input_no_gradient_leaves_none_before_it(schedule: Schedule, inside: bool) -> None:
    assert differences([Plain, Plain, lambda: Rounded(inside), Plain], schedule) == []


class Split(Plain):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return out.detach() * 2, out


class WantsGradient(Plain):
    """Asks for the gradient of an input that carries none, as force fields do with positions."""

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        positions.requires_grad_()
        (force,) = torch.autograd.grad(super().forward(positions).sum(), positions, create_graph=True)
        return x + force


@pytest.mark.core
@schedules
def test_a_layer_asks_for_the_gradient_of_an_input_that_carries_none(schedule: Schedule) -> None:
    assert differences([Plain, Split, WantsGradient, Plain], schedule) == []


class Detaches(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach_())


@pytest.mark.core
@schedules
def test_a_layer_detaches_its_input_in_place(schedule: Schedule) -> None:
    assert differences([Plain, Plain, Detaches, Plain], schedule, steps=20) == []


class Retains(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        x.retain_grad()
        return super().forward(x)


@pytest.mark.core
@schedules
def test_a_layer_retains_the_gradient_of_its_input(schedule: Schedule) -> None:
    gradients = []
    for pipelined in (False, True):
        modules = built([Plain, Plain, Retains, Plain])
        if pipelined:
            in_a_pipeline(modules, schedule, steps=20)
        else:
            one_process(modules, schedule.microbatches, steps=20)
        assert isinstance(modules[2], Retains)
        gradients.append(modules[2].last.grad)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4)


# -- weight gradients that wait ----------------------------------------------------------------------------------------


class Clamped(Plain):
    """A hook changes a gradient in place that a linear layer's output has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        inner.register_hook(lambda gradient: gradient.clamp_(-0.001, 0.001))
        return inner + self.linear(x)


@pytest.mark.core
def test_a_gradient_that_a_hook_changes_before_its_weight_gradient_is_refused() -> None:
    layers = [Plain, Clamped, Clamped, Plain]
    assert differences(layers, ONE_ROUTE[0]) == []
    with pytest.raises(UsageError, match="changed in place between its I and its W, by a hook on a gradient or by"):
        differences(layers, SPLIT)


class OfABuffer(Plain):
    """A linear layer of a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.3)
        return x + self.linear(self.mean)


@pytest.mark.core
def test_an_input_that_another_forward_changes_before_its_weight_gradient_is_refused() -> None:
    layers = [Plain, Plain, Plain, OfABuffer]
    assert differences(layers, ONE_ROUTE[0]) == []
    with pytest.raises(UsageError, match="changed in place between its I and its W"):
        differences(layers, SPLIT)


# -- state of a layer, and recomputation -------------------------------------------------------------------------------


class Drawing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.linear(x)) * (random.random() + np.random.rand()))


@pytest.mark.core
def test_a_layer_that_is_recomputed_draws_again_what_python_and_numpy_drew() -> None:
    found = []
    for pipelined in (False, True):
        random.seed(0)
        np.random.seed(0)
        modules = built([Drawing, Plain, Plain, Plain])
        found.append(in_a_pipeline(modules, SPLIT, "full") if pipelined else one_process(modules, SPLIT.microbatches))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for (_, a), (_, b) in zip(*found, strict=True))
