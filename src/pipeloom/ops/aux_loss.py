"""A loss that a layer adds without returning it: its gradient is computed in the backward of the micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x` unchanged; when its gradient is computed, the gradient of `loss` is added to the parameters'.

    So the loss belongs to the micro-batch that `x` belongs to, whatever else is in flight. `loss` is 0-dim and already
    scaled by its share of the step's loss.
    """
    if not (torch.is_grad_enabled() and x.requires_grad and loss.requires_grad):
        return x
    return _AttachedLoss.apply(x, loss)  # type: ignore[no-any-return, no-untyped-call]


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
