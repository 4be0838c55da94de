"""Grouped products against one product a group, by torch's grouped product and without it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.grouped import add_group_gradients, apply_grouped_linear, grouped_multiply, grouped_products
from pipeloom.ops.main_gradient import MainGradients

COUNTS = [(3, 0, 5, 4), (0, 0, 12, 0), (0, 0, 0, 0), (12, 0, 0, 0), (0, 1, 1, 10)]


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def groups(rows: Tensor, counts: tuple[int, ...]) -> list[Tensor]:
    ends = list(accumulate(counts))
    return [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float64, 8), (torch.float32, 7)]
)
def test_each_group_is_multiplied_by_its_own_matrix(counts: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    x, other = normal(sum(counts), 16, dtype=dtype), normal(sum(counts), width, seed=2, dtype=dtype)
    matrices = normal(4, 16, width, seed=1, dtype=dtype)
    want = torch.cat([part @ matrix for part, matrix in zip(groups(x, counts), matrices, strict=True)])
    torch.testing.assert_close(grouped_multiply(x, matrices, counts), want)
    products = torch.stack([a.t() @ b for a, b in zip(groups(other, counts), groups(x, counts), strict=True)])
    torch.testing.assert_close(grouped_products(other, x, counts), products)


@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_now_later_and_into_main_gradients_are_the_same(counts: tuple[int, ...]) -> None:
    x, seed = normal(sum(counts), 16), normal(sum(counts), 8, seed=5)

    def gradients(grad_context: WeightGradContext | None, twice: bool) -> tuple[Tensor, Tensor | None]:
        weight, rows = nn.Parameter(normal(4, 8, 16, seed=3)), x.clone().requires_grad_()
        main = MainGradients()
        if grad_context is not None and grad_context.main is not None:
            main = grad_context.main
            main.attach(weight, torch.full((4, 8, 16), 7.0))
            main.reset([weight])
        for _ in range(1 + twice):
            apply_grouped_linear(rows, weight, counts, grad_context).backward(seed)
            if grad_context is not None and grad_context.queue is not None:
                grad_context.queue.flush()
        assert rows.grad is not None
        return rows.grad, main.of(weight) if weight in main else weight.grad

    for twice in (False, True):
        later, into_main = WeightGradContext(), WeightGradContext()
        later.queue = WeightGradQueue()
        into_main.main = MainGradients()
        dx, dw = gradients(None, twice)
        for grad_context in (later, into_main):
            other_dx, other_dw = gradients(grad_context, twice)
            torch.testing.assert_close(other_dx, dx)
            torch.testing.assert_close(other_dw, dw)


def test_a_deferred_gradient_of_no_rows_is_zeros_not_none() -> None:
    weight = nn.Parameter(normal(4, 8, 16))
    add_group_gradients(weight, normal(0, 16), normal(0, 8), (0, 0, 0, 0), None)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_products_in_its_type(split: bool, dtype: torch.dtype) -> None:
    counts, seed = COUNTS[0], normal(12, 8, seed=5)
    weight, rows = nn.Parameter(normal(4, 8, 16, seed=3)), normal(12, 16, dtype=dtype).requires_grad_()
    apply_grouped_linear(rows.float(), weight, counts).backward(seed)
    want, right = weight.grad, rows.grad
    assert want is not None
    assert right is not None
    weight.grad = rows.grad = None
    grad_context = WeightGradContext()
    grad_context.queue = WeightGradQueue() if split else None
    with torch.autocast("cpu", torch.bfloat16):
        out = apply_grouped_linear(rows, weight, counts, grad_context)
    assert out.dtype == torch.bfloat16
    out.float().backward(seed)
    if grad_context.queue is not None:
        grad_context.queue.flush()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, want, rtol=0.02, atol=0.05)
    torch.testing.assert_close(rows.grad, right, rtol=0.02, atol=0.05)
