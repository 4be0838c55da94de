"""Arguments that are not what a pipeline takes: one sentence, the same on every rank, and no rank waits for another."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pipeloom as pl
from models import Block, batch, blocks, mse
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.stage_modules import split_layers
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules
QUIET = RuntimeOptions(monitor=False)


class Scaled(Block):
    """Takes a keyword argument of its own."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Shifted(Block):
    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return super().forward(x) + shift


class Open(Block):
    """Takes any keyword argument."""

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return super().forward(x)


def layers() -> list[Layer]:
    """`scale` is known to the first rank of two only, `shift` to the last only."""
    kinds = (Scaled, Block, Block, Shifted)
    return [Layer(f"layer{at}", partial(kind, at)) for at, kind in enumerate(kinds)]


def words(call: Callable[[], object]) -> str:
    """The error that a call ends with."""
    try:
        call()
    except (UsageError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


METHODS = ("step", "forward_backward", "evaluate", "predict")


def after_close(rank: int) -> list[str]:
    pipeline = Pipeline(blocks(2), S.one_f_one_b(2, 2), loss=mse)
    pipeline.step(*batch(4))
    pipeline.close()
    pipeline.close()
    return [
        words(lambda method=method: getattr(pipeline, method)(*batch(4)[: 1 + (method != "predict")]))
        for method in METHODS
    ]


def test_a_closed_pipeline_runs_nothing() -> None:
    want = [f"UsageError: {method}: the pipeline is closed; build it again" for method in METHODS]
    assert run_ranks(after_close, 2) == [want] * 2


MISSPELT = (
    ("scael", "did you mean 'scale'?"),
    ("shfit", "did you mean 'shift'?"),
    ("target", "did you mean 'targets'?"),
)


def misspelt(rank: int, kind: str, processes: int) -> list[list[str]]:
    schedule = {"1f1b": S.one_f_one_b(2, 2), "two routes": S.dualpipe(2, 4)}[kind]
    model = layers() if kind == "1f1b" else [layers()[0], layers()[3]]
    pipeline = Pipeline(model, schedule, loss=mse, options=QUIET)
    x, y = batch(4)
    found = []
    for method in METHODS:
        call = getattr(pipeline, method)
        given = (x,) if method == "predict" else (x, y)
        wrong = [words(partial(call, *given, **{key: 2.0})) for key, _ in MISSPELT]
        right = words(partial(call, *given, scale=2.0, shift=1.0))  # each of them known to one rank only
        own = words(partial(call, *given, microbatch=3))
        first = words(partial(call, *given, x=y))
        found.append([*wrong, right, own, first])
    pipeline.close()
    return found


@pytest.mark.parametrize("kind", ["1f1b", "two routes"])
def test_every_rank_refuses_the_same_keywords(kind: str) -> None:
    """A rank refuses, and accepts, by the layers of all ranks: none is left waiting for another."""
    ranks = run_ranks(misspelt, 2, kind, 2)
    assert ranks[0] == ranks[1]
    for method, (*wrong, right, own, first) in zip(METHODS, ranks[0], strict=True):
        for (key, nearest), text in zip(MISSPELT, wrong, strict=True):
            assert text.startswith(f"UsageError: {method} got the keyword argument {key!r}, which no layer takes")
            assert nearest in text or method == "predict"
        assert right == "no error"
        assert own.startswith(f"UsageError: {method} got the keyword argument 'microbatch'")
        assert first.startswith(f"UsageError: {method} got the keyword argument 'x'")


def test_a_layer_that_takes_any_keyword_takes_it() -> None:
    pipeline = LocalPipeline([*layers(), Layer("open", partial(Open, 4))], S.one_f_one_b(2, 2), loss=mse)
    pipeline.step(*batch(4), anything=1)
    with pytest.raises(UsageError, match="keyword argument 'microbatch'"):
        pipeline.step(*batch(4), microbatch=1)


X, Y = batch(4)


def test_the_share_of_a_local_pipeline_is_the_whole_loss() -> None:
    """DualPipe computes the loss on two ranks."""
    pipeline = LocalPipeline(layers(), S.dualpipe(2, 4), loss=mse)
    assert pipeline.loss_share is None
    loss = pipeline.step(*batch(4))
    assert pipeline.loss_share is not None
    assert float(pipeline.loss_share) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("make", [LocalPipeline, Pipeline])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((blocks(4), "1f1b"), r"schedule is '1f1b', a name; make .*pipeloom.schedules.build\('1f1b', ranks=4, "),
        ((blocks(4), None), "schedule is of type NoneType; give a pipeloom.Schedule"),
        ((nn.Linear(2, 2), S.gpipe(1, 1)), "layers is of type Linear; give a list"),
        (("abcd", S.gpipe(1, 1)), "layers is of type str; give a list"),
        (([1, 2, 3], S.gpipe(1, 1)), "layer 0 is of type int; give a module or a factory"),
        (
            ([torch.tanh], S.gpipe(1, 1)),
            r"layer 0 is built by a call without arguments, and this one takes some \(tanh",
        ),
        (([Layer("a", nn.Linear)], S.gpipe(1, 1)), r"layer 0 is built .* takes some \(.*'in_features'"),
    ],
)
def test_constructor_arguments(make: Any, arguments: tuple[Any, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(*arguments, loss=mse)
    with pytest.raises(UsageError, match="loss is of type NoneType; give a function"):
        make(blocks(4), S.gpipe(1, 1), loss=None)


@pytest.mark.parametrize("make", [LocalPipeline, Pipeline])
@pytest.mark.parametrize("method", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (({"x": X}, Y), r"the inputs are a dict; give its tensors in the order of the first layer's arguments"),
        ((X, {"y": Y}), r"the targets are a dict; give a tensor, or a tuple of tensors"),
        ((X, None), r"(step|evaluate) got no targets; predict\(inputs\)"),
        ((X,), r"(step|evaluate) got no targets; predict\(inputs\)"),
        ((X, "abc"), r"the targets \(str\) hold no tensor"),
        ((X, ()), r"the targets \(tuple\) hold no tensor"),
        ((None, Y), r"the inputs hold no tensor with a batch dimension"),
        ((X, Y[:1]), r"4 rows, and the targets hold a tensor of shape \[1, 3, 6\]: .*shared_targets=True"),
        ((X, (Y, [Y[0]])), r"4 rows, and the targets hold a tensor of shape \[3, 6\]"),
    ],
)
def test_inputs_and_targets(make: Any, method: str, given: tuple[Any, ...], text: str) -> None:
    pipeline = make(blocks(2), S.one_f_one_b(1, 2), loss=mse)
    with pytest.raises(UsageError, match=text):
        getattr(pipeline, method)(*given)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda output, target: 1.0, "the loss returned float; it must return a tensor"),
        (lambda output, target: (output - target) ** 2, r"returned torch.float32\[2, 3, 6\]; it must return"),
    ],
)
def test_a_loss_that_is_no_mean(loss: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        LocalPipeline(blocks(2), S.one_f_one_b(1, 2), loss=loss).step(X, Y)


def test_a_loss_of_one_element_is_a_number() -> None:
    pipeline = LocalPipeline(blocks(2), S.one_f_one_b(1, 2), loss=lambda output, target: mse(output, target).reshape(1))
    loss = pipeline.step(X, Y)
    assert loss.shape == ()


def test_no_process_group() -> None:
    with pytest.raises(ConfigError) as refused:
        Pipeline(blocks(4), S.one_f_one_b(2, 4), loss=mse)
    assert str(refused.value) == (
        "the schedule has 2 ranks, and this process is alone, because torch.distributed is not initialized: start it with "
        'torchrun --nproc-per-node 2 and call torch.distributed.init_process_group("gloo") before Pipeline, or run all '
        "ranks in this process with LocalPipeline"
    )


def meshes(rank: int) -> list[str]:
    def make(mesh: Any, ranks: int = 2) -> str:
        return words(lambda: Pipeline(blocks(4), S.one_f_one_b(ranks, 2), loss=mse, mesh=mesh, options=QUIET).close())

    return [
        make(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))),
        make(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
        make(init_device_mesh("cpu", (1, 2))),
        make(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))),
        make(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))),
        make(init_device_mesh("cpu", (2,))),
        make(None, 3),
        warned(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))),
        warned(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))),
    ]


def warned(mesh: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipeline(blocks(4), S.one_f_one_b(mesh["pp"].size(), 2), loss=mse, mesh=mesh, options=QUIET).close()
    return "; ".join(f"{Path(each.filename).name}: {each.message}" for each in caught if each.category is UserWarning)


def test_a_device_mesh_needs_an_axis_pp() -> None:
    found = run_ranks(meshes, 2)
    assert found[0] == found[1]
    for text, axes in zip(
        found[0], ("its axes are dp, tp;", "its axes are dp;", "its 2 axes have no names;"), strict=False
    ):
        assert text.startswith(f"UsageError: the device mesh has no axis 'pp', {axes} call the pipeline's axis 'pp'")
    assert found[0][3:6] == ["no error"] * 3
    assert found[0][7].startswith(
        "test_arguments.py: the pipeline takes the axis 'pp' of the device mesh and leaves dp 2 to"
    )
    assert found[0][8] == ""
    assert found[0][6] == (
        "ConfigError: the schedule has 3 ranks, and the pipeline 2 processes: make a schedule of 2, or start 3 processes "
        "for each pipeline"
    )


def without_overlap(rank: int) -> list[str]:
    found = []
    for transport in ("auto", "individual", "batched"):
        options = RuntimeOptions(monitor=False, overlap_p2p=False, transport=transport)  # type: ignore[arg-type]
        found.append(words(lambda options=options: run_once(options)))
    return found


def run_once(options: RuntimeOptions) -> None:
    pipeline = Pipeline(blocks(4), S.one_f_one_b(2, 2), loss=mse, options=options)
    pipeline.step(*batch(4))
    pipeline.close()


def test_overlap_cannot_be_turned_off_over_shared_memory() -> None:
    """Nothing would change, so a comparison with and without it would say what is not so."""
    with pytest.raises(ConfigError, match="overlap_p2p is False, and the shared-memory transport posts no receives"):
        RuntimeOptions(transport="shared", overlap_p2p=False)
    RuntimeOptions(transport="shared")
    RuntimeOptions(transport="shared", overlap_p2p=True)
    for auto, individual, batched in run_ranks(without_overlap, 2):
        assert auto.startswith("ConfigError: overlap_p2p is False, and the shared-memory transport posts no receives")
        assert individual == batched == "no error"


@pytest.mark.parametrize("stages", [[5, -1], [2.0, 2.0], "ab", 4])
def test_stages_that_are_no_numbers_of_layers_are_refused(stages: Any) -> None:
    with pytest.raises(ConfigError, match=rf"stages is {re.escape(repr(stages))}; it must be a list of whole numbers"):
        split_layers(4, 2, stages)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("timeout", 0.5, r"must be 1 to .* seconds, or None"),
        ("timeout", "a", "must be a number or None"),
        ("device", "x", "must be a device of torch"),
        ("device", [], "must be a device or a string or a whole number or None"),
        ("recompute", "some", "must be one of 'none', 'full' or a frozenset"),
        ("seed", "x", "must be a whole number"),
        ("check_every", 0.5, "must be a whole number of at least 0"),
        ("check_every", -1, "must be a whole number of at least 0"),
        ("init", "brodcast", "must be one of 'broadcast', 'check', 'none'"),
        ("shapes", "twice", "must be one of 'once', 'each'"),
        ("transport", "pigeon", "must be one of"),
        ("receive_depth", 0, "must be a whole number of at least 1"),
        ("receive_depth", 2.5, "must be a whole number of at least 1"),
        ("microbatch_sizes", "abc", "must be a list of whole numbers of at least 0"),
        ("slice_tokens", [0], "must be a list of whole numbers of at least 1"),
    ],
)
def test_an_option_of_another_value_is_refused(option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {re.escape(repr(value))}; it {words}"):
        RuntimeOptions(**{option: value})
