"""One nn.Parameter object in the layers of two ranks: they share the weight, as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import pipeloom as pl
from dying import run_until_dead
from models import WIDTH, Block, mse
from pipeloom.errors import ConfigError, DistributedError, UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.tied_weights import merged
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules
WORDS = 9
OPTIONS = RuntimeOptions(monitor=False)


class Embed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)

    def reset_parameters(self) -> None:
        values()(self.weight)


class Head(Embed):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def values() -> Callable[[Tensor], None]:
    def fill(weight: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(torch.linspace(-1, 1, WORDS * WIDTH).reshape(WORDS, WIDTH).mul(7).sin())

    return fill


def weight() -> nn.Parameter:
    shared = nn.Parameter(torch.empty(WORDS, WIDTH))
    if not shared.is_meta:
        values()(shared)
    return shared


GLOBAL = weight()


class Model(nn.Module):
    """All layers in one object that every factory closes over, as a GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed(weight())
        self.blocks = nn.ModuleList([Block(0), Block(1)])
        self.head = Head(self.embed.weight)


class Holder:
    """Makes the weight when it is first asked for."""

    def __init__(self) -> None:
        self.made: dict[str, nn.Parameter] = {}

    def weight(self) -> nn.Parameter:
        return self.made.setdefault("w", weight())

    def embed(self) -> nn.Module:
        return Embed(self.weight())

    def head(self) -> nn.Module:
        return Head(self.weight())


def layers(way: str) -> list[Any]:
    middle: list[Any] = [Layer("b0", lambda: Block(0)), Layer("b1", lambda: Block(1))]
    if way == "modules":
        shared = weight()
        return [Embed(shared), Block(0), Block(1), Head(shared)]
    if way == "meta":
        with torch.device("meta"):
            shared = weight()
            return [Embed(shared), *middle, Head(shared)]
    if way == "closure":
        shared = weight()
        return [Layer("embed", lambda: Embed(shared)), *middle, Layer("head", lambda: Head(shared))]
    if way == "global":
        return [Layer("embed", lambda: Embed(GLOBAL)), *middle, Layer("head", lambda: [Head(GLOBAL)][0])]
    if way == "lazy":
        holder = Holder()
        return [Layer("embed", holder.embed), *middle, Layer("head", holder.head)]
    if way == "model":
        model = Model()
        return [lambda: model.embed, lambda: model.blocks[0], lambda: model.blocks[1], lambda: model.head]
    assert way == "apart"
    first, second = weight(), weight()
    return [Layer("embed", lambda: Embed(first)), *middle, Layer("head", lambda: Head(second))]


WAYS = ["modules", "meta", "closure", "model", "apart"]
UNSEEN = ["global", "lazy"]


def data() -> tuple[Tensor, Tensor]:
    both = torch.randint(WORDS, (8, 4), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def serial(way: str) -> tuple[list[float], list[float], int]:
    """Gradients of the first and the last layer's weight, and how many weights there are."""
    first, second = weight(), weight()
    embed, middle, head = Embed(first), [Block(0), Block(1)], Head(second if way == "apart" else first)
    for x, y in zip(*(value.split(2) for value in data()), strict=True):
        out = embed(x)
        for block in middle:
            out = block(out)
        (loss_of(head(out), y) / 4).backward()
    assert embed.weight.grad is not None
    assert head.weight.grad is not None
    return embed.weight.grad.flatten().tolist(), head.weight.grad.flatten().tolist(), 10 if way == "apart" else 9


SCHEDULES = [S.one_f_one_b(2, 4), S.zbv(2, 4), S.dualpipe(2, 4)]


@pytest.mark.parametrize("way", UNSEEN)
def test_what_several_processes_would_not_see_must_be_tied(way: str) -> None:
    with pytest.raises(ConfigError, match=r"'embed.weight' and 'head.weight' are one parameter, which factories share"):
        LocalPipeline(layers(way), S.one_f_one_b(2, 4), loss=loss_of)
    tied = [("embed.weight", "head.weight")]
    LocalPipeline(layers(way), S.one_f_one_b(2, 4), loss=loss_of, tied=tied).step(*data())


def across(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        for schedule in SCHEDULES:
            pipeline = Pipeline(layers(way), schedule, loss=loss_of, options=OPTIONS)
            pipeline.step(*data())
            each = {n: p.grad.flatten().tolist() for n, p in pipeline.named_parameters() if p.grad is not None}
            owned = sum(pipeline.owns(name) for name in each)
            found[f"{way}/{schedule.name}"] = {n: g for n, g in each.items() if n.endswith((".weight",))}, owned
            pipeline.close()
    return found


def test_two_ranks() -> None:
    both = run_ranks(across, 2)
    for case in both[0]:
        way = case.split("/")[0]
        first, second, count = serial(way)
        ends = {"embed.weight": first, "0.weight": first, "head.weight": second, "3.weight": second}
        seen = 0
        for found in both:
            for name, gradient in found[case][0].items():
                if name in ends:
                    seen += 1
                    torch.testing.assert_close(
                        torch.tensor(gradient), torch.tensor(ends[name]), rtol=1e-4, atol=1e-6, msg=f"{case} {name}"
                    )
        assert seen >= 1, case
        assert found[case][1] + both[0][case][1] == count, case  # a norm counts each weight once


def frozen(rank: int) -> bool:
    shared = weight().requires_grad_(False)
    ends = [Layer("embed", lambda: Embed(shared)), Layer("b", lambda: Block(0)), Layer("head", lambda: Head(shared))]
    pipeline = Pipeline(ends, S.gpipe(2, 2), loss=loss_of, options=OPTIONS)
    pipeline.step(*data())
    pipeline.close()
    return any(p.requires_grad or p.grad is not None for n, p in pipeline.named_parameters() if n[0] != "b")


def test_a_frozen_object_stays_frozen() -> None:
    assert run_ranks(frozen, 2) == [False, False]


def test_groups_that_overlap_are_one() -> None:
    assert merged([("a", "b"), ("c", "d"), ("b", "c"), ("x", "y")]) == [("a", "b", "c", "d"), ("x", "y")]
    assert merged([("a", "b"), ("a", "b")]) == [("a", "b")]


# -- names that are wrong, and gradients that cannot be summed -----------------------------------------------------------------


def chain() -> list[Layer]:
    return [Layer(f"block{i}", lambda seed=i: Block(seed)) for i in range(2)]


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        (
            ("0.weight", "1.weight"),
            r"tied is \('0.weight', '1.weight'\); it must be a Sequence\[Sequence\[str\]\]",
        ),
        (
            [("block0.linear.weight",)],
            r"tied: \('block0.linear.weight',\) is not a group .*tied=\[\('embed.weight', 'head.weight'\)\]",
        ),
        (
            [("block0.linear.weight", "block1.linear.wieght")],
            r"no parameter is called 'block1.linear.wieght'; did you mean 'block1.linear.weight'",
        ),
        (
            [("block0.linear.weight", "blok1.linear.weight")],
            r"no layer holds 'blok1.linear.weight'; did you mean 'block[01]'",
        ),
    ],
)
def test_wrong_ties(tied: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalPipeline(chain(), S.gpipe(2, 2), loss=mse, tied=tied)


def test_unknown_layers_to_recompute() -> None:
    options = RuntimeOptions(recompute=frozenset({"block0", "blok1"}))
    with pytest.raises(ConfigError, match=r"recompute: no layer is called 'blok1'; did you mean 'block[01]'"):
        LocalPipeline(chain(), S.gpipe(2, 2), loss=mse, options=options)
    LocalPipeline(chain(), S.gpipe(2, 2), loss=mse, options=RuntimeOptions(recompute=frozenset({"block0"})))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Broken(nn.Module):
    def __init__(self) -> None:
        raise ZeroDivisionError("no such file")


def refused(rank: int) -> dict[str, str]:
    """What each rank says; the wrong layer is on one of them only."""
    said = {}
    sparse = [Layer("embed", Sparse), Layer("head", lambda: nn.Linear(WIDTH, WORDS, bias=False))]
    tie = [("embed.table.weight", "head.weight")]
    dp = Mesh.of(MeshShape(dp=2))
    cases: dict[str, Callable[[], Pipeline]] = {
        "ties": lambda: Pipeline(sparse, S.gpipe(2, 2), loss=loss_of, tied=tie, options=OPTIONS),
        "routes": lambda: Pipeline(sparse, S.dualpipe(2, 4), loss=loss_of, options=OPTIONS, stages=[1, 1]),
        "replicas": lambda: Pipeline(sparse, S.gpipe(1, 2), loss=loss_of, mesh=dp, options=OPTIONS),
        "names": lambda: Pipeline(
            chain(), S.gpipe(2, 2), loss=mse, tied=[("block0.linear.weight", "block1.x")], options=OPTIONS
        ),
        "broken": lambda: Pipeline([*chain()[:1], Layer("bad", Broken)], S.gpipe(2, 2), loss=mse, options=OPTIONS),
    }
    for case, build in cases.items():
        try:
            build().close()
            said[case] = "nothing"
        except (ConfigError, DistributedError, UsageError, ZeroDivisionError) as error:
            said[case] = f"{type(error).__name__}: {error}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        norm = [Layer("norm", lambda: nn.BatchNorm1d(WIDTH)), Layer("fixed", lambda: nn.BatchNorm1d(WIDTH).eval())]
        Pipeline(norm, S.gpipe(1, 2), loss=mse, mesh=dp, options=OPTIONS).close()
    said["statistics"] = "; ".join(str(each.message) for each in warned)
    pipeline = Pipeline(sparse, S.gpipe(2, 2), loss=loss_of, options=OPTIONS)  # nobody sums it here
    pipeline.step(*data())
    want = torch.sqrt(sum((p.grad.to_dense() ** 2).sum() for p in pipeline.parameters() if p.grad is not None))  # type: ignore[arg-type]
    norm = pipeline.grad_norm().item()
    said["sparse"] = str([norm, float(want)])
    pipeline.clip_grad_norm_(norm / 2)
    assert pipeline.grad_norm().item() == pytest.approx(norm / 2, rel=1e-4)
    pipeline.close()
    return said


def test_every_rank_refuses_what_one_cannot_do() -> None:
    first, second = run_ranks(refused, 2)
    for case, over in (
        ("ties", "the ranks of tied weights"),
        ("routes", "two routes"),
        ("replicas", "data-parallel replicas"),
    ):
        for said in (first, second):
            assert said[case].startswith("ConfigError: 'embed.table.weight' has sparse gradients"), (case, said[case])
            assert over in said[case]
            assert "sparse=False" in said[case]
    assert first["names"] == second["names"] != "nothing"
    assert "no parameter is called 'block1.x'" in first["names"]
    assert second["broken"] == "ZeroDivisionError: no such file"
    assert "rank 1 of the pipeline could not build its layers: ZeroDivisionError: no such file" in first["broken"]
    assert first["statistics"].startswith(
        "layer 'norm' has running statistics (BatchNorm1d): each of the 2 data-parallel"
    )
    assert "'fixed'" not in first["statistics"]
    assert second["statistics"] == ""
    norms = [eval(said["sparse"]) for said in (first, second)]
    assert norms[0][0] == norms[1][0] == pytest.approx((norms[0][1] ** 2 + norms[1][1] ** 2) ** 0.5, rel=1e-5)


class Borrowing(nn.Module):
    """A head whose weight is another layer's, and no parameter of its own."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.others = [embed]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.others[0].weight)


def borrowing(rank: int, way: str) -> None:
    middle: list[Any] = [Layer("b0", lambda: Block(0)), Layer("b1", lambda: Block(1))]
    loss: Callable[[Any, Any], Tensor] = loss_of
    embed = Embed(weight())
    if way == "modules":
        given: list[Any] = [embed, *middle, Borrowing(embed)]
    elif way == "factories":
        given = [Layer("embed", lambda: embed), *middle, Layer("head", lambda: Borrowing(embed))]
    else:
        assert way == "loss"
        given = [embed, *middle, Layer("b2", lambda: Block(2))]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(linear(output, embed.weight), target)

    Pipeline(given, S.one_f_one_b(2, 4), loss=loss).step(*data())


@pytest.mark.parametrize("way", ["modules", "factories", "loss"])
def test_a_weight_of_another_rank_that_no_layer_here_holds_is_refused(way: str, tmp_path: Path) -> None:
    """Its gradient would stay on the rank that uses it."""
    ends = run_until_dead(borrowing, 2, tmp_path, way)
    assert all(end.code != 0 for end in ends)
    name = "embed.weight" if way == "factories" else "0.weight"
    assert f"uses {name!r}, a parameter of a layer of another rank" in ends[1].words
