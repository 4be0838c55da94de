"""What may cross a boundary between stages, and what stays alive behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import pipeloom as pl
from awkward import MODELS, SPLIT, First, Unused, chain
from models import Block, batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from processes import run_ranks

S = pl.schedules
SCHEDULES = [S.gpipe(4, 3), S.one_f_one_b(4, 5), S.interleaved(2, 5, 2), S.looped_bfs(2, 4, 2), S.gpipe(1, 3)]
PADDED = torch.tensor([1, 3, 2, 3, 1, 1, 2, 2])


class Trim(Block):
    """Cuts the padding: how long the output is depends on the data."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        longest = int(lengths.max())
        return super().forward(x)[:, :longest], lengths


class AfterTrim(Block):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * lengths[:, None, None], lengths


class Total(Block):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) / lengths[:, None, None]).sum(1)


class Scaled(Block):
    """Takes a keyword argument; a tensor of it is cut with the batch."""

    def forward(self, x: Tensor, *, scale: Tensor | None = None, power: float = 1.0) -> Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        return hidden if scale is None else hidden * scale[:, None, None] ** power


class Dictionary(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return {"hidden": x}


def compare(pipeline: Any, layers: list[Layer], inputs: Any, targets: Tensor, sizes: list[int]) -> tuple[float, float]:
    """How far a step is from one process: the loss, and the worst gradient of those that this rank has."""
    loss = pipeline.step(inputs, targets)
    want_loss, want = serial(layers, inputs, targets, sizes)
    names = {name for name, p in pipeline.named_parameters() if p.requires_grad}
    return abs(loss.item() / want_loss.item() - 1), worst(gradients(pipeline), {n: want[n] for n in want if n in names})


@pytest.mark.parametrize("schedule", [*SCHEDULES, SPLIT], ids=repr)
@pytest.mark.parametrize("model", MODELS)
def test_what_crosses_a_boundary(model: str, schedule: pl.Schedule) -> None:
    layers, m = MODELS[model](), schedule.microbatches
    for options in (RuntimeOptions(), RuntimeOptions(shapes="each", deallocate=False)):
        sizes = (3, *[2] * (m - 1))
        pipeline = LocalPipeline(layers, schedule, loss=mse, options=options, stages=spread(schedule))
        off = compare(pipeline, layers, *batch(sum(sizes)), list(sizes))
        assert max(off) <= 1e-6, off


def spread(schedule: pl.Schedule) -> list[int]:
    return [4 // schedule.positions] * schedule.positions


@pytest.mark.core
def test_weights_of_an_unused_output_get_none() -> None:
    """As in one process: the next stage's gradient of that output is None."""
    layers = [*chain(Unused, First), *blocks(1)]
    pipeline = LocalPipeline(layers, S.one_f_one_b(3, 4), loss=mse)
    x, y = batch(8)
    pipeline.step(x, y)
    got = gradients(pipeline)
    assert "layer0.side" not in got
    assert worst(got, serial(layers, x, y, [2] * 4)[1]) <= 1e-6


def variable() -> list[Layer]:
    kinds: list[Callable[[int], nn.Module]] = [Trim, AfterTrim, AfterTrim, Total]
    return [Layer(f"layer{i}", lambda kind=kind, seed=i: kind(seed)) for i, kind in enumerate(kinds)]


def variable_step(pipeline: Any) -> tuple[float, float]:
    x, y = batch(8)[0], batch(8, seed=1)[0][:, 0]
    loss = pipeline.step((x, PADDED), y)
    modules = [layer() for layer in variable()]
    total = torch.zeros(())
    for part, lengths, target in zip(x.split(2), PADDED.split(2), y.split(2), strict=True):
        out: Any = (part, lengths)
        for module in modules:
            out = module(*out)
        total = total + mse(out, target) / 4
    total.backward()
    every = {f"layer{i}.{n}": p.grad for i, module in enumerate(modules) for n, p in module.named_parameters()}
    got = gradients(pipeline)
    return abs(loss.item() / total.item() - 1), worst(got, {name: every[name] for name in got})  # type: ignore[misc]


@pytest.mark.core
@pytest.mark.parametrize("schedule", [S.gpipe(4, 4), S.one_f_one_b(2, 4), S.interleaved(2, 4, 2)], ids=repr)
def test_lengths_that_depend_on_the_data(schedule: pl.Schedule) -> None:
    pipeline = LocalPipeline(
        variable(), schedule, loss=mse, options=RuntimeOptions(shapes="each"), stages=spread(schedule)
    )
    for _ in range(2):
        off = variable_step(pipeline)
        assert max(off) <= 1e-6, off
        pipeline.zero_grad()


@pytest.mark.core
def test_lengths_that_depend_on_the_data_need_shapes_each() -> None:
    pipeline = LocalPipeline(variable(), S.gpipe(4, 4), loss=mse)
    with pytest.raises(UsageError, match=r'micro-batch 2 is .*2, 1, 6.*was .*2, 3, 6.*shapes = "each"') as caught:
        variable_step(pipeline)
    assert any("rank 0" in note for note in caught.value.__notes__)


def dense() -> list[Layer]:
    return [Layer(f"linear{i}", lambda: nn.Linear(6, 6)) for i in range(4)]


@pytest.mark.core
@pytest.mark.parametrize("change", ["autocast", "frozen"])
def test_outputs_that_are_others_than_before_are_described(change: str) -> None:
    pipeline = LocalPipeline(dense(), S.one_f_one_b(2, 4), loss=mse)
    x, y = batch(4)
    pipeline.step(x, y)
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_(change == "autocast" or name.startswith("linear3"))
    words = {"autocast": r"is \(bfloat16\[.*was \(float32\[", "frozen": r"6\]\); .*6\] with a gradient\)"}[change]
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"),
        pytest.raises(UsageError, match=words + ".*build a new pipeline if layers were frozen .* or autocast switched"),
    ):
        pipeline.step(x, y)


def keyword_step(pipeline: Any) -> tuple[float, float]:
    x, y = batch(7)
    scale = torch.linspace(0.5, 1.5, 7)
    loss = pipeline.step(x, y, scale=scale, power=2.0)
    modules = [Scaled(i) for i in range(4)]
    out = x
    for module in modules:
        out = module(out, scale=scale, power=2.0)
    whole = mse(out, y)
    whole.backward()
    every = {f"layer{i}.{n}": p.grad for i, module in enumerate(modules) for n, p in module.named_parameters()}
    got = gradients(pipeline)
    return abs(loss.item() / whole.item() - 1), worst(got, {name: every[name] for name in got})  # type: ignore[misc]


@pytest.mark.core
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_keyword_arguments_reach_every_stage(schedule: pl.Schedule) -> None:
    pipeline = LocalPipeline(chain(*[Scaled] * 4), schedule, loss=mse, stages=spread(schedule))
    off = keyword_step(pipeline)
    assert max(off) <= 1e-5, off


@pytest.mark.core
def test_a_dictionary_is_refused_with_the_layer() -> None:
    layers = [*blocks(1), Layer("head", lambda: Dictionary(1)), Layer("tail", lambda: Block(2))]
    pipeline = LocalPipeline(layers, S.gpipe(3, 2), loss=mse)
    with pytest.raises(
        UsageError, match=r"stage 1 returned dict; between stages only tensors and None can be sent"
    ) as caught:
        pipeline.step(*batch(4))
    assert any("F of stage 1 micro-batch 0" in note for note in caught.value.__notes__)
    inside = LocalPipeline(layers, S.gpipe(1, 2), loss=mse)
    with pytest.raises(UsageError, match="layer 'head' returned dict"):
        inside.step(*batch(4))


class Watched(Block):
    """Counts, at each of its backwards, how many of its outputs' storages are still there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.outputs: list[StorageWeakRef] = []
        self.there: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        outputs = self.outputs  # a hook may not read an attribute that other forwards have changed meanwhile
        hidden.register_hook(lambda _: self.there.append(sum(not ref.expired() for ref in outputs)))
        outputs.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden


def storages(schedule: pl.Schedule, transport: Any, deallocate: bool = True) -> dict[str, Any]:
    """One step; how many outputs of the first stage were alive at each of its backwards, and at the end."""
    kept: list[Watched] = []
    first = Layer("block0", lambda: kept.append(Watched(0)) or kept[0])  # type: ignore[func-returns-value]
    layers = [first, *blocks(schedule.stages)[1:]]
    options = RuntimeOptions(transport=transport, deallocate=deallocate, monitor=False)
    pipeline = Pipeline(layers, schedule, loss=mse, options=options)
    x, y = batch(2 * schedule.microbatches)
    loss = pipeline.step(x, y)
    _, want = serial(blocks(schedule.stages), x, y, [2] * schedule.microbatches)
    got = gradients(pipeline)
    watched = kept[0] if kept else None
    report = {
        "there": watched and list(watched.there),
        "left": watched and sum(not ref.expired() for ref in watched.outputs),
        "worst": worst(got, {name: want[name] for name in got}),
        "loss": loss.item(),
    }
    pipeline.close()
    return report


def work(rank: int) -> dict[str, Any]:
    """The same over gloo, two processes."""
    off: dict[Any, tuple[float, float]] = {}
    for transport in ("individual", "shared"):
        each = RuntimeOptions(transport=transport, shapes="each", monitor=False)  # type: ignore[arg-type]
        trimmed = Pipeline(variable(), S.interleaved(2, 4, 2), loss=mse, options=each)
        off["variable", transport] = variable_step(trimmed)
        trimmed.close()
    return {
        "off": off,
        "individual": storages(S.gpipe(2, 6), "individual"),
        "shared": storages(S.gpipe(2, 6), "shared"),
        "kept": storages(S.gpipe(2, 6), "individual", deallocate=False),
        "1f1b": storages(S.one_f_one_b(2, 6), "individual"),
    }


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_ranks(work, 2)


class TestOverGloo:
    def test_everything_crosses(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            for name, (loss, gradient) in report["off"].items():
                assert loss <= 1e-6, name
                assert gradient <= 1e-6, name

    def test_sent_outputs_lose_their_storage(self, reports: list[dict[str, Any]]) -> None:
        """gpipe: when the first gradient comes back, the last stage has used all of the six outputs."""
        assert reports[0]["individual"]["there"] == [0] * 6
        assert reports[0]["shared"]["there"] == [0] * 6
        assert reports[0]["kept"]["there"] == [6, 5, 4, 3, 2, 1]
        assert reports[0]["1f1b"]["there"] == [1, 1, 1, 1, 1, 0]  # the next one is on its way
        for kind in ("individual", "shared", "kept", "1f1b"):
            assert reports[0][kind]["left"] == 0
            assert max(report[kind]["worst"] for report in reports) <= 1e-6
        assert reports[0]["individual"]["loss"] == reports[0]["kept"]["loss"]
