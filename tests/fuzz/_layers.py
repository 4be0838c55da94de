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


# -- layers as functions: `run(m, x)` computes with the parts that the table of kinds gives `m` -----------------------------


class Core(nn.Module):
    """A function of a hidden tensor, and the modules, parameters, buffers and values that it uses, by name."""

    def __init__(self, run: Callable[..., Tensor], **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run
        for name, part in (parts or {"linear": linear}).items():
            setattr(self, name, part())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Cell(nn.Module):
    """A core between boundaries: `bounded` and added to its input (a residual), as it is, or in its input's place."""

    def __init__(self, core: nn.Module, residual: bool = True, bounded: bool = True) -> None:
        super().__init__()
        self.core, self.residual, self.bounded = core, residual, bounded

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = hidden(x)
        out = self.core(x)
        return together(x + (torch.tanh(out) if self.bounded else out) if self.residual else out, rest)


class Boundary(Core):
    """A core of everything that stands at the boundary before it, which makes everything behind it."""

    def forward(self, x: Tensor, *rest: Any) -> Any:  # type: ignore[override]
        return self.run(self, x, *rest)


class Counted(Core):
    """A core of the micro-batch's number, too."""

    def forward(self, x: Tensor, *rest: Any, microbatch: MicrobatchContext) -> Any:  # type: ignore[override]
        return together(hidden(x) + self.run(self, hidden(x), microbatch), rest)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def vector(dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.ones(WIDTH, dtype=dtype))


def channels(m: Any, x: Tensor) -> Tensor:
    """A module of [rows, channels, length]."""
    return m.inner(x.transpose(1, 2)).transpose(1, 2)


def vectors(m: Any, x: Tensor) -> Tensor:
    """A linear layer of vectors, one row at a time."""
    return torch.stack([torch.stack([m.linear(token) for token in row]) for row in x])


def some_tokens(m: Any, x: Tensor) -> Tensor:
    """A linear layer of those tokens that the data chooses, none at all now and then."""
    chosen = x[..., 0] > 0.8
    return torch.zeros_like(x).masked_scatter(chosen[..., None].expand_as(x), m.linear(x[chosen]))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x) + x


def overridden() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda x: F.linear(x, layer.weight * 0.5, layer.bias)  # type: ignore[method-assign]
    return layer


def counter(m: Any, x: Tensor) -> Tensor:
    """Counts its forwards."""
    m.seen += 1
    return m.linear(x)


def average(m: Any, x: Tensor) -> Tensor:
    """Keeps a running mean of its inputs; does not read it."""
    with torch.no_grad():
        m.mean.lerp_(x.mean((0, 1)), 0.1)
    return m.linear(x)


def input_hook(m: Any, x: Tensor) -> Tensor:
    """Halves the gradient of its input by a hook on that."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return m.linear(x)


def remember(m: Any, x: Tensor) -> Tensor:
    """Depends on a number and a generator that it keeps."""
    m.calls += 1
    return m.linear(x) * (1 + m.calls % 3) + torch.rand(WIDTH, generator=m.generator) * x


def history(m: Any, x: Tensor) -> Tensor:
    """Subtracts the mean of what its forwards have found."""
    out = m.linear(x)
    m.past.append(out.detach().mean())
    return out - torch.stack(m.past).mean()


def takes_away(m: Any, x: Tensor) -> Tensor:
    """Holds its input during its forward; its last operation but one is the last that a backward needs."""
    scale = 1.0 if m.held is None else 2.0
    m.held = x
    out = m.linear(m.held) * scale
    m.held = None
    return out


def checkpointed(reentrant: bool, m: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a first layer's input has no gradient, which reentrant checkpoints tell
        return checkpoint(m.inner, x, use_reentrant=reentrant)


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


def penalty(m: Any, x: Tensor) -> Tensor:
    """The norm of a gradient, as in a gradient penalty."""
    with torch.enable_grad():
        x = differentiable(x)
        out = torch.tanh(m.linear(x))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out + slope.pow(2)


def force(m: Any, x: Tensor) -> Tensor:
    """Minus the gradient of an energy, as in force matching."""
    with torch.enable_grad():
        x = differentiable(x)
        (slope,) = torch.autograd.grad(m.energy(x).sum(), x, create_graph=True)
    return -slope


def adversarial(m: Any, x: Tensor) -> Tensor:
    """A step up the gradient first, which is a constant of the graph."""
    with torch.enable_grad():
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.linear(probe).pow(2).sum(), probe)
    return m.linear(x + 0.1 * slope)


def inner_step(m: Any, x: Tensor) -> Tensor:
    """A step of gradient descent on its own weight inside the forward, differentiated through."""
    with torch.enable_grad():
        weight = m.linear.weight
        weight = weight if weight.requires_grad else weight.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.linear(x, weight).pow(2).mean(), weight, create_graph=True)
    return F.linear(m.linear(x), weight - 0.1 * slope)


def inner_linear_step(m: Any, x: Tensor) -> Tensor:
    """The same where the inner loss goes through the layer itself."""
    weight = m.linear.weight
    if not weight.requires_grad:
        return m.linear(x)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(m.linear(x).pow(2).mean(), weight, create_graph=True)
    return F.linear(x, weight - 0.1 * slope)


def jvp(m: Any, x: Tensor) -> Tensor:
    out, slope = torch.func.jvp(m.linear, (x,), (torch.ones_like(x),))
    return out + slope.pow(2)


def functional_gradient(m: Any, x: Tensor) -> Tensor:
    """A functorch gradient with respect to the layer's own weights."""
    weights = dict(m.linear.named_parameters())
    slopes = torch.func.grad(lambda w: torch.func.functional_call(m.linear, w, x).pow(2).mean())(weights)
    return F.linear(x, weights["weight"] - 0.1 * slopes["weight"], weights["bias"])


def functional_call(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.linear, {name: 2 * value for name, value in m.linear.named_parameters()}, x)


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


# -- numbers of other kinds, and boundaries ----------------------------------------------------------------------------


def complex_dtype() -> torch.dtype:
    return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64


def complex_linear(m: Any, x: Tensor) -> Tensor:
    out = m.linear(torch.complex(x, x.flip(-1)))
    return out.real + out.imag.pow(2)


def embedding(residual: bool, m: Any, x: Tensor, *rest: Any) -> Any:
    """Integers in; of a hidden tensor its rounded values, which lets no gradient through."""
    out = m.table(ids_of(hidden(x) if x.is_complex() else x))
    return together(out + hidden(x) if residual else out, rest)


def noise(m: Any, x: Tensor, microbatch: MicrobatchContext) -> Tensor:
    """Draws by step and micro-batch."""
    generator = torch.Generator().manual_seed(1000 * microbatch.step + microbatch.index)
    return torch.tanh(m.linear(x + torch.randn(LENGTH, WIDTH, generator=generator) * 0.1))


def rarely(when: Callable[[int], bool], m: Any, x: Tensor, microbatch: MicrobatchContext) -> Tensor:
    """A second linear layer works on some micro-batches only, counted over the replicas."""
    out = m.linear(x)
    return m.rare(out) if when(microbatch.index) else out


def grown(m: Any, x: Tensor) -> Tensor:
    return hidden(x) + torch.tanh(m.linear(hidden(x)))


def open_(m: Any, x: Tensor, *rest: Any) -> Any:
    """Six more tensors: a gate, a bool mask, ids, None, a detached copy and one that carries and nobody need use."""
    out = grown(m, x)
    more = torch.sigmoid(out[..., :1]), out[..., 0] > 0, ids_of(out), None, out.detach() * 0.5, hidden(x) * 2
    return out, *more, *rest


def twice(m: Any, x: Tensor, *rest: Any) -> Any:
    """The same tensor two times, and a view of it."""
    out = grown(m, x)
    return out, out, out.transpose(0, 1)[:1].transpose(0, 1), *rest


def join(m: Any, x: Tensor, *rest: Any) -> Any:
    """Uses all that stands beside the hidden tensor, and ends it."""
    x = hidden(x)
    for value in rest:
        if value is not None and value.is_floating_point():
            x = x + 0.3 * value
        elif value is not None and value.dtype == torch.bool:
            x = x * (1 + 0.5 * value[..., None])
    return grown(m, x)


class _Swap:
    """A communication with nobody, there to cut a layer into segments."""

    quick = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, values: Values) -> Pending:
        return Done((values[0].flip(0), *values[1:]))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        first = gradients[0]  # None if what enters the segment does not train
        return Done((first if first is None else first.flip(0), *gradients[1:]))


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


def old_spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(linear())


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


@dataclass(frozen=True)
class Kind:
    """How a layer is made, and how often it is drawn.

    `bare`: it takes one hidden tensor and nothing else.
    """

    make: Callable[[], nn.Module]
    weight: float = 1.0
    bare: bool = False


def core(run: Callable[..., Tensor], weight: float = 1.0, residual: bool = True, **parts: Callable[[], Any]) -> Kind:
    """A cell around a function; without parts of its own it has a linear layer."""
    return Kind(lambda: Cell(Core(run, **parts), residual), weight)


def cell(make: Callable[[], nn.Module], weight: float = 1.0) -> Kind:
    return Kind(lambda: Cell(make()), weight)


def norm(make: Callable[[], nn.Module], weight: float = 0.5) -> Kind:
    return core(channels, weight, inner=make)


def boundary(run: Callable[..., Any], weight: float = 1.0, **parts: Callable[[], Any]) -> Kind:
    return Kind(lambda: Boundary(run, **parts), weight)


def counted(run: Callable[..., Tensor], **parts: Callable[[], Any]) -> Kind:
    return Kind(lambda: Counted(run, **parts))


RARE: dict[str, Callable[[], Any]] = {"linear": linear, "rare": linear}
MEAN: dict[str, Callable[[], Any]] = {"linear": linear, "mean": lambda: nn.Buffer(torch.zeros(WIDTH))}

KINDS: dict[str, Kind] = {
    "linear": cell(linear, 4),
    "bare linear": Kind(linear, 1, bare=True),
    "bare stack": Kind(lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.Tanh()), 1, bare=True),
    "no bias": cell(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "mlp": cell(mlp, 2),
    "layer norm": cell(lambda: nn.LayerNorm(WIDTH)),
    "rms norm": cell(lambda: nn.RMSNorm(WIDTH), 0.5),
    "group norm": norm(lambda: nn.GroupNorm(2, WIDTH)),
    "batch norm": norm(lambda: nn.BatchNorm1d(WIDTH), 1),
    "batch norm, all history": norm(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch norm, no statistics": norm(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "batch norm, evaluating": norm(lambda: nn.BatchNorm1d(WIDTH).eval()),
    "instance norm": norm(lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True)),
    "conv": norm(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), 1),
    "attention": core(
        lambda m, x: m.heads(x, x, x, need_weights=False)[0],
        heads=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "encoder": Kind(lambda: Cell(encoder(), bounded=False)),
    "gru": core(lambda m, x: m.gru(x)[0], 0.5, gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "bilinear": core(lambda m, x: m.product(x, x), 0.5, product=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    # a frozen matrix beside a trained one of low rank
    "adapter": core(
        lambda m, x: m.base(x) + m.up(m.down(x)),
        base=lambda: linear().requires_grad_(False),
        down=lambda: nn.Linear(WIDTH, 2, bias=False),
        up=lambda: nn.Linear(2, WIDTH, bias=False),
    ),
    "called twice": core(lambda m, x: m.linear(torch.tanh(m.linear(x)))),
    # the layer's weight goes through the layer and past it
    "weight used twice": core(lambda m, x: m.linear(x) + F.linear(x, m.linear.weight.t())),
    # a linear layer of a tensor that is not contiguous
    "transposed": core(lambda m, x: m.linear(x.transpose(0, 1)).transpose(0, 1), 0.5),
    "vectors": core(vectors, 0.3),
    # the gradient of the linear layer's output is an expanded tensor
    "broadcast": core(lambda m, x: m.linear(x.mean((0, 1))).expand_as(x), 0.5),
    "some tokens": core(some_tokens),
    "own linear": cell(lambda: Own(WIDTH, WIDTH), 0.5),
    "overridden linear": cell(overridden, 0.5),
    # changes what it computed
    "in place": core(lambda m, x: m.linear(x).mul_(1.5).add_(x).relu_()),
    # changes its own input in place
    "changed input": core(lambda m, x: x.mul_(0.9) + m.linear(x), 0.3, residual=False),
    "counter": core(counter, linear=linear, seen=lambda: nn.Buffer(torch.zeros((), dtype=torch.int64))),
    "average": core(average, **MEAN),
    "read average": core(lambda m, x: average(m, x) - m.mean.clone() * x, **MEAN),
    "spectral norm": cell(lambda: parametrizations.spectral_norm(linear())),
    "old spectral norm": cell(old_spectral, 0.5),
    "weight norm": cell(lambda: parametrizations.weight_norm(linear()), 0.5),
    "pruned": cell(lambda: prune.random_unstructured(linear(), "weight", 0.3), 0.5),
    "input hook": core(input_hook),
    "remember": core(remember, 0.5, linear=linear, calls=lambda: 0, generator=lambda: torch.Generator().manual_seed(1)),
    "history": core(history, 0.5, linear=linear, past=list),
    "takes away": core(takes_away, 0.5, linear=linear, held=lambda: None),
    "checkpoint": core(partial(checkpointed, False), inner=mlp),
    "reentrant checkpoint": core(partial(checkpointed, True), inner=mlp),
    "compiled": cell(Compiled, 0.05),
    "penalty": core(penalty),
    "force": core(force, energy=lambda: nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 1))),
    "adversarial": core(adversarial),
    "inner step": core(inner_step, 0.5),
    "inner linear step": core(inner_linear_step, 0.5),
    "vmap": core(lambda m, x: torch.func.vmap(m.linear)(x), 0.5),
    "jvp": core(jvp, 0.5),
    "functional gradient": core(functional_gradient, 0.5),
    "functional call": core(functional_call, 0.5),
    "function": core(lambda m, x: _Product.apply(x, m.scale), scale=vector),
    "function without input gradient": core(lambda m, x: Straight.apply(x, m.scale), 0.5, scale=vector),
    "reversible": core(lambda m, x: _Again.apply(x, m.linear, *m.linear.parameters())),
    "complex": core(complex_linear, linear=lambda: nn.Linear(WIDTH, WIDTH, dtype=complex_dtype())),
    # a complex parameter, and a complex tensor at the boundary behind it
    "phase": core(
        lambda m, x: torch.complex(x, torch.zeros_like(x)) * m.phase,
        0.5,
        residual=False,
        phase=lambda: vector(complex_dtype()),
    ),
    "embedding": boundary(partial(embedding, False), table=lambda: nn.Embedding(IDS, WIDTH)),
    "embedding, residual": boundary(partial(embedding, True), table=lambda: nn.Embedding(IDS, WIDTH)),
    # a tensor of integers at the boundary behind it
    "integers": core(lambda m, x: ids_of(x), residual=False, nothing=lambda: None),
    "detached branch": core(lambda m, x: x + m.linear(x.detach()) * 0.5 - x.detach() * 0.1, residual=False),
    # lets no gradient through
    "stop": core(lambda m, x: torch.tanh(m.linear(x.detach())), residual=False),
    # its own weight gets no gradient either
    "detached output": core(lambda m, x: (x + m.linear(x)).detach(), 0.5, residual=False),
    # does not look at its input
    "constant": core(lambda m, x: m.value.expand(x.shape[0], LENGTH, WIDTH) * 1.0, 0.3, residual=False, value=vector),
    # a layer and a vector that no forward reaches
    "unused": core(lambda m, x: m.linear(x), linear=linear, other=linear, vector=vector),
    "sometimes": counted(partial(rarely, lambda index: index % 2 == 1), **RARE),
    # on the run's very first micro-batch only: other replicas never use the second layer
    "one micro-batch": counted(partial(rarely, lambda index: index == 0), **RARE),
    "noise": counted(noise),
    "open": boundary(open_),
    # its own input, untouched, beside its output
    "skip": boundary(lambda m, x, *rest: (grown(m, x), x, *rest)),
    "twice": boundary(twice, 0.5),
    "join": boundary(join, 2),
    # ends what stands beside the hidden tensor without using it
    "drop": boundary(lambda m, x, *rest: grown(m, x), 0.5),
    "segmented": Kind(Segmented),
    "identity": cell(nn.Identity, 0.5),
}
OPENING = ("open", "skip", "twice")
CLOSING = ("join", "drop")
ALIASING = ("open", "twice")  # their further outputs are computed from the first
CUTTING = (
    *("stop", "detached output", "constant", "embedding", "integers"),
    "function without input gradient",
)  # they let no gradient through; a segmented layer gets zeros, not None (see ops/segments.Communication)
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
        _hook(hook, module, partial(_count, counts, f"{name} {hook}"), kept)
    return module


def parametrized(module: nn.Module) -> bool:
    return any(hasattr(part, "parametrizations") or hasattr(part, "weight_orig") for part in module.modules())


def _count(counts: Counter[str], key: str, what: str = "") -> bool:
    counts[f"{key}{what}"] += 1
    return True


def _hook(kind: str, module: nn.Module, count: Callable[..., bool], kept: list[Tensor]) -> None:
    """Give the layer (`@layer`), its first linear layer or its first matrix a hook that counts calls and may change a value."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parameter = next((p for p in trained if p.ndim >= 2), trained[0] if trained else None)
    kind, _, place = kind.partition("@")
    inner = module if place else next((part for part in module.modules() if isinstance(part, nn.Linear)), module)

    def on_output(_: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output := _first(output), Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: count() and gradient * 0.5)

    def keep(_: nn.Module, inputs: Any, output: Any) -> None:
        """Keeps the layer's outputs, detached, until the end of the step."""
        if torch.is_grad_enabled():
            kept.append(hidden(_first(output).detach()))

    if kind == "tensor" and parameter is not None:
        parameter.register_hook(lambda gradient: count() and gradient * 0.5)
    elif kind == "post" and parameter is not None:
        parameter.register_post_accumulate_grad_hook(
            lambda p: count("" if p.grad is not None else " without a gradient") and None
        )
    elif kind == "backward":
        inner.register_full_backward_hook(lambda _, inputs, outputs: count() and _scaled(inputs, 0.5))
    elif kind == "backward_pre":
        inner.register_full_backward_pre_hook(lambda _, outputs: count() and _scaled(outputs, 0.5))
    elif kind == "forward":
        inner.register_forward_hook(lambda _, inputs, output: count() and _scaled((output,), 1.1)[0])
    elif kind == "forward_pre":
        inner.register_forward_pre_hook(lambda _, inputs: count() and (*_scaled(inputs[:1], 0.9), *inputs[1:]))
    elif kind in ("output", "keep"):
        module.register_forward_hook(on_output if kind == "output" else keep)


def _scaled(values: Any, factor: float) -> Any:
    """Values scaled, as a hook returns them; gradients of integers are None or zeros."""
    return tuple(
        v * factor if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) else v for v in values
    )


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


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
