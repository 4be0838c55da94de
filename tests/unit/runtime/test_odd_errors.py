"""Errors whose classes refuse attributes, fail to be printed or come from odd places: raised as they are, and told once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

import pipeloom as pl
from models import Block, batch, blocks, gradients, mse, serial, worst
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions

S = pl.schedules


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class LooksUp(Exception):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Immutable(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("immutable")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


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


class Recorder:
    """In the place of a watchdog."""

    status: Any = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def failed(self, text: str, blames: tuple[int, ...], trace: str = "") -> None:
        self.told.append(text)


ERRORS = [Frozen, LooksUp, Immutable, Unprintable, StopIteration, MemoryError]


def caught(pipeline: LocalPipeline | Pipeline) -> BaseException | None:
    try:  # not pytest.raises, which looks for attributes
        pipeline.step(*batch(8))
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_raised_as_it_is_with_its_action_and_leaves_nothing_behind(
    kind: type[Exception], backward: bool
) -> None:
    error = kind()
    layers = [Layer("block0", lambda: Once(error, backward)), *blocks(2)[1:]]
    pipeline = LocalPipeline(layers, S.one_f_one_b(2, 4), loss=mse)
    assert caught(pipeline) is error
    assert error.__dict__["__notes__"][-1] == f"(rank 0, {'B' if backward else 'F'} of stage 0 micro-batch 2)"
    pipeline.zero_grad()
    loss = pipeline.step(*batch(8))  # the layer raises once
    whole, want = serial(blocks(2), *batch(8), [2, 2, 2, 2])
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert worst(gradients(pipeline), want) <= 1e-5


@pytest.mark.parametrize("kind", [*ERRORS, KeyError])
def test_an_error_is_told_to_the_other_ranks_once(kind: type[Exception]) -> None:
    error, recorder = kind(), Recorder()
    layers = [Layer("block0", lambda: Once(error, False))]
    options = RuntimeOptions(watchdog=recorder)  # type: ignore[arg-type]
    assert caught(Pipeline(layers, S.gpipe(1, 4), loss=mse, options=options)) is error
    (text,) = recorder.told
    assert text.startswith("rank 0 failed: step 0, in F of stage 0 micro-batch 2 ")
    assert kind.__name__ in text


@pytest.mark.parametrize("kind", [ZeroDivisionError, LooksUp])
def test_an_error_of_the_weight_function_is_told(kind: type[Exception]) -> None:
    """It runs before the first action, and the other ranks wait for this one's messages."""
    recorder, error = Recorder(), kind("no targets")

    def weight(targets: Tensor) -> float:
        raise error

    options = RuntimeOptions(watchdog=recorder)  # type: ignore[arg-type]
    assert caught(Pipeline(blocks(1), S.gpipe(1, 2), loss=mse, weight=weight, options=options)) is error
    (text,) = recorder.told
    assert text.startswith("rank 0 failed: between actions, step 0 ")
    assert kind.__name__ in text
