"""Hooks on a layer that declares segments belong to its call: they fire as in one process, and its gradients follow them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor, nn

import pipeloom as pl
from models import batch, gradients, mse, serial, worst
from pipeloom.ops.segments import Compute
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from segmented import Experts

HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
S = pl.schedules


def hooked(at: int, kind: str, calls: Counter[str]) -> nn.Module:
    module = Experts(at, 3, None)

    def forward_pre(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        calls[kind] += 1
        return inputs[0] * 0.5

    def forward(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls[kind] += 1
        return output * 0.5

    def backward_pre(_: nn.Module, outputs: tuple[Tensor]) -> tuple[Tensor]:
        calls[kind] += 1
        return (outputs[0] * 0.5,)

    def backward(_: nn.Module, inputs: tuple[Tensor | None], outputs: Any) -> tuple[Tensor | None]:
        calls[kind] += 1
        return (None if inputs[0] is None else inputs[0] * 0.5,)

    if kind == "forward_pre":
        module.register_forward_pre_hook(forward_pre)
    elif kind == "forward":
        module.register_forward_hook(forward)
    elif kind == "backward_pre":
        module.register_full_backward_pre_hook(backward_pre)
    else:
        module.register_full_backward_hook(backward)
    return module


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", [S.one_f_one_b(2, 4), S.build("1f1b-overlap", 2, 4), S.zb_h1(2, 4)], ids=repr)
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_a_segmented_layer(kind: str, schedule: pl.Schedule, recompute: Any) -> None:
    calls: Counter[str] = Counter()
    layers = [Layer(f"layer{at}", lambda at=at: hooked(at, kind, calls)) for at in range(4)]
    x, y = batch(8)
    want_loss, want = serial(layers, x, y, [2] * 4)
    expected = calls.copy()
    assert expected[kind] == 16
    calls.clear()
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(recompute=recompute))
    loss = pipeline.step(x, y)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-5)
    assert worst(gradients(pipeline), want) <= 1e-5
    if recompute == "none":
        assert calls == expected


class Alone(nn.Linear):
    """A layer whose segments have no communication."""

    def segments(self) -> list[Compute]:
        return [Compute("first", self.refuse), Compute("second", self.refuse)]

    def refuse(self, values: Any) -> Any:
        raise AssertionError("each segment would be recomputed on its own, from inputs that are kept")


def test_a_layer_without_communications_runs_as_a_whole() -> None:
    layers = [Layer(f"layer{at}", lambda: Alone(6, 6)) for at in range(2)]
    x, y = batch(8)
    pipeline = LocalPipeline(layers, S.one_f_one_b(2, 4), loss=mse, options=RuntimeOptions(recompute="full"))
    pipeline.step(x, y)
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
