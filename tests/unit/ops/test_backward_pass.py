"""A stage's backward pass against torch's own call: gradients, hooks, context variables; a torch without the short way."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.ops.deferred import run_backward

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def graph() -> tuple[nn.Linear, Tensor, list[GradientEdge | Tensor], list[Tensor | None]]:
    """A layer, its input, and what a backward starts from: an output of a complex dtype, one of bf16, and a loss."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    out = layer(x)
    outputs = (torch.complex(out, out * 2), out.bfloat16())
    gradients = [torch.randn_like(each) for each in outputs]
    loss = out.square().mean()
    return layer, x, [*map(get_gradient_edge, outputs), loss], [*gradients, torch.ones(())]


def found(run: Any) -> list[Tensor]:
    layer, x, roots, gradients = graph()
    run(roots, gradients)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return [x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("way", ["trusted", "not trusted", "another torch"])
def test_gradients_are_those_of_torch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = found(torch.autograd.backward)
    if way == "another torch":
        monkeypatch.setattr("pipeloom.ops.deferred._engine", None)
    got = found(lambda roots, gradients: run_backward(roots, gradients, way != "not trusted"))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_hooks_run_and_see_the_context_of_the_caller() -> None:
    layer, x, roots, gradients = graph()
    seen: list[str] = []
    x.register_hook(lambda _: seen.append(PLACE.get()))
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(PLACE.get()))
    token = PLACE.set("here")
    try:
        run_backward(roots, gradients, trusted=True)
    finally:
        PLACE.reset(token)
    assert seen == ["here", "here"]


def test_a_second_pass_through_a_graph_is_refused() -> None:
    """It is freed by the first one."""
    _, _, roots, gradients = graph()
    run_backward(roots, gradients, trusted=True)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(roots, gradients, trusted=True)
