"""Errors of layers and of the weight function: raised as they are, with their action, and told to the other ranks once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import pipeloom as pl
from models import Block, batch, blocks, gradients, mse, serial, worst
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.health.watchdog import Watchdog

S = pl.schedules


class Once(Block):
    """Raises at its third forward, or in the backward of that."""

    def __init__(self, error: BaseException, backward: bool) -> None:
        super().__init__(0)
        self.error, self.backward, self.calls = error, backward, 0

    def fail(self, _: Tensor) -> None:
        raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        if self.calls == 3 and not self.backward:
            raise self.error
        if self.calls == 3:
            out.register_hook(self.fail)
        return out


class Recorder(Watchdog):
    """A watchdog that watches nothing and notes what it is told."""

    status: Any = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def failed(self, text: str, blames: tuple[int, ...], trace: str = "") -> None:
        self.told.append(text)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_an_error_is_raised_as_it_is_with_its_action_and_leaves_nothing_behind(
    kind: type[Exception], backward: bool
) -> None:
    error = kind()
    layers = [Layer("block0", lambda: Once(error, backward)), *blocks(2)[1:]]
    pipeline = LocalPipeline(layers, S.one_f_one_b(2, 4), loss=mse)
    with pytest.raises(kind) as caught:
        pipeline.step(*batch(8))
    assert caught.value is error
    assert error.__notes__[-1] == f"(rank 0, {'B' if backward else 'F'} of stage 0 micro-batch 2)"
    pipeline.zero_grad()
    loss = pipeline.step(*batch(8))  # the layer raises once
    whole, want = serial(blocks(2), *batch(8), [2, 2, 2, 2])
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert worst(gradients(pipeline), want) <= 1e-5


@pytest.mark.parametrize("where", ["a layer", "the weight function"])
def test_an_error_is_told_to_the_other_ranks_once(where: str) -> None:
    """The weight function runs before the first action, and the other ranks wait for this one's messages."""
    error, recorder = KeyError("no targets"), Recorder()

    def weight(targets: Tensor) -> float:
        if where == "a layer":
            return 1.0
        raise error

    options = RuntimeOptions(watchdog=recorder)
    layers = [Layer("block0", lambda: Once(error, False))]
    with pytest.raises(KeyError):
        Pipeline(layers, S.gpipe(1, 4), loss=mse, weight=weight, options=options).step(*batch(8))
    (text,) = recorder.told
    words = "step 0, in F of stage 0 micro-batch 2 " if where == "a layer" else "between actions, step 0 "
    assert text.startswith(f"rank 0 failed: {words}")
    assert "KeyError" in text
