"""Small models for the runtime's tests, with a serial reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.runtime import Layer

WIDTH = 6


class Block(nn.Module):
    """Linear, norm, tanh and a residual: matrix and vector parameters, saved inputs and saved outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def blocks(count: int) -> list[Layer]:
    return [Layer(f"block{i}", lambda seed=i: Block(seed)) for i in range(count)]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, WIDTH, generator=generator), torch.randn(rows, 3, WIDTH, generator=generator)


def serial(
    layers: Sequence[Callable[[], nn.Module]],
    inputs: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
    loss: Callable[[Any, Any], Tensor] = mse,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that knows nothing of pipelines: micro-batch after micro-batch."""
    modules = [layer() for layer in layers]
    total = torch.zeros(())
    for x, y in zip(torch.split(inputs, list(sizes)), torch.split(targets, list(sizes)), strict=True):
        out: Any = x
        for module in modules:
            out = module(*out) if isinstance(out, tuple) else module(out)
        part = loss(out, y) * (y.numel() / targets.numel())
        if part.requires_grad:
            part.backward()
        total += part.detach()
    gradients = {
        f"{getattr(layer, 'name', i)}.{name}": parameter.grad
        for i, (layer, module) in enumerate(zip(layers, modules, strict=True))
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return total, gradients


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest max|a-b| / max|b| over the parameters; infinite when the sets differ."""
    if got.keys() != want.keys():
        return float("inf")
    each = (((got[k] - want[k]).abs().max() / want[k].abs().max().clamp_min(1e-30)).item() for k in want)
    return max(each, default=0.0)  # a rank of frozen layers has none


def gradients(pipeline: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
