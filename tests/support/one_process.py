"""Five optimizer steps of a list of layers, in one process and in a pipeline: what differs between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models import WIDTH, batch, mse
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.schedule.model import Schedule

STEPS, ROWS = 5, 8

Make = Callable[[], nn.Module]


class Plain(nn.Module):
    """Linear and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def built(makes: Sequence[Make]) -> list[nn.Module]:
    """The layers, each with weights of its own; the same at every call."""
    modules = []
    for seed, make in enumerate(makes):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            modules.append(make())
    return modules


def one_process(modules: Sequence[nn.Module], microbatches: int, steps: int = STEPS) -> list[Any]:
    """Losses, gradients and state, micro-batch after micro-batch."""

    def step(x: Tensor, y: Tensor) -> float:
        total = 0.0
        for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            out: Any = part
            for module in modules:
                out = module(*out) if isinstance(out, tuple) else module(out)
            loss = mse(out, target) / microbatches
            loss.backward()
            total += loss.item()
        return total

    return _trained(modules, step, steps)


def in_a_pipeline(
    modules: Sequence[nn.Module], schedule: Schedule, recompute: Any = "none", steps: int = STEPS
) -> list[Any]:
    """The same of a pipeline of these layers."""
    layers = [Layer(f"layer{at}", lambda module=module: module) for at, module in enumerate(modules)]
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(recompute=recompute))
    return _trained(modules, lambda x, y: pipeline.step(x, y).item(), steps)


def _trained(modules: Sequence[nn.Module], step: Callable[[Tensor, Tensor], float], steps: int) -> list[Any]:
    named = {f"{at}.{name}": p for at, module in enumerate(modules) for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    seen: list[Any] = []
    for number in range(steps):
        x, y = batch(ROWS, seed=number)
        seen.append((f"loss {number}", torch.tensor(step(x, y))))
        seen += [(f"{n} in step {number}", None if p.grad is None else p.grad.clone()) for n, p in named.items()]
        optimizer.step()
        optimizer.zero_grad()
    buffers = {f"{at}.{name}": b for at, module in enumerate(modules) for name, b in module.named_buffers()}
    return [*seen, *((name, value.detach().clone()) for name, value in {**named, **buffers}.items())]


def differences(makes: Sequence[Make], schedule: Schedule, recompute: Any = "none", steps: int = STEPS) -> list[str]:
    """The names of losses, gradients, weights and buffers that differ; a gradient that is None differs from zeros."""
    want = one_process(built(makes), schedule.microbatches, steps)
    got = in_a_pipeline(built(makes), schedule, recompute, steps)
    return [name for (name, a), (other, b) in zip(want, got, strict=True) if name != other or not _equal(a, b)]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Up to rounding, which grows with the largest element: small ones are what is left of larger terms."""
    if a is None or b is None:
        return a is b
    want, got = _dense(a), _dense(b)
    return want.shape == got.shape and torch.allclose(want, got, rtol=0, atol=1e-6 + 2e-5 * _largest(want))


def _largest(value: Tensor) -> float:
    return value.nan_to_num().abs().max().item() if value.numel() else 0.0


def _dense(value: Tensor) -> Tensor:
    return value if value.layout is torch.strided else value.to_dense()
