"""Linear layers whose weight gradient does not go through autograd: it waits for W, or is added to a main gradient.

I computes the input gradient now, W the weight's later. Works for a plain `nn.Linear`. Only the matrix weight waits; the
bias, and every parameter of any other layer, gets its gradient in I (zero-bubble pipelines, arXiv 2401.10241, section 2: B
and W).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.products import add_product, as_rows, linear, multiply


class Fetched(Protocol):
    """A tensor on its way: an asynchronous collective."""

    def wait(self) -> Tensor: ...


class Ledger:
    """The weight gradients that one micro-batch still owes."""

    def __init__(self) -> None:
        self._owed: list[tuple[Callable[..., None], Callable[[], Fetched] | None]] = []

    def owe(self, work: Callable[..., None], fetch: Callable[[], Fetched] | None = None) -> None:
        """`work()` adds a gradient to its weight's `.grad`; it runs in W.

        Args:
            fetch: starts to bring a tensor that `work` is then called with. W starts it while earlier work is done.
        """
        self._owed.append((work, fetch))

    def pay(self) -> None:
        """Does all work owed and lets go of what it held, the latest debt first: that one's tensors are in the cache still.

        One fetch at most runs ahead.
        """
        owed, self._owed = self._owed, []
        fetches = iter([fetch for _, fetch in reversed(owed) if fetch is not None])

        def start() -> Fetched | None:
            fetch = next(fetches, None)
            return None if fetch is None else fetch()

        with torch.no_grad():
            coming = start()
            while owed:
                work, fetch = owed.pop()
                if fetch is None or coming is None:
                    work()
                    continue
                fetched, coming = coming, start()
                work(fetched.wait())


def add_weight_gradient(weight: nn.Parameter, x: Tensor, gradient: Tensor, main: MainGradients | None = None) -> None:
    """weight.grad += gradient^T x, over all leading dimensions; in place where the types allow.

    Args:
        main: where the weight's gradient goes instead, if it is among them.
    """
    rows, columns = as_rows(gradient), as_rows(x)
    if main is not None and weight in main:
        main.add_product(weight, rows, columns)
    elif weight.grad is None:
        weight.grad = multiply(rows.t(), columns).to(weight.dtype)
    elif weight.grad.dtype == rows.dtype:
        add_product(weight.grad, rows.t(), columns)
    else:
        weight.grad += multiply(rows.t(), columns)


def as_autocast(x: Tensor) -> Tensor:
    """`x` in the type that autocast would compute a product of it in; itself where autocast is off or leaves it alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class Desk:
    """Which micro-batch's ledger a stage's linear layers write to at the moment.

    Attributes:
        ledger: where they owe their weight gradients; None: they compute them in the backward.
        main: where weight gradients are added; None: to `.grad`.
        in_place: whether a layer adds its weight gradient itself where there is no ledger, too: one product that adds, in the
            place of a product, its memory and a sum.
    """

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.main: MainGradients | None = None
        self.in_place = False


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient goes to a ledger, or at once to a main gradient, and never through autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        ledger: Ledger | None,
        main: MainGradients | None,
    ) -> Tensor:
        x = as_autocast(x)
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.ledger, ctx.main = ledger, main
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        dx = multiply(gradient, weight.to(gradient.dtype)) if ctx.needs_input_grad[0] else None
        db = as_rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.ledger is not None:
            ctx.ledger.owe(partial(add_weight_gradient, ctx.weight, x.detach(), gradient, ctx.main))
        else:
            add_weight_gradient(ctx.weight, x, gradient, ctx.main)
        return dx, None, db, None, None


@runtime_checkable
class Deferring(Protocol):
    """A layer that can put off its own weight gradients: it reads `desk.ledger` in its forward, None meaning not now."""

    def defer_to(self, desk: Desk) -> None: ...


def defer_weight_gradients(module: nn.Module, desk: Desk) -> None:
    """From now on the plain linear layers inside `module`, and those that are `Deferring`, do as the desk says.

    A subclass of `nn.Linear`, or one that somebody gave another forward, keeps that and its gradient in I. So does a weight that
    has a hook for its gradient (`register_hook`), except in a column layer and an expert's, where it does not fire.
    """
    for part in module.modules():
        if isinstance(part, Deferring):
            part.defer_to(desk)
        elif type(part) is nn.Linear and _is_plain(part.__dict__.get("forward")):
            part.forward = partial(_forward, part, desk)  # type: ignore[method-assign]


def _can_wait(weight: Tensor) -> bool:
    """Whether nobody but the optimizer looks at the weight's gradient."""
    return weight.requires_grad and weight.is_leaf and not weight._backward_hooks


def _is_plain(own: Any) -> bool:
    """Whether an instance's own forward is none, or this module's."""
    return own is None or (isinstance(own, partial) and own.func is _forward)


def _forward(layer: nn.Linear, desk: Desk, x: Tensor) -> Tensor:
    return apply_linear(x, layer.weight, layer.bias, desk)


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None, desk: Desk | None) -> Tensor:
    """x weight^T + bias, whose weight gradient goes where the desk says; through autograd where that says nothing.

    A weight that is computed from others (pruned, normed), or that has a hook for its gradient, has that by autograd too.
    """
    if desk is not None and torch.is_grad_enabled() and _can_wait(weight):
        adds = desk.in_place or (desk.main is not None and weight in desk.main)
        if adds or desk.ledger is not None:
            return _Linear.apply(x, weight, bias, desk.ledger, desk.main)  # type: ignore[no-any-return, no-untyped-call]
    return linear(x, weight, bias)
