"""GPT-2's `Conv1D`, a linear layer with a transposed weight, with a weight gradient that can wait for W."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, add_weight_gradient
from pipeloom.ops.products import as_rows, plain_operations_only


class TransposedLinear(nn.Module):
    """x [..., inputs] -> x weight + bias, with weight [inputs, outputs]; it has the parameters of the given layer."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", layer.get_parameter("weight"))
        self.register_parameter("bias", layer.get_parameter("bias"))
        self.grad_context: WeightGradContext | None = None

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def forward(self, x: Tensor) -> Tensor:
        plain = type(self.weight) is nn.Parameter and self.weight.requires_grad and torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(x.device.type)
        plain = plain and not autocast and not plain_operations_only()
        if self.grad_context is None or not self.grad_context.writes or not plain:
            rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            return rows.view(*x.shape[:-1], -1)
        return _Transposed.apply(x, self.weight, self.bias, self.grad_context)  # type: ignore[no-any-return, no-untyped-call]


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor, grad_context: WeightGradContext) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.grad_context, ctx.queue = weight, grad_context, grad_context.queue
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 4
        x, weight = ctx.saved_tensors
        dx = gradient @ weight.t() if ctx.needs_input_grad[0] else None
        db = as_rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        dw = None
        if not ctx.grad_context.writes_now(ctx.weight, ctx.queue):
            dw = as_rows(x).t() @ as_rows(gradient)
        elif ctx.queue is not None:  # the two operands swapped: the gradient of a transposed weight
            work = partial(add_weight_gradient, ctx.weight, gradient, x.detach(), ctx.grad_context.main)
            ctx.queue.put(work, reads=(x, gradient))
        else:
            add_weight_gradient(ctx.weight, gradient, x, ctx.grad_context.main)
        return dx, dw, db, None


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is the `Conv1D` of `transformers`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def separate_share(model: nn.Module) -> float:
    """Return the share of a model's parameters, by elements, in weights of plain linear layers, `Conv1D` included."""
    matrices = {
        id(part.weight): part.get_parameter("weight").numel()
        for part in model.modules()
        if type(part) is nn.Linear or isinstance(part, TransposedLinear) or is_conv1d(part)
    }
    return sum(matrices.values()) / sum(parameter.numel() for parameter in model.parameters())


def with_separate_weight_gradients(module: nn.Module) -> None:
    """Replace every plain `Conv1D` inside `module` by a `TransposedLinear`."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if is_conv1d(child):
                setattr(part, name, TransposedLinear(child))
