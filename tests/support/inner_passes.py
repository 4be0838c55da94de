"""Layers that start backward passes of their own, inside a forward, a recomputed forward or another backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.func import grad as func_grad
from torch.utils.checkpoint import checkpoint

from models import WIDTH
from pipeloom.runtime import Layer


class Inner(nn.Module):
    """Two linear layers and an energy [rows] that the passes inside differentiate."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.double()

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


class Force(Inner):
    """Adds the gradient of an energy, itself differentiated by the training pass (force matching, gradient penalties)."""

    def forward(self, x: Tensor) -> Tensor:
        x = _differentiable(x)
        out = self.body(x)
        (force,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + 0.3 * force


class Adversarial(Inner):
    """Moves its input along a gradient that the training pass takes as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (direction,) = torch.autograd.grad(self.body(probe).square().sum(), probe)
        return x + self.body(x + 0.1 * direction.tanh())


class Learned(Inner):
    """One step of gradient descent on its own weight, and the result after it (meta-learning)."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x).square().mean()
        (slope,) = torch.autograd.grad(inner, self.first.weight, create_graph=torch.is_grad_enabled())
        return x + self.second(torch.tanh(nn.functional.linear(x, self.first.weight - 0.5 * slope, self.first.bias)))


class _Nested(torch.autograd.Function):
    """`module.body(x)`, whose backward runs it again and differentiates it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Inner, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module.body(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weights = list(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module.body(x), (x, *weights), gradients)
        return found[0], None, *found[1:]


class Nested(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x + _Nested.apply(x, self, *self.parameters()) + self.body(0.5 * x)  # type: ignore[no-any-return, no-untyped-call]


class Reentrant(Inner):
    """torch's reentrant checkpoint accumulates gradients in a pass of its own; the weights are used outside of it too."""

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(self.body, x, use_reentrant=True) if x.requires_grad else self.body(x)
        return x + self.body(inside)


class Checkpointed(Force):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Functional(Inner):
    """Transforms of torch.func over the layer and with respect to its weights."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.first, weights, (rows,)).square().mean()

        slope = func_grad(energy)(dict(self.first.named_parameters()), x)["weight"]
        _, tangent = jvp(self.second, (x,), (x.cos(),))
        return vmap(self.second)(vmap(self.first)(x)) + 0.2 * tangent + x @ slope


class ForwardMode(Inner):
    """Forward-mode AD without torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.sin())
            out = torch.autograd.forward_ad.unpack_dual(self.body(dual))
            assert out.tangent is not None
            return out.primal + out.tangent


KINDS: tuple[type[Inner], ...] = (Force, Adversarial, Learned, Nested, Reentrant, Checkpointed, Functional, ForwardMode)


def inner_layers(kind: Callable[[int], nn.Module], count: int) -> list[Layer]:
    return [Layer(f"layer{at}", lambda at=at: kind(at)) for at in range(count)]
