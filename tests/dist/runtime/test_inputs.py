"""A step's inputs are data, and a layer may change its input in place wherever one process may: no rule depends on the cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.shapes.cut import even_sizes

pytestmark = pytest.mark.core


class InPlace(Block):
    """Changes its input in place, before and after others have used it."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.5)
        out = super().forward(x)
        return out + x.relu_() if self.late else out

    late = False


class Sum(Block):
    """Its result may be changed: nothing of its backward needs it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0


def chain(kinds: str) -> list[Layer]:
    made = {"s": Sum, "i": InPlace}
    return [Layer(f"layer{at}", lambda at=at, kind=kind: made[kind](at)) for at, kind in enumerate(kinds)]


def whole(x: Tensor) -> Tensor:
    return x.clone()  # the first layer may change it


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_a_layer_changes_its_input_in_place_wherever_the_cut_is(stages: tuple[int, int], name: str) -> None:
    layers, schedule, (x, y) = chain("isisi"), pl.schedules.build(name, 2, 4), batch(9)
    _, want = serial(layers, whole(x), y, even_sizes(9, 4))
    pipeline = LocalPipeline(layers, schedule, loss=mse, stages=stages)
    for _ in range(20):  # 80 forwards a stage, more than are probed
        pipeline.zero_grad()
        pipeline.step(whole(x), y)
        assert worst(gradients(pipeline), want) <= 1e-5


def test_a_change_that_one_process_refuses_is_refused() -> None:
    """tanh needs its result in its backward, and the next layer, on the same rank, changes it."""

    class Tanh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale)

    layers = [Layer("tanh", Tanh), *chain("i"), *blocks(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        serial(layers, *batch(4), [1] * 4)
    schedule = pl.schedules.build("hanayo", 1, 4)
    assert schedule.stages == 2
    for stages in ((1, 3), (2, 2)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            LocalPipeline(layers, schedule, loss=mse, stages=stages).step(*batch(4))


def test_a_recomputed_layer_may_change_its_input() -> None:
    x, y = batch(4)
    _, want = serial(chain("ssiss"), x, y, [1] * 4)
    for stages in ((2, 3), (3, 2)):
        pipeline = LocalPipeline(
            chain("ssiss"),
            pl.schedules.build("1f1b", 2, 4),
            loss=mse,
            stages=stages,
            options=RuntimeOptions(recompute="full"),
        )
        pipeline.step(x, y)
        assert worst(gradients(pipeline), want) <= 1e-5
    behind = LocalPipeline(
        chain("ssi"),
        pl.schedules.build("gpipe", 1, 4),
        loss=mse,
        options=RuntimeOptions(recompute=frozenset({"layer1"})),
    )
    behind.step(*batch(4))  # layer2 changes what layer1 has made, not what it got


@pytest.mark.parametrize("stages", [(1, 2), (2, 1)])
def test_what_requires_a_gradient_is_refused(stages: tuple[int, int]) -> None:
    x, y = batch(8)
    learned = x.clone().requires_grad_()

    class Biased(Block):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x if bias is None else x + bias)

    layers = [*blocks(2), Layer("biased", lambda: Biased(2))]
    pipeline = LocalPipeline(layers, pl.schedules.build("1f1b", 2, 4), loss=mse, stages=stages)
    wording = "requires a gradient, and a step computes those of the pipeline's own parameters only: detach it"
    for inputs, targets, keywords, name in (
        (learned, y, {}, "the input"),
        (learned * 2, y, {}, "the input"),
        (x, learned, {}, "the targets"),
        (x, y, {"bias": learned}, "keyword 'bias'"),
    ):
        with pytest.raises(UsageError, match=f"{name} {wording}"):
            pipeline.step(inputs, targets, **keywords)
    assert pipeline.evaluate(learned, y) == pipeline.evaluate(x, y)
    assert not pipeline.predict(learned).requires_grad


def test_larger_micro_batches_come_first() -> None:
    assert even_sizes(14, 5) == (3, 3, 3, 3, 2)
    assert even_sizes(7, 5) == (2, 2, 1, 1, 1)
    assert even_sizes(6, 3) == (2, 2, 2)
