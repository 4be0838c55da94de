"""Linear layers whose weight gradient waits: I computes the input gradient now, W the weight's later.

Works for a plain `nn.Linear`. Only the matrix weight waits; the bias, and every parameter of any other layer, gets its
gradient in I (zero-bubble pipelines, arXiv 2401.10241, section 2: B and W).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Ledger:
    """The weight gradients that one micro-batch still owes: (weight, input, gradient of the output)."""

    def __init__(self) -> None:
        self._owed: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def owe(self, weight: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        self._owed.append((weight, x, gradient))

    def pay(self) -> None:
        """Adds every gradient owed to its weight's `.grad`, and lets go of what it held."""
        owed, self._owed = self._owed, []
        with torch.no_grad():
            for weight, x, gradient in owed:
                rows = gradient.reshape(-1, gradient.shape[-1])
                columns = x.reshape(-1, x.shape[-1])
                if weight.grad is None:
                    weight.grad = (rows.t() @ columns).to(weight.dtype)
                elif weight.grad.dtype == rows.dtype:
                    weight.grad.addmm_(rows.t(), columns)
                else:
                    weight.grad += rows.t() @ columns


class Desk:
    """Which micro-batch's ledger a stage's linear layers write to at the moment."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, ledger: Ledger) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.ledger = ledger
        ctx.dtype = weight.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        dx = gradient @ weight if ctx.needs_input_grad[0] else None
        db = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        ctx.ledger.owe(ctx.weight, x.detach(), gradient)
        return dx, None, db, None


def defer_weight_gradients(module: nn.Module, desk: Desk) -> int:
    """From now on the plain linear layers inside `module` write to the desk's ledger, if there is one; returns how many.

    A subclass of `nn.Linear` keeps its own forward and its gradient in I. Hooks on such a weight's gradient do not fire.
    """
    found = [part for part in module.modules() if type(part) is nn.Linear]
    for linear in found:
        linear.forward = partial(_forward, linear, desk)  # type: ignore[method-assign]
    return len(found)


def _forward(linear: nn.Linear, desk: Desk, x: Tensor) -> Tensor:
    ledger = desk.ledger
    if ledger is None or not linear.weight.requires_grad or not torch.is_grad_enabled():
        return F.linear(x, linear.weight, linear.bias)
    return _DeferredLinear.apply(x, linear.weight, linear.bias, ledger)  # type: ignore[no-any-return, no-untyped-call]
