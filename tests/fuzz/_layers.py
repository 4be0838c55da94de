"""The grammar of layers: what a random model is made of.

Every layer takes a hidden tensor [rows, LENGTH, WIDTH] and whatever else the boundary before it carries, and hands on what it
does not use, so that any sequence of kinds is a model and the shrinker may drop any of them. A kind is one line of KINDS.

A layer is written as text: `kind`, `kind|frozen=weight`, `kind|hooks=tensor,backward`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values, in_order

WIDTH, LENGTH, IDS = 4, 3, 5
FROZEN = ("all", "weight", "bias")
HOOKS = (
    "tensor",
    "post",
    "backward",
    "backward_pre",
    "forward",
    "forward_pre",
    "output",
    "keep",
    "backward@layer",
)


def hidden(x: Tensor) -> Tensor:
    """A boundary's first tensor as a real [rows, LENGTH, WIDTH]: integers one-hot, complex numbers by their parts."""
    if x.is_complex():
        return x.real + 0.5 * x.imag
    if not x.is_floating_point():
        return F.one_hot(x, IDS)[..., :WIDTH].to(torch.get_default_dtype())
    return x


def ids_of(x: Tensor) -> Tensor:
    return x if not x.is_floating_point() else (x[..., 0] * 2).detach().round().long().clamp(-2, 2) + 2


def together(x: Tensor, rest: Sequence[Any]) -> Any:
    return (x, *rest) if rest else x


# -- cores: a hidden tensor in, a tensor of its shape out; `Cell` adds a residual around them --------------------------


class Cell(nn.Module):
    def __init__(self, core: nn.Module, bounded: bool = True) -> None:
        super().__init__()
        self.core, self.bounded = core, bounded

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = hidden(x)
        out = self.core(x)
        return together(x + (torch.tanh(out) if self.bounded else out), rest)


class Channels(nn.Module):
    """A module of [rows, channels, length]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x)


class Adapter(nn.Module):
    """A frozen matrix beside a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Linear(nn.Module):
    """Base of cores around one plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class CalledTwice(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class WeightUsedTwice(Linear):
    """The layer's weight goes through the layer and past it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(x, self.linear.weight.t())


class Transposed(Linear):
    """A linear layer of a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


class Flat(Linear):
    """A linear layer of vectors, one row at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.stack([self.linear(token) for token in row]) for row in x])


class Broadcast(Linear):
    """The gradient of the linear layer's output is an expanded tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((0, 1))).expand_as(x)


class SomeTokens(Linear):
    """A linear layer of those tokens that the data chooses, none at all now and then."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0.8
        return torch.zeros_like(x).masked_scatter(chosen[..., None].expand_as(x), self.linear(x[chosen]))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x) + x


def overridden() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda x: F.linear(x, layer.weight * 0.5, layer.bias)  # type: ignore[method-assign]
    return layer


class InPlace(Linear):
    """Changes what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mul_(1.5).add_(x).relu_()


class Counter_(Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x)


class Average(Linear):
    """Keeps a running mean of its inputs; does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return self.linear(x)


class ReadAverage(Average):
    """Reads it too."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - self.mean.clone() * x


class InputHook(Linear):
    """Halves the gradient of its input by a hook on that."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.linear(x)


class Remember(Linear):
    """Depends on a number and a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.generator = 0, torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + self.calls % 3) + torch.rand(WIDTH, generator=self.generator) * x


class History(Linear):
    """Subtracts the mean of what its forwards have found."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.past.append(out.detach().mean())
        return out - torch.stack(self.past).mean()


class TakesAway(Linear):
    """Holds its input during its forward; its last operation but one is the last that a backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.held is None else 2.0
        self.held = x
        out = self.linear(self.held) * scale
        self.held = None
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a first layer's input has no gradient, which reentrant checkpoints tell
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.fast = [torch.compile(self.inner, backend="aot_eager")]

    def forward(self, x: Tensor) -> Tensor:
        return self.fast[0](x)


# -- derivatives inside a forward --------------------------------------------------------------------------------------


def differentiable(x: Tensor) -> Tensor:
    """What an inner derivative is taken by; not the boundary's own tensor, whose hooks stay on the stage that made it."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


class Penalty(Linear):
    """The norm of a gradient, as in a gradient penalty."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = differentiable(x)
            out = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.pow(2)


class Force(nn.Module):
    """Minus the gradient of an energy, as in force matching."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = differentiable(x)
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -slope


class Adversarial(Linear):
    """A step up the gradient first, which is a constant of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(probe).pow(2).sum(), probe)
        return self.linear(x + 0.1 * slope)


class InnerStep(Linear):
    """A step of gradient descent on its own weight inside the forward, differentiated through."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.linear.weight
            weight = weight if weight.requires_grad else weight.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.linear(x, weight).pow(2).mean(), weight, create_graph=True)
        return F.linear(self.linear(x), weight - 0.1 * slope)


class InnerLinearStep(Linear):
    """The same where the inner loss goes through the layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if not weight.requires_grad:
            return self.linear(x)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.linear(x).pow(2).mean(), weight, create_graph=True)
        return F.linear(x, weight - 0.1 * slope)


class Vmap(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.linear)(x)


class Jvp(Linear):
    def forward(self, x: Tensor) -> Tensor:
        out, slope = torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))
        return out + slope.pow(2)


class FunctionalGradient(Linear):
    """A functorch gradient with respect to the layer's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.linear, weights, x).pow(2).mean()

        weights = dict(self.linear.named_parameters())
        slopes = torch.func.grad(energy)(weights)
        return F.linear(x, weights["weight"] - 0.1 * slopes["weight"], weights["bias"])


class FunctionalCall(Linear):
    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * value for name, value in self.linear.named_parameters()}
        return torch.func.functional_call(self.linear, doubled, x)


# -- custom functions --------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum((0, 1))


class Straight(torch.autograd.Function):
    """Rounds; its input gets no gradient in the backward, and the weight does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round() * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, (gradients[0] * x.round()).sum((0, 1))


class _Again(torch.autograd.Function):
    """Runs a module without a graph, and once more with one in its backward (as reversible layers do)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.weights = run, weights
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        asked = [weight for weight in ctx.weights if weight.requires_grad]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.run(x)
            first, *others = torch.autograd.grad(out, [x, *asked], gradients[0])
        found = iter(others)
        return first, None, *(next(found) if weight.requires_grad else None for weight in ctx.weights)


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


class Reversible(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(x, self.linear, *self.linear.parameters())


# -- numbers of other kinds, and boundaries ----------------------------------------------------------------------------


def complex_dtype() -> torch.dtype:
    return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=complex_dtype())

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(torch.complex(x, x.flip(-1)))
        return out.real + out.imag.pow(2)


class Phase(nn.Module):
    """A complex parameter, and a complex tensor at the boundary behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=complex_dtype()))

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together(torch.complex(hidden(x), torch.zeros_like(hidden(x))) * self.phase, rest)


class Embedding(nn.Module):
    """Integers in; of a hidden tensor its rounded values, which lets no gradient through."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.table, self.residual = nn.Embedding(IDS, WIDTH), residual

    def forward(self, x: Tensor, *rest: Any) -> Any:
        if x.is_complex():
            x = hidden(x)
        out = self.table(ids_of(x))
        return together(out + hidden(x) if self.residual else out, rest)


class Integers(nn.Module):
    """A tensor of integers at the boundary behind it."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together(ids_of(hidden(x)), rest)


class Detached(Linear):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together(hidden(x) + self.linear(hidden(x).detach()) * 0.5 - hidden(x).detach() * 0.1, rest)


class Stop(Linear):
    """Lets no gradient through."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together(torch.tanh(self.linear(hidden(x).detach())), rest)


class DetachedOutput(Linear):
    """Its own weight gets no gradient either."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together((hidden(x) + self.linear(hidden(x))).detach(), rest)


class Constant(nn.Module):
    """Does not look at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return together(self.value.expand(x.shape[0], LENGTH, WIDTH) * 1.0, rest)


class Unused(Linear):
    """A layer and a vector that no forward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.vector = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))


class Sometimes(Linear):
    """Its linear layer works on every other micro-batch only, counted over the replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *rest: Any, microbatch: MicrobatchContext) -> Any:  # type: ignore[override]
        out = self.linear(hidden(x))
        return together(hidden(x) + (self.rare(out) if microbatch.index % 2 else out), rest)


class OneMicrobatch(Sometimes):
    """On the run's very first micro-batch only: other replicas never use it."""

    def forward(self, x: Tensor, *rest: Any, microbatch: MicrobatchContext) -> Any:  # type: ignore[override]
        out = self.linear(hidden(x))
        return together(hidden(x) + (self.rare(out) if microbatch.index == 0 else out), rest)


class Noise(Linear):
    """Draws by step and micro-batch."""

    def forward(self, x: Tensor, *rest: Any, microbatch: MicrobatchContext) -> Any:  # type: ignore[override]
        generator = torch.Generator().manual_seed(1000 * microbatch.step + microbatch.index)
        noise = torch.randn(LENGTH, WIDTH, generator=generator) * 0.1
        return together(hidden(x) + torch.tanh(self.linear(hidden(x) + noise)), rest)


class Open(Linear):
    """Six more tensors: a gate, a bool mask, ids, None, a detached copy and one that carries and nobody need use."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = hidden(x)
        out = x + torch.tanh(self.linear(x))
        return out, torch.sigmoid(out[..., :1]), out[..., 0] > 0, ids_of(out), None, out.detach() * 0.5, x * 2, *rest


class Skip(Linear):
    """Its own input, untouched, beside its output."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return hidden(x) + torch.tanh(self.linear(hidden(x))), x, *rest


class Twice(Linear):
    """The same tensor two times, and a view of it."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        out = hidden(x) + torch.tanh(self.linear(hidden(x)))
        return out, out, out.transpose(0, 1)[:1].transpose(0, 1), *rest


class Join(Linear):
    """Uses all that stands beside the hidden tensor, and ends it."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = hidden(x)
        for value in rest:
            if value is not None and value.is_floating_point():
                x = x + 0.3 * value
            elif value is not None and value.dtype == torch.bool:
                x = x * (1 + 0.5 * value[..., None])
        return x + torch.tanh(self.linear(x))


class Drop(Linear):
    """Ends what stands beside the hidden tensor without using it."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return hidden(x) + torch.tanh(self.linear(hidden(x)))


class ChangedInput(Linear):
    """Changes its own input in place."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = hidden(x).mul_(0.9)
        return together(x + self.linear(x), rest)


class _Swap:
    """A communication with nobody, there to cut a layer into segments."""

    quick = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, values: Values) -> Pending:
        return Done((values[0].flip(0), *values[1:]))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return Done((gradients[0].flip(0), *gradients[1:]))


class Segmented(nn.Module):
    """Attention, dispatch, experts, combine."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), mlp()

    def segments(self) -> Sequence[Segment]:
        return (
            Compute("attention", lambda v: (torch.tanh(self.first(hidden(v[0]))), hidden(v[0]), *v[1:])),
            _Swap("dispatch"),
            Compute("experts", lambda v: (self.second(v[0]), *v[1:])),
            _Swap("combine"),
            Compute("sum", lambda v: (v[1] + torch.tanh(v[0]), *v[2:])),
        )

    def forward(self, x: Tensor, *rest: Any) -> Any:
        out = in_order(self.segments(), (x, *rest))
        return out if len(out) > 1 else out[0]


# -- the table ---------------------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def scaled() -> nn.Module:
    return Function(_Product)


def pruned() -> nn.Module:
    return prune.random_unstructured(linear(), "weight", 0.3)


def old_spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(linear())


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


def in_cell(core: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Cell(core())


@dataclass(frozen=True)
class Kind:
    """How a layer is made, and how often it is drawn.

    `bare`: it takes one hidden tensor and nothing else.
    """

    make: Callable[[], nn.Module]
    weight: float = 1.0
    bare: bool = False


KINDS: dict[str, Kind] = {
    "linear": Kind(in_cell(linear), 4),
    "bare linear": Kind(linear, 1, bare=True),
    "bare stack": Kind(lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.Tanh()), 1, bare=True),
    "no bias": Kind(in_cell(lambda: nn.Linear(WIDTH, WIDTH, bias=False))),
    "mlp": Kind(in_cell(mlp), 2),
    "layer norm": Kind(in_cell(lambda: nn.LayerNorm(WIDTH))),
    "rms norm": Kind(in_cell(lambda: nn.RMSNorm(WIDTH)), 0.5),
    "group norm": Kind(in_cell(lambda: Channels(nn.GroupNorm(2, WIDTH))), 0.5),
    "batch norm": Kind(in_cell(lambda: Channels(nn.BatchNorm1d(WIDTH)))),
    "batch norm, all history": Kind(in_cell(lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None))), 0.5),
    "batch norm, no statistics": Kind(in_cell(lambda: Channels(nn.BatchNorm1d(WIDTH, track_running_stats=False))), 0.5),
    "batch norm, evaluating": Kind(in_cell(lambda: Channels(nn.BatchNorm1d(WIDTH).eval())), 0.5),
    "instance norm": Kind(in_cell(lambda: Channels(nn.InstanceNorm1d(WIDTH, track_running_stats=True))), 0.5),
    "conv": Kind(in_cell(lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)))),
    "attention": Kind(in_cell(Attention)),
    "encoder": Kind(lambda: Cell(encoder(), bounded=False)),
    "gru": Kind(in_cell(Recurrent), 0.5),
    "bilinear": Kind(in_cell(Bilinear), 0.5),
    "adapter": Kind(in_cell(Adapter)),
    "called twice": Kind(in_cell(CalledTwice)),
    "weight used twice": Kind(in_cell(WeightUsedTwice)),
    "transposed": Kind(in_cell(Transposed), 0.5),
    "vectors": Kind(in_cell(Flat), 0.3),
    "broadcast": Kind(in_cell(Broadcast), 0.5),
    "some tokens": Kind(in_cell(SomeTokens)),
    "own linear": Kind(in_cell(lambda: Own(WIDTH, WIDTH)), 0.5),
    "overridden linear": Kind(in_cell(overridden), 0.5),
    "in place": Kind(in_cell(InPlace)),
    "changed input": Kind(ChangedInput, 0.3),
    "counter": Kind(in_cell(Counter_)),
    "average": Kind(in_cell(Average)),
    "read average": Kind(in_cell(ReadAverage)),
    "spectral norm": Kind(in_cell(lambda: parametrizations.spectral_norm(linear()))),
    "old spectral norm": Kind(in_cell(old_spectral), 0.5),
    "weight norm": Kind(in_cell(lambda: parametrizations.weight_norm(linear())), 0.5),
    "pruned": Kind(in_cell(pruned), 0.5),
    "input hook": Kind(in_cell(InputHook)),
    "remember": Kind(in_cell(Remember), 0.5),
    "history": Kind(in_cell(History), 0.5),
    "takes away": Kind(in_cell(TakesAway), 0.5),
    "checkpoint": Kind(in_cell(partial(Checkpointed, False))),
    "reentrant checkpoint": Kind(in_cell(partial(Checkpointed, True))),
    "compiled": Kind(in_cell(Compiled), 0.05),
    "penalty": Kind(in_cell(Penalty)),
    "force": Kind(in_cell(Force)),
    "adversarial": Kind(in_cell(Adversarial)),
    "inner step": Kind(in_cell(InnerStep), 0.5),
    "inner linear step": Kind(in_cell(InnerLinearStep), 0.5),
    "vmap": Kind(in_cell(Vmap), 0.5),
    "jvp": Kind(in_cell(Jvp), 0.5),
    "functional gradient": Kind(in_cell(FunctionalGradient), 0.5),
    "functional call": Kind(in_cell(FunctionalCall), 0.5),
    "function": Kind(in_cell(scaled)),
    "function without input gradient": Kind(in_cell(lambda: Function(Straight)), 0.5),
    "reversible": Kind(in_cell(Reversible)),
    "complex": Kind(in_cell(Complex)),
    "phase": Kind(Phase, 0.5),
    "embedding": Kind(partial(Embedding, False)),
    "embedding, residual": Kind(partial(Embedding, True)),
    "integers": Kind(Integers),
    "detached branch": Kind(Detached),
    "stop": Kind(Stop),
    "detached output": Kind(DetachedOutput, 0.5),
    "constant": Kind(Constant, 0.3),
    "unused": Kind(in_cell(Unused)),
    "sometimes": Kind(Sometimes),
    "one micro-batch": Kind(OneMicrobatch),
    "noise": Kind(Noise),
    "open": Kind(Open),
    "skip": Kind(Skip),
    "twice": Kind(Twice, 0.5),
    "join": Kind(Join, 2),
    "drop": Kind(Drop, 0.5),
    "segmented": Kind(Segmented),
    "identity": Kind(in_cell(nn.Identity), 0.5),
}
OPENING = ("open", "skip", "twice")
CLOSING = ("join", "drop")
ALIASING = ("open", "twice")  # their further outputs are computed from the first
CUTTING = (
    *("stop", "detached output", "constant", "embedding", "integers"),
    "function without input gradient",
)  # they let no gradient through; a segmented layer before them gets zeros, not None (see ops/segments.Communication)
DERIVING = ("penalty", "force", "adversarial", "inner step", "inner linear step", "functional gradient", "jvp")
STATEFUL = (
    "batch norm",
    "batch norm, all history",
    "instance norm",
    "counter",
    "average",
    "read average",
    "spectral norm",
    "old spectral norm",
    "remember",
    "history",
)  # their buffers or attributes depend on the order of the micro-batches


# -- a layer from its text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One layer of a case: `kind|frozen=...|hooks=...` taken apart."""

    kind: str
    frozen: str = ""
    hooks: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Layout:
        kind, *options = text.split("|")
        values = dict(option.split("=") for option in options)
        return cls(kind, values.get("frozen", ""), tuple(values["hooks"].split(",")) if "hooks" in values else ())

    def __str__(self) -> str:
        hooks = f"|hooks={','.join(self.hooks)}" if self.hooks else ""
        return self.kind + (f"|frozen={self.frozen}" if self.frozen else "") + hooks


def build(text: str, seed: str, name: str, counts: Counter[str], kept: list[Tensor]) -> nn.Module:
    """The layer that `text` describes, with weights drawn from `seed`, its hooks counting into `counts` under `name`."""
    layout = Layout.parse(text)
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big"))
        module = KINDS[layout.kind].make()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parametrized(module):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    for parameter in module.parameters():
        matrix = parameter.ndim >= 2
        if layout.frozen == "all" or layout.frozen == ("weight" if matrix else "bias"):
            parameter.requires_grad_(False)
    for hook in layout.hooks:
        _HOOKS[hook](module, partial(_count, counts, f"{name} {hook}"), kept)
    return module


def parametrized(module: nn.Module) -> bool:
    return any(hasattr(part, "parametrizations") or hasattr(part, "weight_orig") for part in module.modules())


def _count(counts: Counter[str], key: str, what: str = "") -> None:
    counts[f"{key}{what}"] += 1


Count = Callable[..., None]


def _hooked_parameter(module: nn.Module) -> nn.Parameter | None:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return next((p for p in trained if p.ndim >= 2), trained[0] if trained else None)


def _inner(module: nn.Module) -> nn.Module:
    return next((part for part in module.modules() if isinstance(part, nn.Linear)), module)


def _scaled(values: Any) -> Any:
    """Gradients halved, as a hook returns them; those of integers are None or zeros."""
    return tuple(v * 0.5 if v is not None and (v.is_floating_point() or v.is_complex()) else v for v in values)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _on_tensor(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(gradient: Tensor) -> Tensor:
        count()
        return gradient * 0.5

    if (parameter := _hooked_parameter(module)) is not None:
        parameter.register_hook(hook)


def _on_accumulation(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(parameter: Tensor) -> None:
        count("" if parameter.grad is not None else " without a gradient")

    if (parameter := _hooked_parameter(module)) is not None:
        parameter.register_post_accumulate_grad_hook(hook)


def _on_backward(find: Callable[[nn.Module], nn.Module], module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        count()
        return _scaled(inputs)

    find(module).register_full_backward_hook(hook)


def _before_backward(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(_: nn.Module, outputs: Any) -> Any:
        count()
        return _scaled(outputs)

    _inner(module).register_full_backward_pre_hook(hook)


def _on_forward(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(_: nn.Module, inputs: Any, output: Any) -> Any:
        count()
        return output * 1.1 if isinstance(output, Tensor) and output.is_floating_point() else output

    _inner(module).register_forward_hook(hook)


def _before_forward(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def hook(_: nn.Module, inputs: Any) -> Any:
        count()
        x, *rest = inputs
        return (x * 0.9 if x.is_floating_point() else x, *rest)

    _inner(module).register_forward_pre_hook(hook)


def _on_output(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    def on_gradient(gradient: Tensor) -> Tensor:
        count()
        return gradient * 0.5

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output := _first(output), Tensor) and output.requires_grad:
            output.register_hook(on_gradient)

    module.register_forward_hook(hook)


def _keep(module: nn.Module, count: Count, kept: list[Tensor]) -> None:
    """Keeps the layer's outputs, detached, until the end of the step."""

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            kept.append(hidden(_first(output).detach()))

    module.register_forward_hook(hook)


_HOOKS: dict[str, Callable[[nn.Module, Count, list[Tensor]], None]] = {
    "tensor": _on_tensor,
    "post": _on_accumulation,
    "backward": partial(_on_backward, _inner),
    "backward@layer": partial(_on_backward, lambda module: module),
    "backward_pre": _before_backward,
    "forward": _on_forward,
    "forward_pre": _before_forward,
    "output": _on_output,
    "keep": _keep,
}


def tied_weight(module: nn.Module) -> str | None:
    """The name of a [WIDTH, WIDTH] weight of a plain linear layer that can be shared with another layer's."""
    for name, part in module.named_modules():
        plain = type(part) is nn.Linear and part.weight.shape == (WIDTH, WIDTH) and not parametrized(part)
        if plain and not part.weight.is_complex():
            return f"{name}.weight" if name else "weight"
    return None


def share(modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Makes the weight `names[0]` of the first module that of the others under their names, too."""
    weight: Any = None
    for module, name in zip(modules, names, strict=True):
        path, _, leaf = name.rpartition(".")
        home = module.get_submodule(path)
        if weight is None:
            weight = getattr(home, leaf)
        else:
            setattr(home, leaf, weight)
