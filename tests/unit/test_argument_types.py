"""Arguments of other types than their annotations are refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeloom as pl
from pipeloom import checkpoint
from pipeloom.errors import ConfigError, UsageError
from pipeloom.limits import of_annotated_types
from pipeloom.parallel import Mesh, MeshShape
from pipeloom.plan.step import SequenceTime
from pipeloom.runtime import Layer, LocalPipeline, LossTerm, Pipeline, RuntimeOptions
from pipeloom.runtime.spread_vocabulary import vocabulary_share

ONE = pl.schedules.gpipe(1, 1)


def pipeline(**arguments: Any) -> LocalPipeline:
    return LocalPipeline([nn.Linear(2, 2)], ONE, loss=mse_loss, **arguments)


def plan(**arguments: Any) -> Any:
    return pl.plan_step([3, 4], 2, tokens=10, **arguments)


REFUSED: dict[str, Callable[[], Any]] = {
    "families is 5; it must be an Iterable[tuple[str, int]]": lambda: plan(families=5),
    "families is ['zbv']; it must be an Iterable[tuple[str, int]]": lambda: plan(families=["zbv"]),
    "time is 'fast'; it must be a SequenceTime": lambda: plan(time="fast"),
    "last is 5; it must be a StepPlan or None": lambda: plan(last=5),
    "linear is 'x'; it must be a number": lambda: SequenceTime(linear="x"),  # type: ignore[arg-type]
    "square is -1; it must be a number of at least 0": lambda: SequenceTime(square=-1),
    "deallocate is 'no'; it must be True or False": lambda: RuntimeOptions(deallocate="no"),  # type: ignore[arg-type]
    "overlap_p2p is 1; it must be True or False or None": lambda: RuntimeOptions(overlap_p2p=1),  # type: ignore[arg-type]
    "options is {'seed': 1}; it must be a RuntimeOptions": lambda: pipeline(options={"seed": 1}),
    "tied is [(1, 2)]; it must be a Sequence[Sequence[str]]": lambda: pipeline(tied=[(1, 2)]),
    "tied is ['ab']; it must be a Sequence[Sequence[str]]": lambda: pipeline(tied=["ab"]),
    "ignore_index is True; it must be a whole number or None": lambda: pipeline(ignore_index=True),
    "mesh is 5; it must be a Mesh or a PipelineMesh or a DeviceMesh or None": lambda: Pipeline(
        [nn.Linear(2, 2)],
        ONE,
        loss=mse_loss,
        mesh=5,  # type: ignore[arg-type]
    ),
    "shape is 5; it must be a MeshShape": lambda: Mesh.of(5),  # type: ignore[arg-type]
    "pp is 1.5; it must be a whole number": lambda: MeshShape(pp=1.5),  # type: ignore[arg-type]
    "build is a module; give a function that makes it": lambda: Layer("a", nn.Linear(2, 2)),
    "build is None; it must be a Callable[[], Module]": lambda: Layer("a", None),  # type: ignore[arg-type]
    "weight of a LossTerm is nan; it must be finite": lambda: LossTerm(mse_loss, weight=float("nan")),
    "tolerance is []; it must be a number or None": lambda: pl.verify([], ONE, 0, 0, loss=mse_loss, tolerance=[]),  # type: ignore[arg-type]
    "repeats is 'x'; it must be a whole number": lambda: pl.profile([], 0, 0, loss=mse_loss, repeats="x"),  # type: ignore[arg-type]
    "model is 5; it must be a Module": lambda: pl.auto_layers(5, torch.ones(1)),  # type: ignore[arg-type]
    "start is 'zbv'; it must be a Schedule or None": lambda: pl.search(2, 2, start="zbv"),  # type: ignore[arg-type]
    "costs is 1; it must be a Costs or None": lambda: pl.schedules.zbv(2, 2, costs=1),  # type: ignore[arg-type]
    "offload_chunks is 'x'; it must be a whole number": lambda: pl.schedules.gis(2, 2, offload_chunks="x"),  # type: ignore[arg-type]
    "words is [5]; it must be an Iterable[str]": lambda: pl.schedules.transformed(ONE, [5]),  # type: ignore[list-item]
    "options is 5; it must be a Mapping[str, Any] or None": lambda: pl.schedules.build("1f1b", 2, 2, options=5),  # type: ignore[arg-type]
    "microbatches is None; it must be a whole number": lambda: pl.schedules.build("zbv", 2, None),  # type: ignore[arg-type]
    "microbatches is 'x'; it must be a whole number": lambda: pl.schedules.seq1f1b(2, "x", slices=2),  # type: ignore[arg-type]
    "path is 5; it must be a string or a Path": lambda: pl.load(5),  # type: ignore[arg-type]
    "path is 5; it must be a string or a Path ": lambda: ONE.save(5),  # type: ignore[arg-type]
    "tensors is 5; it must be an Iterable[NamedTensor | tuple[str, int, Sequence[int]]]": lambda: ONE.with_tensors(5),  # type: ignore[arg-type]
    "tensors is [('a', 0)]; it must be an Iterable": lambda: ONE.with_tensors([("a", 0)]),  # type: ignore[list-item]
    "slots is 5; it must be a Mapping[str, Any]": lambda: ONE.with_slots(5),  # type: ignore[arg-type]
    "placement is 5; it must be a Sequence[int]": lambda: pl.Schedule.of([], placement=5, microbatches=1),  # type: ignore[arg-type]
    "name is 5; it must be a string": lambda: pl.Schedule.of([], placement=[], microbatches=1, name=5),  # type: ignore[arg-type]
    "actions is 5; it must be a Collection[tuple[int, int]] or None": lambda: pl.schedules.recompute(ONE, actions=5),  # type: ignore[arg-type]
    "last is 'x'; it must be a whole number": lambda: pl.schedules.defer_last_stage_weights(ONE, "x"),  # type: ignore[arg-type]
    "seed is []; it must be a whole number": lambda: pl.search(2, 2, seed=[]),  # type: ignore[arg-type]
    "kind is 5; it must be a Kind": lambda: pl.register_kind(5),  # type: ignore[arg-type]
    "costs is 5; it must be a Costs or None": lambda: pl.compare([ONE], 5),  # type: ignore[arg-type]
    "layers is 5; it must be a Sequence[Any] or a Sequential or a ModuleList": lambda: pl.profile(
        5, 0, 0, loss=mse_loss
    ),  # type: ignore[arg-type]
    "verify got no targets": lambda: pl.verify([nn.Linear(2, 2)], ONE, torch.ones(1, 2), None, loss=mse_loss),
    "reads is 'skip'; it must be a Sequence[str] or a Mapping[str, str]": lambda: Layer("a", nn.Identity, reads="skip"),
    "losses is {'a': 1.0}; it must be a Mapping[str, LossTerm]": lambda: Layer("a", nn.Identity, losses={"a": 1.0}),  # type: ignore[dict-item]
    "weight is 5; it must be a Tensor": lambda: vocabulary_share("head", 5, 0, 2),  # type: ignore[arg-type]
    "state is 5; it must be a Mapping[str, Any]": lambda: pipeline().load_state_dict(5),  # type: ignore[arg-type]
    "pipeline is 5; it must be a Pipeline": lambda: checkpoint.load("runs", 5),  # type: ignore[arg-type]
    "optimizer is 5; it must be an Optimizer": lambda: checkpoint.save("runs", 1, pipeline(), 5),  # type: ignore[arg-type]
    "keep is -1; it must be a whole number of at least 0": lambda: checkpoint.Saver("runs", pipeline(), keep=-1),
    "keep_every is -1; it must be a whole number of at least 0": lambda: checkpoint.Saver(
        "runs", pipeline(), keep_every=-1
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_of_another_type_is_named(words: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(words.strip())):
        REFUSED[words]()


@of_annotated_types
def annotated(
    number: int = 0,
    either: Literal["a", 1] | None = None,
    pair: tuple[str, int] = ("a", 1),
    rows: Sequence[tuple[float, ...]] = (),
    names: Mapping[str, Sequence[str]] = {},
) -> int:
    """A function whose annotations are of all forms."""
    return number


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"number": 0}, {"number": "x"}),
        ({"either": "a"}, {"either": "b"}),
        ({"pair": ("b", 2)}, {"pair": ("b",)}),
        ({"pair": ("b", 2)}, {"pair": ("b", "c")}),
        ({"rows": [(1, 2.5), ()]}, {"rows": [(1, "x")]}),
        ({"names": {"a": ["b"]}}, {"names": {"a": "b"}}),
        ({"names": {"a": ["b"]}}, {"names": {1: ["b"]}}),
    ],
)
def test_elements_are_checked_too(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert annotated(**right) == 0
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))} is "):
        annotated(**wrong)


def test_what_json_and_numpy_have_in_their_place_is_taken() -> None:
    """Lists for tuples, numpy's booleans and arrays, strings of other classes."""
    assert annotated(pair=["b", 2], either=type("Text", (str,), {})("a")) == 0  # type: ignore[arg-type]
    assert plan(families=[["1f1b", 1]]).family == ("1f1b", 1)
    options = RuntimeOptions(deallocate=np.bool_(False), microbatch_sizes=np.array([3, 1]))  # type: ignore[arg-type]
    assert options.microbatch_sizes == (3, 1)
    with pytest.raises(UsageError, match=r"give .name, chunks. of known ones"):
        plan(families=iter(["zbv"]))
    with pytest.raises(TypeError, match=r"gpipe\(\) missing"):
        pl.schedules.gpipe(2)  # type: ignore[call-arg]


def test_every_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeOptions(transport=5, seed="x")  # type: ignore[arg-type]
    assert caught.value.problems == [
        "transport is 5; it must be one of 'auto', 'individual', 'batched', 'shared'",
        "seed is 'x'; it must be a whole number or None",
    ]


@pytest.mark.parametrize("value", [5, torch.empty(2, 2, device="meta"), torch.eye(2).to_sparse()])
def test_a_state_without_values_is_refused_and_copies_nothing(value: Any) -> None:
    layer = nn.Linear(2, 2)
    local = LocalPipeline([layer], ONE, loss=mse_loss)
    before = layer.bias.clone()
    with pytest.raises(UsageError, match=r"^the state's '0\.weight' is no torch\.strided tensor with values"):
        local.load_state_dict({"0.bias": torch.zeros(2), "0.weight": value})
    assert torch.equal(layer.bias, before)
