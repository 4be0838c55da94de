"""A layer of a model as a factory with a name, built on the rank that holds it; its losses, and its context in a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ArgumentError
from pipeloom.limits import require_types


@dataclass(frozen=True)
class LossTerm:
    """A loss that a layer adds to the model's own, on whatever stage it is.

    Attributes:
        loss: `loss(value, targets)` of the layer's value and a micro-batch's targets: a mean over the targets, 0-dim.
        weight: factor of the term in the step's loss.
    """

    loss: Callable[[Any, Any], Tensor]
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_types(LossTerm, vars(self))
        if not math.isfinite(self.weight):
            raise ArgumentError("weight", f" of a LossTerm is {self.weight}; it must be finite")


@dataclass(frozen=True)
class Layer:
    """A layer that is built only on the rank that holds it.

    A layer that declares `writes` or `losses` returns them in a dict after its output for the next layer:
    `return x, {"skip": y}`, or the dict alone, and then the next layer gets None.

    Attributes:
        name: global name; parameters are called `name.parameter`.
        build: constructs the module.
        reads: tensors that earlier layers write, by name, which the forward takes as keyword arguments: names, or
            {keyword: name}. The latest earlier layer that writes a name is meant.
        writes: tensors for later layers: names, or {key in the dict: name}.
        losses: {key in the dict: LossTerm}; keys are unique in the whole model.
        spread: whether every rank of the pipeline has one, with its rows of a vocabulary's weight. Such layers are the last ones.
        cost: its share of the model's work, in any unit, such as its number of parameters or measured seconds. Where all layers
            have one, stages without given sizes are cut by it; 0: unknown. A module's own is its number of parameters
            without tables of embeddings.
    """

    name: str
    build: Callable[[], nn.Module]
    reads: Sequence[str] | Mapping[str, str] = field(default=(), hash=False)
    writes: Sequence[str] | Mapping[str, str] = field(default=(), hash=False)
    losses: Mapping[str, LossTerm] = field(default_factory=dict, hash=False)
    spread: bool = False
    cost: float = 0.0

    def __post_init__(self) -> None:
        require_types(Layer, vars(self))
        if isinstance(self.build, nn.Module):
            raise ArgumentError(
                "build", " is a module; give a function that makes it, or the module in place of the Layer"
            )

    def __call__(self) -> nn.Module:
        return self.build()


def attach_loss(x: Tensor, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `x` unchanged; when its gradient is computed, the gradient of `loss(*inputs)` is added to that of the inputs.

    So the loss belongs to the micro-batch that `x` belongs to, whatever else is in flight, and may depend on what is known only
    then. It is 0-dim, and scaled by its share of the step's loss: whatever scales the gradient of `x` does not scale it.
    """
    if not (torch.is_grad_enabled() and x.requires_grad and any(each.requires_grad for each in inputs)):
        return x
    return _AttachedLoss.apply(x, loss, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.loss = loss
        ctx.save_for_backward(*inputs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            value = ctx.loss(*leaves)
        return gradients[0], None, *torch.autograd.grad(value, leaves)


KEYWORD = "microbatch"


class SharesTokens:
    """A part of a layer that needs to know of ranks that share the tokens of sequences; mixed into a module.

    Attributes:
        context: these ranks, a `ContextParallel`; a `Pipeline` sets it to those of its mesh where it is None, and in a loop of
            your own `share_tokens` does. None: every rank has whole sequences.
    """

    context: Any = None


@dataclass(frozen=True)
class SlicePlace:
    """The place of one slice of a micro-batch's sequences.

    Attributes:
        index, count: the number of the slice, and of how many.
        start, end: the range of its tokens.
        length: the number of tokens of the whole sequences.
    """

    index: int
    count: int
    start: int
    end: int
    length: int


@dataclass(frozen=True)
class MicrobatchContext:
    """The context that the runtime passes to every layer whose forward has a keyword argument `microbatch`.

    It depends only on the step and the micro-batch, not on schedule, rank or recomputation. So the random numbers that a layer
    draws and the losses that it adds are the same in every schedule, and two micro-batches in flight never mix.

    Attributes:
        step: the step's number.
        index: the micro-batch's number, counted over all data-parallel replicas.
        share: its weight in the step's loss; the shares of a step sum to 1 over all replicas. 0 where none of its targets
            counts; None on a rank whose targets are on the meta device, so that nothing says how many of them count.
        first: the number of its first sample in the step's batch, over all data-parallel replicas.
        samples: its number of samples.
        place: the slice of its sequences that the layer gets; the share is then that of the slice. None: whole sequences.
    """

    step: int = 0
    index: int = 0
    share: float = 1.0
    first: int = 0
    samples: int = 1
    place: SlicePlace | None = None
