"""Layers for the benchmarks: some that sleep, one that does next to nothing, a transformer block; and losses."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue


class SleepFunction(torch.autograd.Function):
    """Sleeps forward and backward, and passes its input on; with a queue, half of the backward's time waits for W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float, queue: WeightGradQueue | None) -> Tensor:
        ctx.backward_seconds, ctx.queue = backward, queue
        time.sleep(forward)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        seconds = ctx.backward_seconds if ctx.queue is None else ctx.backward_seconds / 2
        time.sleep(seconds)
        if ctx.queue is not None:
            ctx.queue.put(partial(time.sleep, seconds))
        return gradients[0] * 1.0, None, None, None


class SleepLayer(nn.Module):
    """Takes the given seconds forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.scale = nn.Parameter(torch.ones(()))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def forward(self, x: Tensor) -> Tensor:
        return SleepFunction.apply(x * self.scale, *self.seconds, self.grad_context.queue)  # type: ignore[no-any-return]


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    """A transformer block of width 256 from plain linear layers."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()
