"""Tied weights: one weight in several layers, on one rank or on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, mse
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from processes import run_ranks

S = pl.schedules


def tied_blocks(*which: int) -> tuple[str, ...]:
    return tuple(f"block{i}.linear.weight" for i in which)


CASES: list[tuple[pl.Schedule, list[tuple[str, ...]]]] = [
    (S.one_f_one_b(2, 3), [tied_blocks(0, 5)]),
    (S.interleaved(2, 3, 3), [tied_blocks(4, 1), tied_blocks(0, 2, 5)]),
]


def first_values(rank: int) -> list[dict[str, Any]]:
    """The parameters before the first step, which would make copies equal that still differ."""
    found = []
    for schedule, ties in CASES:
        options = RuntimeOptions(monitor=False)
        pipeline = Pipeline(blocks(6), schedule, loss=mse, tied=ties, options=options)
        found.append({name: p.detach().numpy() for name, p in pipeline.named_parameters()})
        pipeline.close()
    return found


@pytest.mark.core
def test_tied_weights_start_with_the_first_holders_values_on_every_rank() -> None:
    for (_, ties), ranks in zip(CASES, zip(*run_ranks(first_values, 2), strict=True), strict=True):
        drawn = {f"{m.name}.{inner}": p for m in blocks(6) for inner, p in m().named_parameters()}
        first = {name: drawn[names[0]] for names in ties for name in names}
        for parameters in ranks:
            for name, values in parameters.items():
                assert torch.equal(torch.from_numpy(values), first.get(name, drawn[name]).detach()), name
            assert parameters.keys() & {name for names in ties for name in names}


def half_frozen(which: int) -> list[Layer]:
    def block(seed: int) -> nn.Module:
        built = Block(seed)
        built.linear.weight.requires_grad_(seed != which)
        return built

    return [Layer("a", lambda: block(0)), Layer("b", lambda: block(1))]


def one_frozen(rank: int) -> list[Any]:
    found = []
    for which in (0, 1):
        pipeline = Pipeline(
            half_frozen(which),
            S.gpipe(2, 2),
            loss=mse,
            tied=[("a.linear.weight", "b.linear.weight")],
            options=RuntimeOptions(monitor=False),
        )
        pipeline.step(*batch(4))
        gradient = dict(pipeline.named_parameters())[f"{'ab'[rank]}.linear.weight"].grad
        found.append(None if gradient is None else gradient.flatten().tolist())
        pipeline.close()
    return found


@pytest.mark.core
def test_a_tied_weight_trains_as_its_first_name_does() -> None:
    """Also where the layer of the other name has frozen it: in one process there is one object."""
    for which in (0, 1):
        local = LocalPipeline(
            half_frozen(which),
            S.gpipe(2, 2),
            loss=mse,
            tied=[("a.linear.weight", "b.linear.weight")],
        )
        local.step(*batch(4))
        want = dict(local.named_parameters())["a.linear.weight"].grad
        assert (want is None) == (which == 0)
        for found in run_ranks(one_frozen, 2):
            assert (found[which] is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(torch.tensor(found[which]), want.flatten(), rtol=1e-5, atol=1e-7)


class Mixed(Block):
    """Weights of three dtypes, the narrowest first by name; the complex one turns with the imaginary part of its gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.also = nn.Parameter(torch.linspace(0.1, 1.0, WIDTH, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.linspace(0.1, 1.0, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        turned = super().forward(x).to(torch.complex64) * self.phase * torch.tensor(1 + 0.5j)
        return turned.real + turned.imag * self.also.float()


def replicas_of_three_dtypes(rank: int) -> list[dict[str, Any]]:
    x, y = batch(6)
    found = []
    for microbatches in (1, 4):  # of one, the second route sees nothing
        layers = [Layer(f"layer{at}", lambda at=at: Mixed(at)) for at in range(2)]
        pipeline = Pipeline(layers, pl.schedules.chimera(2, microbatches), loss=mse)
        pipeline.step(x, y)
        found.append(listed(pipeline))
    return found


def listed(pipeline: Any) -> dict[str, Any]:
    grads = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
    return {name: torch.view_as_real(g).tolist() if g.is_complex() else g.tolist() for name, g in grads.items()}


@pytest.mark.core
def test_replicas_of_weights_of_several_dtypes() -> None:
    """They are summed together, and none is rounded to the dtype of another, nor loses its imaginary part."""
    x, y = batch(6)
    ranks = run_ranks(replicas_of_three_dtypes, 2)
    for at, microbatches in enumerate((1, 4)):
        layers = [Layer(f"layer{at}", lambda at=at: Mixed(at)) for at in range(2)]
        pipeline = LocalPipeline(layers, pl.schedules.chimera(2, microbatches), loss=mse)
        pipeline.step(x, y)
        want = listed(pipeline)
        for got in (rank[at] for rank in ranks):
            assert got.keys() == want.keys()
            for name, values in want.items():
                close = {"rtol": 2e-2, "atol": 1e-4} if name.endswith("also") else {"rtol": 1e-5, "atol": 1e-7}
                torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(values), **close)
