"""Layers that break the stage contract, and layers that only look as if they did: what `pl.verify` says of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipeloom as pl
from contract_kinds import (
    Aliases,
    Angles,
    Average,
    ChangesOne,
    Configuration,
    Counter,
    Counting,
    CountsInConfiguration,
    Decays,
    Drawing,
    InABuffer,
    InAFunction,
    InModuleHooks,
    InPlace,
    Keeps,
    Mean,
    Measures,
    Notes,
    OwnGenerators,
    ReadsAverage,
    Statistics,
    StepsInBackward,
    TakesAway,
    With,
    graph,
    sharing,
)
from models import batch, mse
from one_process import Plain
from pipeloom.errors import ConfigError, PipeloomError, UsageError, VerifyError
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.runtime.verify import _rolled
from pipeloom.schedule.sharding import shard

Make = Callable[[], Sequence[Callable[[], nn.Module]]]


def second_and_last(pair: Callable[[], Sequence[Any]]) -> Make:
    return lambda: (lambda a, b: [Plain, a, Plain, b])(*pair())


def every_other(kind: Any) -> Make:
    return lambda: [Plain, kind, Plain, kind]


def all_four(kind: Any) -> Make:
    return lambda: [kind] * 4


def one_for_all(kind: Any, shared: Callable[[], Any]) -> Make:
    def make() -> Sequence[Callable[[], nn.Module]]:
        one = shared()
        return [Plain, lambda: kind(one), Plain, lambda: kind(one)]

    return make


GRAPH = "RuntimeError"  # autograd's own words
# name: layers, and the verdict under 1F1B and under two routes: right, the contract's rule, or the error that names it
CASES: dict[str, tuple[Make, str, str]] = {
    "shared by two stages: a counter": (second_and_last(lambda: sharing(Counter)), "results", "results"),
    "shared by two stages: Statistics": (
        second_and_last(lambda: sharing(Statistics)),
        "buffers",
        "has running statistics",
    ),
    **{
        f"left for a later stage: {way}": (second_and_last(lambda way=way: sharing(way)), "results", "results")  # type: ignore[misc]
        for way in ("object", "global variable")
    },
    "left for a later stage: in place": (second_and_last(lambda: sharing("in place")), "results", "TypeError"),
    "left for a later stage: a graph": (second_and_last(graph), GRAPH, "TypeError"),
    **{
        f"a backward reads another forward's state: {kind.__name__}": (every_other(kind), "backwards", "backwards")
        for kind in (InAFunction, InModuleHooks, InABuffer)
    },
    "a forward reads what backwards write": (every_other(ReadsAverage), "results", "results"),
    "a buffer that backwards write": (every_other(Average), "right", "buffers"),
    "an optimizer in the backward": (lambda: [Plain, lambda: StepsInBackward(False), Plain, Plain], GRAPH, GRAPH),
    "an optimizer in the backward, through .data": (
        lambda: [Plain, lambda: StepsInBackward(True), Plain, Plain],
        "results",
        "parameters",
    ),
    "generators in attributes and dicts": (all_four(OwnGenerators), "recomputation", "results"),
    "state in objects and nested dicts": (all_four(Counting), "recomputation", "results"),
    "state in an attribute": (all_four(Mean), "right", "results"),
    **{
        f"changed in place: {what}": (all_four(lambda what=what: InPlace(what)), "recomputation", "results")  # type: ignore[misc]
        for what in ("attribute", "data")
    },
    "a weight that decays through .data": (all_four(Decays), "backwards", "results"),
    "an object that says whether a forward runs": (all_four(TakesAway), "AssertionError", "AssertionError"),
    **{
        f"two inputs of one memory: {what}": (
            lambda what=what: [Plain, lambda: Aliases(what), ChangesOne, Plain],
            *verdicts,
        )  # type: ignore[misc]
        for what, verdicts in {
            "same": ("backwards", "backwards"),
            "view": ("backwards", "backwards"),
            "detached": ("changes its input in place", "changes its input in place"),
        }.items()
    },
    **{
        f"allowed: {kind.__name__}": (every_other(kind), "right", "right") for kind in (Keeps, Notes, Drawing, Measures)
    },
    "allowed: a counter on a shared object": (one_for_all(CountsInConfiguration, Configuration), "right", "right"),
    "allowed: a shared table": (one_for_all(With, Angles), "right", "right"),
}


def verdict(make: Make, schedule: pl.Schedule) -> str:
    x, y = batch(8)
    layers = [Layer(f"l{at}", each) for at, each in enumerate(make())]
    try:
        pl.verify(layers, schedule, x, y, loss=mse, steps=2)
    except VerifyError as error:
        rule = re.search(r"own_model.md, '(\w+)'", str(error))
        return rule[1] if rule else str(error)
    except PipeloomError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return "right"


@pytest.mark.parametrize("name", CASES)
def test_one_route(name: str) -> None:
    make, wanted, _ = CASES[name]
    assert wanted in verdict(make, pl.schedules.build("1f1b", 2, 4))


@pytest.mark.parametrize("name", CASES)
def test_two_routes(name: str) -> None:
    make, _, wanted = CASES[name]
    assert wanted in verdict(make, pl.schedules.build("dualpipe", 2, 4))


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"steps": 1.5}, {"tolerance": float("nan")}, {"tolerance": -1.0}, {"tolerance": "a"}]
)
def test_verify_refuses_to_compare_nothing(given: dict[str, Any]) -> None:
    x, y = torch.randn(2, 6, 3)
    ((name, value),) = given.items()
    with pytest.raises(UsageError, match=f"{name} is {value!r}; it must be a"):
        pl.verify([nn.Linear(3, 3)], pl.schedules.gpipe(1, 2), x, y, loss=mse, **given)


def test_verify_cuts_both_sides_as_the_options_say_and_names_what_it_did_not_see() -> None:
    layers = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
    x, y = torch.randn(2, 6, 3, dtype=torch.float64)
    options = RuntimeOptions(microbatch_sizes=(3, 1, 2))
    schedule = pl.schedules.one_f_one_b(2, 3)
    plain = pl.verify(layers, schedule, x, y, loss=mse, options=options, steps=1)
    assert (plain.unseen, "not looked at" in str(plain)) == ((), False)
    sharded = pl.verify(layers, shard(schedule, 1), x, y, loss=mse, steps=1)
    assert sharded.unseen == ("REDUCE_GRAD", "RESHARD", "UNSHARD")
    assert str(sharded).endswith("; not looked at, as one process has no replicas: REDUCE_GRAD, RESHARD, UNSHARD")


class LeavesInAKeyword(nn.Linear):
    """Reads what the layer before left in a keyword argument, and leaves its own output there."""

    def forward(self, x: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().forward(x) + memory.get("last", torch.zeros(()))
        memory["last"] = out.detach()
        return out


def test_what_a_stage_leaves_in_a_keyword_argument_is_not_there_for_another() -> None:
    x, y = torch.randn(2, 4, 3)
    with pytest.raises(VerifyError, match="'results'"):
        pl.verify([LeavesInAKeyword(3, 3) for _ in range(2)], pl.schedules.one_f_one_b(2, 1), x, y, loss=mse, memory={})


class OfAWeight(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse(output * self.scale, target)


def test_a_loss_has_no_parameters_and_gradients_stay_as_they_were() -> None:
    layers, (x, y) = [nn.Linear(3, 3) for _ in range(2)], torch.randn(2, 4, 3)
    loss, schedule = OfAWeight(), pl.schedules.one_f_one_b(2, 4)
    before = [torch.ones_like(parameter) for parameter in layers[1].parameters()]
    for parameter, gradient in zip(layers[1].parameters(), before, strict=True):
        parameter.grad = gradient

    def uses_a_layer(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse(output, target) + layers[1].weight.square().sum()

    for wrong in (loss, uses_a_layer):
        with pytest.raises(VerifyError, match="'parameters'"):
            pl.verify(layers, schedule, x, y, loss=wrong)
    assert loss.scale.grad is None
    assert [parameter.grad for parameter in layers[0].parameters()] == [None, None]
    assert all(p.grad is gradient for p, gradient in zip(layers[1].parameters(), before, strict=True))


def test_parameters_of_two_layers_have_two_names() -> None:
    layers = [Layer("a", lambda: nn.Sequential(nn.Linear(3, 3))), Layer("a.0", lambda: nn.Linear(3, 3))]
    with pytest.raises(
        ConfigError, match=r"a\.0\.weight is in layer 'a' and in layer 'a\.0': give one of them another name"
    ):
        LocalPipeline(layers, pl.schedules.one_f_one_b(2, 4), loss=mse)
    layers[1] = Layer("a.1", layers[1].build)
    LocalPipeline(layers, pl.schedules.one_f_one_b(2, 4), loss=mse)


def test_another_micro_batch_has_the_same_values_beside_its_rows() -> None:
    rows, weights = torch.arange(6.0).reshape(3, 2), torch.arange(2.0)
    moved = _rolled({"x": [rows], "weights": weights, "scale": torch.tensor(2.0), "name": "x"}, 3, 1)
    assert moved["x"][0].tolist() == [[4, 5], [0, 1], [2, 3]]
    assert moved["weights"] is weights
    assert (moved["scale"], moved["name"]) == (2, "x")
