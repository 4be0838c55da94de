"""Tied weights: one weight in several layers, on one rank or on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeloom as pl
from models import WIDTH, Block, blocks, worst
from pipeloom.errors import ConfigError
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


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(pipeline: Any, name: str, steps: int, rows: int) -> list[dict[str, Tensor]]:
    """The first step's gradients, and the parameters after the last step."""
    optimizer = optimizer_of(name, list(pipeline.parameters()))
    first: dict[str, Tensor] = {}
    for step in range(steps):
        pipeline.zero_grad()
        pipeline.step(*tokens(rows, step))
        first = first or {n: p.grad.clone() for n, p in pipeline.named_parameters()}
        optimizer.step()
    return [first, {n: p.detach().clone() for n, p in pipeline.named_parameters()}]


def train_serial(layers: list[Layer], ties: list[tuple[str, ...]], name: str, steps: int, rows: int) -> Any:
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
    optimizer = optimizer_of(name, model.parameters())
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


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(("schedule", "middle", "ties"), CASES, ids=[repr(case[0]) for case in CASES])
def test_tied_weights_train_as_in_one_process(schedule: Any, middle: int, ties: Any, optimizer: str) -> None:
    pipeline = LocalPipeline(language_model(middle), schedule, loss=loss_of, tied=ties)
    got = train(pipeline, optimizer, 3, 12)
    want = train_serial(language_model(middle), ties, optimizer, 3, 12)
    for mine, theirs, bound in zip(got, want, (2e-6, 1e-4), strict=True):
        assert all(sum(name in mine for name in names) == 1 for names in ties)
        assert worst(mine, {name: theirs[name] for name in mine}) <= bound
    assert len(got[0]) == len(want[0]) - sum(len(names) - 1 for names in ties)


def test_without_the_tie_the_gradients_are_others() -> None:
    """The comparison above would see two silent copies."""
    pipeline = LocalPipeline(language_model(2), S.one_f_one_b(2, 3), loss=loss_of)
    got = train(pipeline, "SGD", 1, 12)[0]
    want = train_serial(language_model(2), [EMBEDDING], "SGD", 1, 12)[0]
    assert worst({"w": got[EMBEDDING[0]]}, {"w": want[EMBEDDING[0]]}) > 0.05


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embed.table.weight", "haed.linear.weight"), "no layer holds 'haed.linear.weight'"),
        (("embed.table.weight", "block0.linear.weight"), r"embed.table.weight is \[9, 6\] and .* is \[6, 6\]"),
    ],
)
def test_impossible_ties_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalPipeline(language_model(2), S.gpipe(2, 2), loss=loss_of, tied=[names])


def work(rank: int, ranks: int) -> list[Any]:
    reports = []
    for schedule, middle, ties in CASES:
        if schedule.ranks != ranks:
            continue
        for optimizer in ("SGD", "AdamW"):
            options = RuntimeOptions(monitor=False)
            pipeline = Pipeline(language_model(middle), schedule, loss=loss_of, tied=ties, options=options)
            trained = [{n: t.numpy() for n, t in part.items()} for part in train(pipeline, optimizer, 3, 12)]
            owned = {name: pipeline.owns(name) for name, _ in pipeline.named_parameters()}
            pipeline.close()
            reports.append((trained, owned))
    return reports


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
def test_tied_weights_across_processes(ranks: int) -> None:
    everyone = run_ranks(work, ranks, ranks)
    cases = [(case, optimizer) for case in CASES if case[0].ranks == ranks for optimizer in ("SGD", "AdamW")]
    for (case, optimizer), reports in zip(cases, zip(*everyone, strict=True), strict=True):
        _, middle, ties = case
        want = train_serial(language_model(middle), ties, optimizer, 3, 12)
        owners: dict[str, int] = {}
        held: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for trained, owned in reports:
            gradients, after = ({n: torch.from_numpy(a) for n, a in part.items()} for part in trained)
            assert worst(gradients, {name: want[0][name] for name in gradients}) <= 2e-6
            assert worst(after, {name: want[1][name] for name in after}) <= 1e-4
            for name, mine in owned.items():
                owners[name] = owners.get(name, 0) + mine
                held.setdefault(name, []).append((gradients[name], after[name]))
        for names in ties:
            copies = [copy for name in names for copy in held.get(name, [])]
            assert len(copies) > 1 or names != EMBEDDING
            assert all(torch.equal(g, copies[0][0]) and torch.equal(p, copies[0][1]) for g, p in copies)
            assert sum(owners.get(name, 0) for name in names) == 1  # a norm counts it once
        untied = set(owners) - {name for names in ties for name in names}
        assert all(owners[name] == 1 for name in untied)


def test_the_first_holders_values_win() -> None:
    pipeline = LocalPipeline(
        [Layer("a", lambda: Block(1)), Layer("b", lambda: Block(2))],
        S.gpipe(2, 1),
        loss=loss_of,
        tied=[("a.linear.weight", "b.linear.weight")],
    )
    assert torch.equal(dict(pipeline.named_parameters())["a.linear.weight"], Block(1).linear.weight)
