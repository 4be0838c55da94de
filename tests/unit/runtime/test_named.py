"""Tensors that layers read and write by name, and losses on several stages: as one process has them, in every family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import gradients, worst
from named_models import CASES, WIDTH, data, plain
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.schedule.families import FAMILIES
from pipeloom.shapes.cut import even_sizes


def built(family: str, ranks: int, microbatches: int) -> pl.Schedule:
    try:
        return pl.schedules.build(family, ranks, microbatches)
    except UsageError as refused:
        pytest.skip(str(refused))


def compare(name: str, schedule: pl.Schedule) -> LocalPipeline:
    case = CASES[name]
    x, y, keywords = data(case, 2 * schedule.microbatches + 1)
    pipeline = LocalPipeline(case.layers(), schedule, loss=case.loss, options=RuntimeOptions(seed=3))
    state = {key: value.clone() for key, value in pipeline.state_dict().items()}
    sizes = even_sizes(len(x), schedule.microbatches)
    want_loss, want, terms = plain(case, state, x, y, keywords, sizes)
    assert abs(pipeline.step(x, y, **keywords).item() - want_loss) <= 5e-6
    assert worst(gradients(pipeline), want) <= 5e-6
    assert {key: value.item() for key, value in pipeline.loss_terms.items()} == pytest.approx(terms, abs=5e-6)
    assert abs(pipeline.evaluate(x, y, **keywords).item() - want_loss) <= 5e-6
    assert {key: value.item() for key, value in pipeline.loss_terms.items()} == pytest.approx(terms, abs=5e-6)
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_family(name: str, family: str) -> None:
    schedule = built(family, 4, 8)
    pipeline = compare(name, schedule)
    assert bool(pipeline.schedule.tensors) == (name != "heads")
    assert pipeline.peak_activations == pl.simulate(schedule).peak_activations


class Shared(nn.Module):
    """Writes its output by a name as well: the name and the next layer's input are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.linear(x)
        return y, {"kept": y}


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class AddKept(nn.Module):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x.mul(2) + kept


@pytest.mark.parametrize("reader", [2, 3])
def test_a_tensor_by_name_stays_as_it_was_written(reader: int) -> None:
    """Of the reader's stage on the writer's rank and on the other one; the layer between halves the same memory in place."""
    layers = [
        Layer("shared", Shared, writes=("kept",)),
        Layer("halve", Halve),
        Layer("a", nn.Identity),
        Layer("b", nn.Identity),
    ]
    layers[reader] = Layer("add", AddKept, reads=("kept",))
    pipeline = LocalPipeline(layers, pl.schedules.interleaved(2, 4, 2), loss=nn.functional.mse_loss)
    linear = nn.Linear(WIDTH, WIDTH)
    linear.load_state_dict({name.rpartition(".")[2]: value.clone() for name, value in pipeline.state_dict().items()})
    x, y = torch.randn(2, 8, WIDTH)
    want = nn.functional.mse_loss(2 * linear(x), y)
    want.backward()  # type: ignore[no-untyped-call]
    assert abs(pipeline.step(x, y).item() - want.item()) <= 1e-6
    assert (
        worst(gradients(pipeline), {f"shared.linear.{name}": p.grad for name, p in linear.named_parameters()}) <= 1e-6
    )
