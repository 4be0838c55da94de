"""Tensor parallelism: linear layers cut by columns (outputs) or rows (inputs), with or without sequence parallelism.

A column layer followed by a row layer costs one all-reduce forward and one backward (Megatron-LM, arXiv 1909.08053, section
3). With sequence parallelism tokens between such pairs are spread over the ranks too: all-gather before the column layer,
reduce-scatter after the row layer (arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError
from pipeloom.ops.deferred import Desk, Ledger, add_weight_gradient, apply_linear, as_autocast
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.products import add_product, as_rows, linear, multiply
from pipeloom.parallel.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from pipeloom.parallel.laid import Laid, Shard
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.shared_sum import SharedSum, SharedSums


@dataclass(frozen=True)
class TensorParallel:
    """How layers are cut over the ranks of an axis.

    Attributes:
        axis: the tensor-parallel ranks, 2 or more.
        sequence: between the pairs each rank holds its part of the tokens, [batch, tokens / size, width].
        sums: how sums go through shared memory; None: as collectives.
    """

    axis: Axis
    sequence: bool = False
    sums: SharedSums | None = None

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def index(self) -> int:
        return self.axis.index

    def split(self, count: int, what: str) -> tuple[int, ...]:
        """`count` in equal parts, one a rank. Raises ConfigError, which calls it `what`, when they cannot be equal."""
        if count % self.size:
            valid = [n for n in range(1, count + 1) if count % n == 0]
            near = [n for n in valid if n < self.size][-1:] + [n for n in valid if n > self.size][:1]
            raise ConfigError(
                f"parallel.tp = {self.size}: it must divide {what} {count}; nearest: {' or '.join(map(str, near))}"
            )
        return (count // self.size,) * self.size

    def split_unevenly(self, count: int) -> tuple[int, ...]:
        """`count` in parts of count // size; the last one takes the remainder too."""
        base = count // self.size
        return (*(base,) * (self.size - 1), count - base * (self.size - 1))


def spread(tensor: TensorParallel | None) -> TensorParallel | None:
    """None for one rank: layers are plain then."""
    return tensor if tensor is not None and tensor.size > 1 else None


class ColumnLinear(nn.Module):
    """This rank's rows of a weight [outputs, inputs]: it computes its part of the outputs, for all tokens.

    [batch, tokens, inputs] -> [batch, tokens, own outputs]; with sequence parallelism [batch, tokens / size, inputs] goes in.
    Layers that have the same input are to be called together (`project`): one gather, one reduction.

    Args:
        parts: outputs of each rank.

    Its parameters start empty: fill them with parts of whole ones (`laid.part_of`).
    """

    def __init__(self, inputs: int, parts: Sequence[int], tensor: TensorParallel, *, bias: bool = False) -> None:
        super().__init__()
        self.tensor = tensor
        self.parts = tuple(parts)
        own = self.parts[tensor.index]
        self.weight = nn.Parameter(torch.empty(own, inputs))
        self.bias = nn.Parameter(torch.empty(own)) if bias else None
        self.desk: Desk | None = None

    def laid(self) -> Mapping[str, Laid]:
        laid = Laid((Shard("tp", 0, self.parts),))
        return {"weight": laid} if self.bias is None else {"weight": laid, "bias": laid}

    def defer_to(self, desk: Desk) -> None:
        self.desk = desk

    def forward(self, x: Tensor) -> Tensor:
        (out,) = _column(x, (self,))
        return out


class RowLinear(nn.Module):
    """This rank's columns of a weight [outputs, inputs]: from its part of the inputs, the sum over ranks of all outputs.

    [batch, tokens, own inputs] -> [batch, tokens, outputs]; with sequence parallelism [batch, tokens / size, outputs] comes
    out. Its parameters start empty. A deferred weight gradient holds the gradient of all tokens' outputs.
    """

    def __init__(self, parts: Sequence[int], outputs: int, tensor: TensorParallel, *, bias: bool = False) -> None:
        super().__init__()
        self.tensor = tensor
        self.parts = tuple(parts)
        self.weight = nn.Parameter(torch.empty(outputs, self.parts[tensor.index]))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.desk: Desk | None = None

    def laid(self) -> Mapping[str, Laid]:
        laid = {"weight": Laid((Shard("tp", 1, self.parts),))}
        # the bias is added to this rank's tokens only
        return laid if self.bias is None else laid | {"bias": Laid(partial=self.tensor.sequence)}

    def defer_to(self, desk: Desk) -> None:
        self.desk = desk

    def forward(self, x: Tensor) -> Tensor:
        out = sum_over_ranks(apply_linear(x, self.weight, None, self.desk), self.tensor)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Each layer's output for the same input. Column layers share the gather of x and the reduction of its gradient."""
    if all(isinstance(layer, ColumnLinear) for layer in linears):
        return _column(x, linears)  # type: ignore[arg-type]
    return tuple(layer(x) for layer in linears)


def column_linear(inputs: int, outputs: int, tensor: TensorParallel | None, what: str = "outputs") -> nn.Module:
    """A linear layer without bias, cut by columns; plain where `tensor` is None. `what` is the outputs' name in errors."""
    if tensor is None:
        return nn.Linear(inputs, outputs, bias=False)
    return ColumnLinear(inputs, tensor.split(outputs, what), tensor)


def row_linear(inputs: int, outputs: int, tensor: TensorParallel | None, what: str = "inputs") -> nn.Module:
    """A linear layer without bias, cut by rows; plain where `tensor` is None. `what` is the inputs' name in errors."""
    if tensor is None:
        return nn.Linear(inputs, outputs, bias=False)
    return RowLinear(tensor.split(inputs, what), outputs, tensor)


def sum_over_ranks(x: Tensor, tensor: TensorParallel) -> Tensor:
    """The sum over the ranks of their terms x [batch, tokens, width]; with sequence parallelism this rank's tokens of it.

    Without, x is written over: autograd refuses that for a term that another operation's backward needs.
    """
    if tensor.sequence:
        return _ReduceScatter.apply(x, tensor.axis)  # type: ignore[no-any-return, no-untyped-call]
    return _AllReduce.apply(x.contiguous(), tensor)  # type: ignore[no-any-return, no-untyped-call]


class _AllReduce(torch.autograd.Function):
    """Sum forward, in place; backward every rank's term has the gradient of the sum, which all ranks know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        return _start_sum(x, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return start_all_gather(gradients[0], ctx.axis).wait(), None


def _column(x: Tensor, linears: Sequence[ColumnLinear]) -> tuple[Tensor, ...]:
    weights = [layer.weight for layer in linears]
    biases = [layer.bias for layer in linears]
    desk = linears[0].desk
    call = _Call(linears[0].tensor, *((desk.ledger, desk.main) if desk is not None else (None, None)))
    return _Column.apply(x, call, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


class _Call(NamedTuple):
    """How column layers are called: over which ranks, where they owe weight gradients, and where those are added."""

    tensor: TensorParallel
    ledger: Ledger | None
    main: MainGradients | None


class _Column(torch.autograd.Function):
    """x -> x weight^T + bias for several weights. Keeps this rank's tokens of x only, and gathers them again for dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *parameters: Any) -> Any:
        count, tensor = len(parameters) // 2, call.tensor
        weights, biases = parameters[:count], parameters[count:]
        x = as_autocast(x)
        trains = any(ctx.needs_input_grad[2 : 2 + count])  # frozen weights need no input
        ctx.save_for_backward(x if trains else None, *weights)
        ctx.call, ctx.weights = call, weights
        whole = start_all_gather(x, tensor.axis).wait() if tensor.sequence else x
        return tuple(linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        tensor, ledger, main = ctx.call
        count = len(weights)
        wanted = [at for at in range(count) if ctx.needs_input_grad[2 + at]]
        fetch = partial(start_all_gather, x.detach(), tensor.axis) if tensor.sequence and wanted else None
        gathering = fetch() if fetch is not None and ledger is None else None
        reducing = _start_input_gradient(gradients, weights, tensor) if ctx.needs_input_grad[0] else None
        biases = [as_rows(g).sum(0) if ctx.needs_input_grad[2 + count + at] else None for at, g in enumerate(gradients)]
        products: list[Tensor | None] = [None] * count
        if wanted and ledger is not None:
            work = partial(_add, [(ctx.weights[at], gradients[at]) for at in wanted], main)
            ledger.owe(work if fetch is not None else partial(work, x.detach()), fetch)
        elif wanted:
            whole = gathering.wait() if gathering is not None else x
            for at in wanted:
                if main is not None and ctx.weights[at] in main:
                    add_weight_gradient(ctx.weights[at], whole, gradients[at], main)
                else:
                    products[at] = multiply(as_rows(gradients[at]).t(), as_rows(whole))
        return reducing.wait() if reducing is not None else None, None, *products, *biases


def _start_input_gradient(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], tensor: TensorParallel
) -> Pending | SharedSum:
    """The sum over layers of gradient · weight, and the start of its sum over the ranks."""
    rows = multiply(as_rows(gradients[0]), weights[0].to(gradients[0].dtype))
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        add_product(rows, as_rows(gradient), weight.to(gradient.dtype))
    dx = rows.view(*gradients[0].shape[:-1], -1)
    return start_reduce_scatter(dx, tensor.axis) if tensor.sequence else _start_sum(dx, tensor)


def _start_sum(x: Tensor, tensor: TensorParallel) -> Pending | SharedSum:
    """The sum over the ranks, written into `x`."""
    through = tensor.sums.start(x) if tensor.sums is not None else None
    return through if through is not None else start_all_reduce(x, tensor.axis)


def _add(owed: Sequence[tuple[nn.Parameter, Tensor]], main: MainGradients | None, x: Tensor) -> None:
    for weight, gradient in owed:
        add_weight_gradient(weight, x, gradient, main)
