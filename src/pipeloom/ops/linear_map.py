"""Linear maps of a tensor that autograd knows by their adjoints alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LinearMap = Callable[[Tensor], Tensor]


def with_adjoint(x: Tensor, forward: LinearMap, adjoint: LinearMap) -> Tensor:
    """Return `forward(x)`, whose gradient is `adjoint` of the incoming one: to any order, if that is differentiable."""
    return _Mapped.apply(x, forward, adjoint)  # type: ignore[no-any-return, no-untyped-call]


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: LinearMap, adjoint: LinearMap) -> Tensor:
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.adjoint(gradients[0]), None, None
