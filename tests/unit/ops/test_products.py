"""Products through oneDNN: the same numbers as PyTorch's own, taken only where they suit, and differentiable as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.ops import products, use_onednn_linear
from pipeloom.ops.deferred import apply_linear
from pipeloom.runtime import LocalPipeline

ROWS, INPUTS, OUTPUTS = 96, 128, 160


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the inputs that oneDNN was called with, on a machine that is taken for one that prefers it."""
    found: list[tuple[int, ...]] = []
    onednn = products.onednn_operation()
    if onednn is None:
        pytest.skip("this PyTorch has no oneDNN")

    def count(x: Tensor, *rest: Any) -> Any:
        found.append(tuple(x.shape))
        return onednn(x, *rest)

    monkeypatch.setattr(products, "machine_prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "onednn_operation", lambda: count)
    assert not products.uses_onednn()  # nobody has asked for it
    assert use_onednn_linear()
    yield found
    assert not use_onednn_linear(False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply_linear(x, weight, bias, None)


def operands(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    parts = torch.randn(*lead, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    return tuple(part.requires_grad_() for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("lead", [(ROWS,), (3, ROWS // 3), (2, 2, ROWS // 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients(lead: tuple[int, ...], bias: bool, calls: list[Any]) -> None:
    x, weight, b = operands(*lead)
    inputs = (x, weight, b) if bias else (x, weight)
    out, usual = linear(*inputs), F.linear(*inputs)
    torch.testing.assert_close(out, usual, rtol=1e-5, atol=1e-4)
    gradient = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(o, inputs, gradient) for o in (out, usual)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert calls == [
        (*lead, INPUTS),
        (*lead, OUTPUTS),
        (OUTPUTS, ROWS),
    ]  # the output, the input's gradient, the weight's
    linear(*inputs).relu_()  # autograd refuses it for a view that a custom Function returns


def test_strided_operands(calls: list[Any]) -> None:
    x, y = torch.randn(INPUTS, ROWS).t(), torch.randn(OUTPUTS, INPUTS).t()
    torch.testing.assert_close(products.matmul(x, y), x.double() @ y.double(), rtol=1e-5, atol=1e-4, check_dtype=False)
    assert len(calls) == 0  # autograd would record it
    with torch.no_grad():
        torch.testing.assert_close(products.matmul(x, y), x @ y, rtol=1e-5, atol=1e-4)
    assert len(calls) == 1


@torch.no_grad()
def test_a_product_that_is_added(calls: list[Any]) -> None:
    x, y, total = torch.randn(ROWS, INPUTS), torch.randn(INPUTS, OUTPUTS), torch.randn(ROWS, OUTPUTS)
    expected = total + x @ y
    products.addmm(total, x, y)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    products.addmm(total.fill_(float("nan")), x, y, first=True)
    torch.testing.assert_close(total, x @ y, rtol=1e-5, atol=1e-4)
    assert len(calls) == 2


def test_what_does_not_suit_is_pytorchs_bit_by_bit(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, b = (part.detach() for part in operands(ROWS))
    with torch.no_grad():
        cases = [
            (x[:8], weight, b),  # too small
            (x.double(), weight.double(), b.double()),
            (x.bfloat16(), weight.bfloat16(), b.bfloat16()),
            (x[:0], weight, b),
        ]
        for case in cases:
            assert torch.equal(products.linear(*case), F.linear(*case))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(products.linear(x, weight, b), F.linear(x, weight, b))
        each = vmap(lambda one: products.linear(one, weight, b))(x.unflatten(0, (2, -1)))
        assert torch.equal(each.flatten(0, 1), F.linear(x.unflatten(0, (2, -1)), weight, b).flatten(0, 1))
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        assert torch.equal(products.linear(x, weight, b), F.linear(x, weight, b))
    assert not calls


def test_a_backward_that_is_differentiated(calls: list[Any]) -> None:
    """The gradient of a gradient's norm, as of a penalty."""
    inputs = operands(ROWS)
    found = []
    for layer in (linear, F.linear):
        (gradient,) = torch.autograd.grad(layer(*inputs).square().sum(), inputs[0], create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), inputs[:2]))
    assert calls
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_pipelines_gradients(name: str, calls: list[Any]) -> None:
    """All products of its plain linear layers, with the backward whole and split, beside the same layers alone."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128)) for _ in range(4)]
    x, y = torch.randn(3 * 64, 128), torch.randn(3 * 64, 128)
    loss = F.mse_loss
    for a, b in zip(x.split(64), y.split(64), strict=True):
        (loss(nn.Sequential(*layers)(a), b) / 3).backward()
    expected = [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]  # type: ignore[union-attr]
    for layer in layers:
        layer.zero_grad()
    assert not calls
    pipeline = LocalPipeline(layers, pl.schedules.build(name, 2, 3), loss=loss)
    pipeline.step(x, y)
    for parameter, usual in zip((p for layer in layers for p in layer.parameters()), expected, strict=True):
        torch.testing.assert_close(parameter.grad, usual, rtol=1e-5, atol=1e-7)
    assert len(calls) == 3 * (3 * 8 - 1)  # the first layer's input has no gradient
