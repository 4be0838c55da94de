"""Grouped matrix products: consecutive groups of rows, each times a matrix of its own.

`torch._grouped_mm` where it exists and takes these operands, else a product a group. Groups may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import Desk, Ledger, as_autocast
from pipeloom.ops.main_gradient import MainGradients

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_MM: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def apply_grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], desk: Desk | None = None) -> Tensor:
    """[rows, outputs]: rows of group g of x [rows, inputs] times weight[g]^T.

    Args:
        weight: [groups, outputs, inputs].
        counts: rows of each group; they sum to the rows of x.
        desk: its ledger and main gradients get the weight's gradient, if it has any.
    """
    ledger, main = (desk.ledger, desk.main) if desk is not None and torch.is_grad_enabled() else (None, None)
    return _GroupedLinear.apply(x, weight, tuple(counts), ledger, main)  # type: ignore[no-any-return, no-untyped-call]


def grouped_multiply(x: Tensor, matrices: Tensor, counts: Sequence[int], how: str | None = None) -> Tensor:
    """[rows, n]: rows of group g of x [rows, k] times matrices[g], [groups, k, n]. `how`: "grouped", "loop", None: either."""
    if x.shape[0] == 0:
        return x.new_zeros(0, matrices.shape[2])
    if (how or _way(x, matrices.shape[1], matrices.shape[2])) == "grouped":
        found: Tensor = _GROUPED_MM(x, matrices, offs=_offsets(counts, x.device))
        return found
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for at, start, end in _runs(counts):
        torch.mm(x[start:end], matrices[at], out=out[start:end])
    return out


def grouped_products(rows: Tensor, columns: Tensor, counts: Sequence[int], how: str | None = None) -> Tensor:
    """[groups, n, k]: rows^T columns of each group's rows [rows, n] and columns [rows, k]; zeros for an empty group."""
    shape = (len(counts), rows.shape[1], columns.shape[1])
    if rows.shape[0] == 0:
        return rows.new_zeros(shape)
    if (how or _way(rows, rows.shape[1], columns.shape[1])) == "grouped":
        found: Tensor = _GROUPED_MM(rows.t(), columns, offs=_offsets(counts, rows.device))
        return found
    out = rows.new_zeros(shape)
    for at, start, end in _runs(counts):
        torch.mm(rows[start:end].t(), columns[start:end], out=out[at])
    return out


@torch.no_grad()
def add_group_gradients(
    weight: nn.Parameter, x: Tensor, gradient: Tensor, counts: Sequence[int], main: MainGradients | None
) -> None:
    """Adds each group's gradient^T x to the weight's gradient [groups, outputs, inputs], or to its main gradient."""
    if main is not None and weight in main:
        main.add_products(weight, gradient, x, counts)
    elif weight.grad is None:
        weight.grad = grouped_products(gradient, x, counts).to(weight.dtype)
    elif weight.grad.dtype != gradient.dtype or weight.grad.is_cuda:
        weight.grad += grouped_products(gradient, x, counts)
    else:  # in place, without a temporary of the weight's size
        for at, start, end in _runs(counts):
            weight.grad[at].addmm_(gradient[start:end].t(), x[start:end])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        counts: tuple[int, ...],
        ledger: Ledger | None,
        main: MainGradients | None,
    ) -> Tensor:
        x = as_autocast(x)
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.counts, ctx.ledger, ctx.main = weight, counts, ledger, main
        return grouped_multiply(x, weight.to(x.dtype).transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        x, weight = ctx.saved_tensors
        dx = grouped_multiply(gradient, weight.to(gradient.dtype), ctx.counts) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None, None
        if ctx.ledger is None and (ctx.main is None or ctx.weight not in ctx.main):
            return dx, grouped_products(gradient, x, ctx.counts), None, None, None
        work = partial(add_group_gradients, ctx.weight, x.detach(), gradient, ctx.counts, ctx.main)
        if ctx.ledger is not None:
            ctx.ledger.owe(work)
        else:
            work()
        return dx, None, None, None, None


def _way(x: Tensor, *widths: int) -> str:
    """Whether torch's grouped product takes this: its dtypes, and rows of whole 16 bytes."""
    if _GROUPED_MM is None or any(width * x.itemsize % 16 for width in widths):
        return "loop"
    if x.is_cuda:
        fits = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    else:
        fits = x.device.type == "cpu" and x.dtype in _CPU_DTYPES
    return "grouped" if fits else "loop"


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def _runs(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(group, start, end) of the groups that have rows."""
    ends = list(accumulate(counts))
    return [(at, end - count, end) for at, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
