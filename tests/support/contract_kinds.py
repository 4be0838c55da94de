"""Layers that break the stage contract in one way each, and layers that look as if they did and do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import WIDTH
from one_process import Plain

LEFT: dict[str, Any] = {}
LATEST: Any = None

# -- state that layers of two stages share -----------------------------------------------------------------------------


class Statistics(nn.Module):
    """Running statistics, by one of torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1 + 0.1 * float(self.seen % 5))


class With(Plain):
    """A layer with a part that another layer has, too."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


class Stash:
    """What one layer leaves for another."""

    def __init__(self) -> None:
        self.value: Any = None


class Leaves(Plain):
    """Leaves a detached tensor for another layer in an object, new or changed in place, or in a variable."""

    def __init__(self, stash: Stash, way: str) -> None:
        super().__init__()
        self.stash, self.way = stash, way

    def forward(self, x: Tensor) -> Tensor:
        global LATEST
        out = super().forward(x)
        if self.way == "object":
            self.stash.value = out.detach()
        elif self.way == "in place":
            if self.stash.value is None:
                self.stash.value = torch.zeros_like(out)
            self.stash.value.copy_(out.detach())
        else:
            assert self.way == "global variable"
            LATEST = out.detach()
        return out


class Finds(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) + (LATEST if self.way == "global variable" else self.stash.value)


def sharing(case: Any) -> list[Callable[[], nn.Module]]:
    """Two layers that share what `case` says."""
    global LATEST
    LATEST = torch.zeros(())
    if isinstance(case, str):
        stash = Stash()
        stash.value = None if case == "in place" else torch.zeros(())
        return [lambda: Leaves(stash, case), lambda: Finds(stash, case)]
    part = case()
    return [lambda: With(part)] * 2


class Angles(nn.Module):
    """What several layers share and nobody changes: a buffer, a cache of the first forward, a value computed anew and alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(3.0))
        self.cache: dict[int, Tensor] = {}
        self.made: Tensor | None = None
        self.mask = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.steps.cos()
        self.cache.setdefault(len(x), torch.ones(WIDTH))
        self.mask = torch.ones(3)
        return x * (self.made * self.mask)[:, None] * self.cache[len(x)]


# -- state that forwards leave for backwards, and backwards for forwards ------------------------------------------------


class _Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.module.last.mean(), None


class InAFunction(Plain):
    """A function's backward reads what the forward left in the module."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        return _Scales.apply(out, self)


class InModuleHooks(Plain):
    """Keeps the linear layer's outputs on a stack, as per-sample gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Tensor] = []
        self.linear.register_forward_hook(self.after)
        self.linear.register_full_backward_hook(self.behind)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.stack.append(output.detach())

    def behind(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        last = self.stack.pop().tanh()
        return tuple(None if gradient is None else gradient * last for gradient in inputs)


class InABuffer(Plain):
    """The function's backward reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach().mean((0, 1))
        return _Scales.apply(out, self)


class Keeps(Plain):
    """Keeps its output for others to look at, and a hook of its own with the tensor that it needs."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = seen = out.detach()
        out.register_hook(lambda gradient: gradient * seen)
        return out * 1.0


class Notes(Plain):
    """Notes its forwards and backwards in one list, and counts them in one dict and one number, as tests and monitors do."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.counts = {"F": 0, "B": 0}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.note("F", out.detach().mean().item())
        out.register_hook(lambda _: self.note("B"))
        return out * 1.0

    def note(self, kind: str, *values: float) -> None:
        self.notes.append((kind, *values))
        self.counts[kind] += 1
        self.calls += 1


class Average(Plain):
    """Keeps a running mean of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(self.behind)
        return out * 1.0

    def behind(self, gradient: Tensor) -> None:
        self.mean.mul_(0.9).add_(gradient.abs().mean())


class ReadsAverage(Average):
    """Reads it in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.mean.clone()


class StepsInBackward(Plain):
    """An optimizer in hooks on its weights."""

    def __init__(self, unseen: bool) -> None:
        super().__init__()
        self.unseen = unseen
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        (parameter.data if self.unseen else parameter).sub_(0.1 * parameter.grad)
        parameter.grad = None


# -- state of a layer's own ---------------------------------------------------------------------------------------------


class OwnGenerators(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.torch = {"a": torch.Generator().manual_seed(1)}

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.python.random() + self.numpy.random() + torch.rand((), generator=self.torch["a"]).item()
        return super().forward(torch.tanh(self.linear(x)) * drawn)


class Mean(Plain):
    """Keeps a tensor as an attribute, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        return super().forward(x * self.mean)


class Counts:
    def __init__(self) -> None:
        self.calls = 0


class Counting(Plain):
    """Counts in a list, in a dict, in an object, and in an attribute that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.list, self.dict, self.object = [0], {"a": {"b": 1.0}}, Counts()

    def forward(self, x: Tensor) -> Tensor:
        self.list[0] += 1
        self.dict["a"]["b"] *= 1.1
        self.object.calls += 1
        self.late = getattr(self, "late", 0) + 1
        return super().forward(x * (self.list[0] + self.dict["a"]["b"] + self.object.calls + self.late) / 10)


class TakesAway(Plain):
    """Leaves something in itself during its forward only, behind the last operation that a backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.inner = [Counts()]

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None or self.inner[0].calls:
            raise AssertionError("the forward before has not come to its end")
        self.kept, self.inner[0].calls = x, 1
        out = super().forward(self.kept)
        self.kept, self.inner[0].calls = None, 0
        return out


class Drawing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.linear(x)) * (random.random() + np.random.rand()))


class InPlace(Plain):
    """Changes in place: an attribute, or the data of a parameter that does not train."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.attribute = what, torch.ones(WIDTH)
        self.average = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        changed = self.attribute if self.what == "attribute" else self.average.data
        changed.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x * (self.attribute + self.average))


class Decays(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.99)
        return super().forward(x)


# -- tensors past the pipeline ------------------------------------------------------------------------------------------


class Aliases(Plain):
    """Its output two times: itself, a view of it, or off the graph."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = self.linear(x)
        return out, {"same": out, "view": out[..., :2], "detached": out.detach()}[self.what]


class ChangesOne(Plain):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        changed = x.mul_(2) if other.requires_grad else other.mul_(0.5)
        return super().forward(x + changed) + other.sum()


class LeavesGraph(Plain):
    """Leaves a tensor with its graph."""

    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.stash = stash

    def forward(self, x: Tensor) -> Tensor:
        self.stash.value = x
        return super().forward(x)


class FindsGraph(LeavesGraph):
    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) + self.stash.value


def graph() -> list[Callable[[], nn.Module]]:
    stash = Stash()
    return [lambda: LeavesGraph(stash), lambda: FindsGraph(stash)]


class Measures(Plain):
    """Writes a float into a module-level dict that nobody computes with, and grows a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        LEFT["norm"] = out.detach().norm().item()
        self.norms.append(out.detach().norm())
        return out


class Configuration:
    """An object that all layers share, with a counter."""

    calls = 0


class CountsInConfiguration(Plain):
    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration = configuration

    def forward(self, x: Tensor) -> Tensor:
        self.configuration.calls += 1
        return super().forward(x)
