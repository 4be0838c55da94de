"""What a backward needs, changed in place: right, or refused in torch's words, whatever holds the tensor meanwhile."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse, serial
from pipeloom.measure.layer_bytes import measured_layer
from pipeloom.ops.host_memory import HostBuffers
from pipeloom.ops.saved_tensors import saving
from pipeloom.runtime import LocalPipeline, in_part
from pipeloom.runtime.offload import Parts, SavedTensors
from pipeloom.schedule import Costs, Schedule

S = pl.schedules
PLAIN = S.one_f_one_b(2, 4)
WORDS = r"modified by an inplace operation: .* is at version \d+; expected version \d+ instead"
WORDS_OF = {
    "none": (),
    "blocks": ("recompute",),
    "whole": ("recompute=whole",),
    "part": ("recompute=norms",),
    "half": ("recompute=1/2",),
    "offload": ("offload",),
    "offload 1/2": ("offload=1/2",),
    "offload 2/2": ("offload=2/2",),
    "part, offload": ("recompute=norms", "offload"),
    "whole, kept": ("recompute=whole", "offload=kept"),
}
TRANSFORMS: dict[str, Schedule] = {
    name: S.transformed(PLAIN, list(words), Costs(host_bandwidth=10)) for name, words in WORDS_OF.items()
}


class Changing(nn.Module):
    """A layer that changes something in place in its forward.

    Args:
        run: of this layer and the hidden values, called in the part "norms" or beside it.
        functional: the layer that a run without changes in place is.
    """

    def __init__(self, run: Callable[[Changing, Tensor], Tensor], inside: bool, functional: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("factor", torch.randn(WIDTH, WIDTH))
        self.scratch = torch.zeros(1, 3, WIDTH)
        self.run, self.inside, self.functional = run, inside, functional

    def times(self, x: Tensor, factor: float) -> Tensor:
        return x * factor if self.functional else x.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.inside:
            return x + in_part("norms", self._run, h)
        return x + self.run(self, in_part("norms", self.norm, h))

    def _run(self, h: Tensor) -> Tensor:
        return self.norm(self.run(self, h * 1.0))


def input_after_sin(layer: Changing, h: Tensor) -> Tensor:
    return h.sin() + layer.times(h, 0.5)


def output_of_sigmoid(layer: Changing, h: Tensor) -> Tensor:
    return layer.times(h.sigmoid(), 3.0)


def weight(layer: Changing, h: Tensor) -> Tensor:
    with torch.no_grad():
        layer.linear.weight.mul_(1.2)
    return layer.linear(h).tanh()


def buffer(layer: Changing, h: Tensor) -> Tensor:
    layer.factor.mul_(1.2)
    return h @ layer.factor


def scratch(layer: Changing, h: Tensor) -> Tensor:
    layer.scratch.copy_(h.detach())
    return (h * layer.scratch).tanh()


def argument_of_a_part(layer: Changing, h: Tensor) -> Tensor:
    return in_part("norms", torch.sin, h) + layer.times(h, 0.5)


MODELS = [input_after_sin, output_of_sigmoid, weight, buffer, scratch, argument_of_a_part]


def outcome(schedule: Schedule, modules: list[nn.Module]) -> list[Tensor]:
    """Loss and gradients of a step, every micro-batch with other data."""
    pipeline = LocalPipeline(modules, schedule, loss=mse)
    loss = pipeline.step(*batch(schedule.microbatches, seed=1))
    return [loss, *(p.grad for module in modules for p in module.parameters() if p.grad is not None)]


def reference(make: Callable[[int], nn.Module]) -> list[Tensor]:
    """The same of one process, one micro-batch after the other."""
    loss, gradients = serial([lambda seed=at: make(seed) for at in range(4)], *batch(4, seed=1), [1] * 4)
    return [loss, *gradients.values()]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("run", MODELS, ids=lambda run: run.__name__)
def test_a_change_of_what_the_backward_needs_is_right_or_refused(run: Any, transform: str) -> None:
    if run is weight and transform.startswith("whole"):
        pytest.skip("docs/own_model.md: R does not put back a weight that a forward changes")
    refusals: list[str] = []
    for inside in (False, True):
        modules: list[nn.Module] = [Changing(run, inside, False, seed) for seed in range(4)]
        try:
            got = outcome(TRANSFORMS[transform], modules)
        except RuntimeError as error:
            refusals.append(str(error))
            continue
        assert transform != "none"  # torch refuses all of these itself
        assert_same(got, reference(lambda seed, inside=inside: Changing(run, inside, True, seed)))
    assert all(re.search(WORDS, words) for words in refusals)


def relu_of_input(layer: Changing, h: Tensor) -> Tensor:
    return nn.functional.relu(layer.linear(h), inplace=True)  # saves its output, in the version that it has then


def sigmoid_of_sum(layer: Changing, h: Tensor) -> Tensor:
    return (layer.linear(h) + h).sigmoid_().mul(2.0)


def dropout_in_place(layer: Changing, h: Tensor) -> Tensor:
    return nn.functional.dropout(layer.linear(h).add_(1.0), 0.5, training=False, inplace=True) * layer.linear(h).mul_(h)


def part_in_place(layer: Changing, h: Tensor) -> Tensor:
    return in_part("norms", layer.norm, h).mul_(1.5).relu_() + in_part("norms", torch.sin, h).add_(h)


def other_part_in_place(layer: Changing, h: Tensor) -> Tensor:
    return in_part("other", torch.relu_, layer.linear(h)) * in_part("norms", layer.norm, h)


ACCEPTED = [relu_of_input, sigmoid_of_sum, dropout_in_place, part_in_place, other_part_in_place]


class StartingInPlace(Changing):
    """Changes its own input first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("run", ACCEPTED, ids=lambda run: run.__name__)
def test_a_change_that_torch_accepts_is_accepted(run: Any, transform: str) -> None:
    # docs/own_model.md: where R is of the whole stage, no layer may change the stage's input.
    kind = Changing if transform.startswith("whole") else StartingInPlace

    def make(inside: bool, seed: int) -> Changing:
        return (kind if seed else Changing)(run, inside, True, seed)

    for inside in (False, True):
        got = outcome(TRANSFORMS[transform], [make(inside, seed) for seed in range(4)])
        assert_same(got, reference(lambda seed, inside=inside: make(inside, seed)))


class Watching(Changing):
    """Computes a metric, a mask and a branch, through graphs that no backward reaches and whose nodes save their own outputs."""

    storages: ClassVar[list[weakref.ref[Any]]] = []

    def forward(self, x: Tensor) -> Tensor:
        metric, mask = self.first(x).exp(), self.linear(x).sigmoid()
        branch = in_part("norms", torch.tanh, self.linear(x)).softmax(-1)
        self.storages += [weakref.ref(value.untyped_storage()) for value in (metric, mask, branch)]
        return super().forward(x * (mask > 0.5)) + metric.detach().mean()


@pytest.fixture
def without_collector() -> Iterator[None]:
    Watching.storages.clear()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_graph_that_no_backward_reaches_is_freed(transform: str, without_collector: None) -> None:
    modules: list[nn.Module] = [Watching(part_in_place, False, True, seed) for seed in range(2)]
    pipeline = LocalPipeline(modules, TRANSFORMS[transform], loss=mse)
    for _ in range(2):
        pipeline.step(*batch(4))
    assert len(Watching.storages) >= 2 * 2 * 4 * 3
    assert all(storage() is None for storage in Watching.storages)


def test_measuring_a_layer_leaves_nothing_behind(without_collector: None) -> None:
    measured_layer(Watching(part_in_place, False, True, 0), (torch.randn(1, 3, WIDTH),), {})
    assert len(Watching.storages) >= 3
    assert all(storage() is None for storage in Watching.storages)


def test_a_change_after_the_copy_back_or_of_a_part_that_stays_is_seen() -> None:
    """Of two halves, the first one stays on the device."""
    for part, numbers in ((1, {1}), (2, {2})):
        saved = SavedTensors(torch.device("cpu"), HostBuffers(torch.device("cpu")), Parts(frozenset(numbers), 2))
        saved.begin([])
        x = torch.randn(8, requires_grad=True)
        with saving(saved.pack):
            first = x.exp()
            second = first.exp()
        saved.complete()
        saved.to_host(part, None)
        saved.to_device(part, None)
        (second if part == 1 else first).detach().mul_(2)
        with pytest.raises(RuntimeError, match=WORDS):
            second.sum().backward()
