"""Tied weights: one weight in several layers, on one rank or on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, worst
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from processes import run_ranks

WORDS = 9
EMBEDDING = ("embed.table.weight", "head.linear.weight")
S = pl.schedules


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-1, 1, WORDS * WIDTH).reshape(WORDS, WIDTH).mul(7).sin())

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Head(nn.Module):
    """Starts from other values than the embedding: the tie has to make them equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            self.linear.weight.fill_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def language_model(middle: int) -> list[Layer]:
    return [Layer("embed", Embed), *blocks(middle), Layer("head", Head)]


def tokens(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(WORDS, (rows, 4), generator=generator)
    return both[:, :-1], both[:, 1:]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train(pipeline: Any, steps: int, rows: int) -> list[dict[str, Tensor]]:
    """The first step's gradients, and the parameters after the last step."""
    optimizer = optimizer_of(list(pipeline.parameters()))
    first: dict[str, Tensor] = {}
    for step in range(steps):
        pipeline.zero_grad()
        pipeline.step(*tokens(rows, step))
        first = first or {n: p.grad.clone() for n, p in pipeline.named_parameters()}
        optimizer.step()
    return [first, {n: p.detach().clone() for n, p in pipeline.named_parameters()}]


def train_serial(layers: list[Layer], ties: list[tuple[str, ...]], steps: int, rows: int) -> Any:
    """The same in one process, the tied weights being one object; under all names."""
    modules = {layer.name: layer() for layer in layers}
    for first, *others in ties:
        home, _, path = first.partition(".")
        shared = modules[home].get_parameter(path)
        for other in others:
            layer, _, rest = other.partition(".")
            inner, _, leaf = rest.rpartition(".")
            setattr(modules[layer].get_submodule(inner), leaf, shared)
    model = nn.ModuleDict(modules)
    optimizer = optimizer_of(model.parameters())
    every = [(f"{n}.{inner}", p) for n, m in modules.items() for inner, p in m.named_parameters()]
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        x, y = tokens(rows, step)
        for module in modules.values():
            x = module(x)
        loss_of(x, y).backward()
        gradients = gradients or {n: p.grad.clone() for n, p in every}  # type: ignore[union-attr]
        optimizer.step()
    return [gradients, {n: p.detach().clone() for n, p in every}]


def tied_blocks(*which: int) -> tuple[str, ...]:
    return tuple(f"block{i}.linear.weight" for i in which)


CASES: list[tuple[pl.Schedule, int, list[tuple[str, ...]]]] = [
    (S.one_f_one_b(1, 3), 2, [EMBEDDING]),  # one rank holds both
    (S.one_f_one_b(2, 3), 2, [EMBEDDING]),
    (S.interleaved(2, 5, 2), 2, [EMBEDDING]),
    (S.interleaved(2, 3, 3), 4, [EMBEDDING, tied_blocks(0, 2), tied_blocks(1, 3)]),
    (S.gpipe(3, 4), 4, [EMBEDDING, tied_blocks(0, 1, 2, 3)]),
    (S.looped_bfs(3, 4, 2), 4, [EMBEDDING, tied_blocks(3, 0)]),
]


@pytest.mark.core
@pytest.mark.parametrize(("schedule", "middle", "ties"), CASES, ids=[repr(case[0]) for case in CASES])
def test_tied_weights_train_as_in_one_process(schedule: Any, middle: int, ties: Any) -> None:
    pipeline = LocalPipeline(language_model(middle), schedule, loss=loss_of, tied=ties)
    got = train(pipeline, 3, 12)
    want = train_serial(language_model(middle), ties, 3, 12)
    for mine, theirs, bound in zip(got, want, (2e-6, 1e-4), strict=True):
        assert all(sum(name in mine for name in names) == 1 for names in ties)
        assert worst(mine, {name: theirs[name] for name in mine}) <= bound
    assert len(got[0]) == len(want[0]) - sum(len(names) - 1 for names in ties)


def first_values(rank: int) -> list[dict[str, Any]]:
    """The parameters before the first step, which would make copies equal that still differ."""
    found = []
    for schedule, middle, ties in CASES:
        if schedule.ranks == 2:
            options = RuntimeOptions(monitor=False)
            pipeline = Pipeline(language_model(middle), schedule, loss=loss_of, tied=ties, options=options)
            found.append({name: p.detach().numpy() for name, p in pipeline.named_parameters()})
            pipeline.close()
    return found


@pytest.mark.core
def test_tied_weights_start_with_the_first_holders_values_on_every_rank() -> None:
    cases = [case for case in CASES if case[0].ranks == 2]
    for (_, middle, ties), ranks in zip(cases, zip(*run_ranks(first_values, 2), strict=True), strict=True):
        drawn = {f"{m.name}.{inner}": p for m in language_model(middle) for inner, p in m().named_parameters()}
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
            loss=nn.functional.mse_loss,
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
            loss=nn.functional.mse_loss,
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
        pipeline = Pipeline(layers, pl.schedules.chimera(2, microbatches), loss=mean_square)
        pipeline.step(x, y)
        found.append(listed(pipeline))
    return found


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


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
        pipeline = LocalPipeline(layers, pl.schedules.chimera(2, microbatches), loss=mean_square)
        pipeline.step(x, y)
        want = listed(pipeline)
        for got in (rank[at] for rank in ranks):
            assert got.keys() == want.keys()
            for name, values in want.items():
                close = {"rtol": 2e-2, "atol": 1e-4} if name.endswith("also") else {"rtol": 1e-5, "atol": 1e-7}
                torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(values), **close)
