"""Grouped matrix products: consecutive groups of rows, each multiplied by its own matrix.

`torch.nn.functional.grouped_mm` if it supports the operands, else one product per group. Groups may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from pipeloom.ops.deferred import WeightGradContext, as_autocast
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.products import adjoint, plain_operations_only

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply_grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int], grad_context: WeightGradContext | None = None
) -> Tensor:
    """[rows, outputs]: rows of group g of x [rows, inputs] times weight[g]^T.

    Args:
        weight: [groups, outputs, inputs].
        counts: rows of each group; they sum to the rows of x.
        grad_context: its queue and main gradients get the weight's gradient, if it has any.
    """
    if plain_operations_only():
        return _by_group(x, weight.transpose(1, 2), counts)
    return _GroupedLinear.apply(as_autocast(x), weight, tuple(counts), grad_context)  # type: ignore[no-any-return, no-untyped-call]


def grouped_multiply(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """[rows, n]: rows of group g of x [rows, k] times matrices[g], [groups, k, n]."""
    if not _suits_grouped(x, matrices):
        return _by_group(x, matrices, counts)
    product: Tensor = grouped_mm(x, matrices, offs=_offsets(counts, x.device))
    return product


def grouped_products(rows: Tensor, columns: Tensor, counts: Sequence[int]) -> Tensor:
    """[groups, n, k]: rows^T columns of each group's rows [rows, n] and columns [rows, k]; zeros for an empty group."""
    if not _suits_grouped(rows, columns):
        pieces = (torch.split(each, list(counts)) for each in (rows, columns))
        return torch.stack([row.t() @ column for row, column in zip(*pieces, strict=True)])
    products: Tensor = grouped_mm(rows.t(), columns, offs=_offsets(counts, rows.device))
    return products


@torch.no_grad()
def add_group_gradients(
    weight: nn.Parameter, x: Tensor, gradient: Tensor, counts: Sequence[int], main: MainGradients | None
) -> None:
    """Add each group's gradient^T conj(x) to the weight's gradient [groups, outputs, inputs], or to its main gradient."""
    x = adjoint(x)
    if main is not None and weight in main:
        main.add_products(weight, gradient, x, counts)
    elif weight.grad is None:
        weight.grad = grouped_products(gradient, x, counts).to(weight.dtype)
    elif weight.grad.dtype != gradient.dtype or weight.grad.is_cuda:
        weight.grad += grouped_products(gradient, x, counts)
    else:  # in place, without a temporary of the weight's size
        pieces = (torch.split(each, list(counts)) for each in (gradient, x))
        for total, rows, columns in zip(weight.grad, *pieces, strict=True):
            total.addmm_(rows.t(), columns)


class _GroupedLinear(torch.autograd.Function):
    """As `_Linear` for a stack of matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, counts: tuple[int, ...], grad_context: WeightGradContext | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.counts = weight, counts
        ctx.grad_context, ctx.queue = grad_context, None if grad_context is None else grad_context.queue
        return grouped_multiply(x, weight.to(x.dtype).transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_context: WeightGradContext | None = ctx.grad_context
        dx = grouped_multiply(gradient, adjoint(weight.to(gradient.dtype)), ctx.counts) if wants_x else None
        dw = None
        if wants_weight and grad_context is not None and grad_context.writes_now(ctx.weight, ctx.queue):
            work = partial(add_group_gradients, ctx.weight, x.detach(), gradient, ctx.counts, grad_context.main)
            if ctx.queue is not None:
                ctx.queue.put(work, reads=(x, gradient))
            else:
                work()
        elif wants_weight:
            dw = grouped_products(gradient, adjoint(x), ctx.counts)
        return dx, dw, None, None


def _by_group(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Return `grouped_multiply`, computed with operations that autograd and transforms support."""
    return torch.cat([rows @ matrices[at] for at, rows in enumerate(torch.split(x, list(counts)))])


def _suits_grouped(x: Tensor, other: Tensor) -> bool:
    """Return whether torch's grouped product supports the operands: its dtypes, and rows of a multiple of 16 bytes; and
    whether autograd need not record it.
    """
    recorded = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
    if recorded or not len(x) or any(width * x.itemsize % 16 for width in (x.shape[1], *other.shape[1:])):
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return x.device.type == "cpu" and x.dtype in _CPU_DTYPES


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    # From pageable memory the copy would block the host until the device reaches it.
    return ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends
