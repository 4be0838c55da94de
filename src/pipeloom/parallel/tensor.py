"""Tensor parallelism: linear layers sharded by columns (outputs) or rows (inputs), with or without sequence parallelism.

A column layer followed by a row layer costs one all-reduce in the forward and one in the backward (Megatron-LM,
arXiv 1909.08053, section 3). Sequence parallelism also shards the tokens between such pairs: an all-gather precedes the column
layer, and a reduce-scatter follows the row layer (arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeloom.errors import ArgumentError
from pipeloom.limits import require_divides
from pipeloom.ops.deferred import (
    DeferringLayer,
    WeightGradContext,
    WeightGradQueue,
    add_weight_gradient,
    apply_linear,
    as_autocast,
)
from pipeloom.ops.linear_map import with_adjoint
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.products import addmm, adjoint, as_rows, linear, matmul, not_a_view
from pipeloom.parallel.collectives import (
    PendingCollective,
    start_all_gather,
    start_all_reduce,
    start_columns_for_tokens,
    start_gather_columns,
    start_reduce_scatter,
    start_tokens_for_columns,
)
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import ParameterSharding, Shard, join, shard_of
from pipeloom.parallel.shared_memory_sum import SharedMemoryAllReduce


@dataclass(frozen=True)
class TensorParallel:
    """Distribution of layers over the ranks of an axis.

    Attributes:
        axis: the tensor-parallel ranks, 2 or more.
        sequence: whether sequence parallelism shards the tokens between layer pairs: [batch, tokens / size, width] per rank.
        sums: all-reduce through shared memory; None uses collectives.
    """

    axis: Axis
    sequence: bool = False
    sums: SharedMemoryAllReduce | None = None

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def index(self) -> int:
        return self.axis.index

    def split(self, count: int, what: str) -> tuple[int, ...]:
        """Return `count` of `what` ("heads") in equal parts, one per rank. Raises ArgumentError if `size` does not divide it."""
        require_divides("tp", self.size, count, f"{count} {what}")
        return (count // self.size,) * self.size


def if_parallel(tensor: TensorParallel | None) -> TensorParallel | None:
    """Return `tensor`, or None if it has only one rank, so that layers are built unsharded."""
    return tensor if tensor is not None and tensor.size > 1 else None


class ColumnLinear(DeferringLayer):
    """Linear layer that holds this rank's rows of a weight [outputs, inputs] and computes these outputs for all tokens.

    [batch, tokens, inputs] -> [batch, tokens, local outputs]; with sequence parallelism the input is
    [batch, tokens / size, inputs]. Call layers with the same input together (`project`) to share one gather and one reduction.

    Args:
        inputs: input features.
        parts: output features of each rank.
        tensor: the tensor-parallel ranks.
        bias: whether the layer adds a bias.
        fused: output features of each projection concatenated in the weight (queries, keys and values). A rank holds its part
            of each projection, in the same order (`split_projections`). Empty means a single projection.
        gather_output: whether every rank returns all outputs, as one process would: [batch, tokens, outputs], or
            [batch, tokens / size, outputs] with sequence parallelism.

    The parameters are uninitialized: fill them with shards of the full parameters (`sharding.shard_of`).
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[int],
        tensor: TensorParallel,
        *,
        bias: bool = False,
        fused: Sequence[int] = (),
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.parts = tuple(parts)
        self.shard = Shard("tp", 0, self.parts, tuple(fused))
        self.gather_output = gather_output
        outputs_here = self.parts[tensor.index]
        self.weight = nn.Parameter(torch.empty(outputs_here, inputs))
        self.bias = nn.Parameter(torch.empty(outputs_here)) if bias else None

    def sharding(self) -> Mapping[str, ParameterSharding]:
        sharding = ParameterSharding((self.shard,))
        return {"weight": sharding} if self.bias is None else {"weight": sharding, "bias": sharding}

    def forward(self, x: Tensor) -> Tensor:
        (out,) = project(x, self)
        return out

    def finish(self, out: Tensor) -> Tensor:
        """Return the output of the layer from its local outputs: gathered if `gather_output` is set."""
        return gather_columns(out, self.tensor, self.shard) if self.gather_output else out


class RowLinear(DeferringLayer):
    """Linear layer that holds this rank's columns of a weight [outputs, inputs] and sums the outputs over the ranks.

    [batch, tokens, local inputs] -> [batch, tokens, outputs]; with sequence parallelism the output is
    [batch, tokens / size, outputs]. The parameters are uninitialized. A deferred weight gradient keeps the gradient of the
    outputs of all tokens alive.

    Args:
        parts: input features of each rank.
        outputs: output features.
        tensor: the tensor-parallel ranks.
        bias: whether the layer adds a bias.
        input_is_parallel: whether the input holds only the local features. If False, every rank passes all of them, as to an
            unsharded layer: [batch, tokens, inputs], or [batch, tokens / size, inputs] with sequence parallelism.
    """

    def __init__(
        self,
        parts: Sequence[int],
        outputs: int,
        tensor: TensorParallel,
        *,
        bias: bool = False,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.parts = tuple(parts)
        self.input_is_parallel = input_is_parallel
        self.weight = nn.Parameter(torch.empty(outputs, self.parts[tensor.index]))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def sharding(self) -> Mapping[str, ParameterSharding]:
        sharding = {"weight": ParameterSharding((Shard("tp", 1, self.parts),))}
        # the bias is added to this rank's tokens only
        return sharding if self.bias is None else sharding | {"bias": ParameterSharding(partial=self.tensor.sequence)}

    def own_inputs(self, x: Tensor) -> Tensor:
        """Return the input of the matrix product: the local input features of all tokens."""
        return x if self.input_is_parallel else own_columns(x, self.tensor, Shard("tp", 1, self.parts))

    def forward(self, x: Tensor) -> Tensor:
        columns = self.own_inputs(x)
        out = sum_over_ranks(apply_linear(columns, self.weight, None, self.grad_context), self.tensor)
        # After the sum, to which every rank would otherwise add the bias.
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Adapted(nn.Module, ABC):
    """A layer that adds a term to the output of another layer, its base.

    This is a class, not a protocol, because `project` checks for it in every forward, and a protocol check takes 20 µs.
    """

    base: nn.Module

    @abstractmethod
    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Return `out`, the output of the base for x, plus the term of this layer; for a column layer, before the gather."""


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Return each layer's output for the same input. Column layers share the gather of x and the reduction of its gradient."""
    bases = [layer.base if isinstance(layer, Adapted) else layer for layer in linears]
    if not all(isinstance(base, ColumnLinear) for base in bases):
        return tuple(layer(x) for layer in linears)
    columns = [base for base in bases if isinstance(base, ColumnLinear)]
    return tuple(
        base.finish(layer.add(x, out) if isinstance(layer, Adapted) else out)
        for layer, base, out in zip(linears, columns, _column(x, columns), strict=True)
    )


def split_projections(out: Tensor, outputs: Sequence[int]) -> tuple[Tensor, ...]:
    """Split the output of a fused layer, sharded or not, into its projections; `outputs` are the unsharded sizes of each."""
    width = out.shape[-1]
    return torch.split(out, [size * width // sum(outputs) for size in outputs], -1)


def column_linear(
    inputs: int,
    outputs: int,
    tensor: TensorParallel | None,
    what: str = "outputs",
    *,
    bias: bool = False,
    gather_output: bool = False,
) -> nn.Module:
    """Return a linear layer sharded by columns, or `nn.Linear` if `tensor` is None. `what` names the outputs in errors."""
    if tensor is None:
        return nn.Linear(inputs, outputs, bias=bias)
    return ColumnLinear(inputs, tensor.split(outputs, what), tensor, bias=bias, gather_output=gather_output)


def fused_column_linear(
    inputs: int,
    outputs: Sequence[int],
    tensor: TensorParallel | None,
    what: str = "outputs",
    *,
    unit: int = 1,
    bias: bool = False,
    gather_output: bool = False,
) -> nn.Module:
    """Return several projections of one input as one layer with weight [sum of outputs, inputs], sharded by columns.

    Each rank returns its part of every projection, in order; `split_projections` separates them. The full weight therefore
    has the same order (queries, keys, values, or gate, up) in every layout. If `tensor` is None, the layer is an `nn.Linear`.

    Args:
        outputs: outputs of each projection, such as heads · width for queries and key-value heads · width for keys and values.
        what: name of the units in errors ("heads").
        unit: number of outputs that stay on one rank, such as the width of a head.

    Raises ArgumentError if the ranks do not divide a projection's units, or the unit does not divide its outputs.
    """
    for at, size in enumerate(outputs):
        if size < 1 or size % unit:
            raise ArgumentError("outputs", f"={list(outputs)}: projection {at} is no whole number of units of {unit}")
    if tensor is None:
        return nn.Linear(inputs, sum(outputs), bias=bias)
    for at, size in enumerate(outputs):
        tensor.split(size // unit, f"{what} of projection {at}")
    parts = (sum(outputs) // tensor.size,) * tensor.size
    return ColumnLinear(inputs, parts, tensor, bias=bias, fused=outputs, gather_output=gather_output)


def row_linear(
    inputs: int,
    outputs: int,
    tensor: TensorParallel | None,
    what: str = "inputs",
    *,
    bias: bool = False,
    input_is_parallel: bool = True,
) -> nn.Module:
    """Return a linear layer sharded by rows, or `nn.Linear` if `tensor` is None. `what` names the inputs in errors."""
    if tensor is None:
        return nn.Linear(inputs, outputs, bias=bias)
    parts = tensor.split(inputs, what)
    return RowLinear(parts, outputs, tensor, bias=bias, input_is_parallel=input_is_parallel)


def sum_over_ranks(x: Tensor, tensor: TensorParallel) -> Tensor:
    """Return the sum of x [batch, tokens, width] over the ranks; with sequence parallelism, only this rank's tokens of it.

    Without sequence parallelism x is overwritten, so autograd raises an error if another operation's backward needs it.
    """
    if tensor.sequence:
        return with_adjoint(
            x, lambda x: start_reduce_scatter(x, tensor.axis).wait(), lambda gradient: enter(gradient, tensor)
        )
    return _AllReduce.apply(x.contiguous(), tensor)  # type: ignore[no-any-return, no-untyped-call]


def enter(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return the input [batch, tokens, width] for layers whose output is a sum over ranks: all tokens, on every rank.

    Its gradient is summed over the ranks; with sequence parallelism, each rank receives that of its tokens. `enter` and
    `sum_over_ranks` are each other's backward.
    """
    if tensor is None:
        return x
    if tensor.sequence:
        return with_adjoint(x, partial(_gathered, tensor), lambda gradient: sum_over_ranks(gradient, tensor))
    # The sum is in place, and another function may hold the incoming gradient.
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    return with_adjoint(x, lambda x: x.view_as(x), lambda gradient: sum_over_ranks(copied(gradient), tensor))


def gather_tokens(x: Tensor, tensor: TensorParallel) -> Tensor:
    """Gather [batch, tokens / size, width] to [batch, tokens, width] on every rank; the whole gradient is there on each."""
    return with_adjoint(x, partial(_gathered, tensor), partial(_own, tensor))


def own_tokens(x: Tensor, tensor: TensorParallel) -> Tensor:
    """Return this rank's part [batch, tokens / size, width] of x [batch, tokens, width]; the whole gradient is there on each."""
    return with_adjoint(x, partial(_own, tensor), partial(_gathered, tensor))


def _gathered(tensor: TensorParallel, x: Tensor) -> Tensor:
    return start_all_gather(x, tensor.axis).wait()


def _own(tensor: TensorParallel, x: Tensor) -> Tensor:
    return x.chunk(tensor.size, -2)[tensor.index]


def gather_columns(x: Tensor, tensor: TensorParallel, shard: Shard) -> Tensor:
    """Gather [batch, tokens, local columns] to [batch, tokens, columns] on every rank.

    With sequence parallelism each rank receives only its tokens. Otherwise every rank must compute the same from the result,
    so that the incoming gradients are equal. `gather_columns` and `own_columns` are each other's backward, to any order.
    """

    def gathered(x: Tensor) -> Tensor:
        start = start_tokens_for_columns if tensor.sequence else start_gather_columns
        parts = start(x, tensor.axis, shard.sizes).wait()
        return join({(at,): part for at, part in enumerate(parts)}, _over_columns(shard))

    return with_adjoint(x, gathered, lambda gradient: own_columns(gradient, tensor, shard))


def own_columns(x: Tensor, tensor: TensorParallel, shard: Shard) -> Tensor:
    """Return this rank's columns [batch, tokens, local columns] of x [batch, tokens, columns], which is equal on all ranks.

    With sequence parallelism x is [batch, tokens / size, columns], this rank's tokens.
    """

    def own(x: Tensor) -> Tensor:
        if not tensor.sequence:  # a copy, so that the other columns are freed
            return _columns_of(x, tensor.index, shard).clone(memory_format=torch.contiguous_format)
        parts = [_columns_of(x, at, shard) for at in range(tensor.size)]
        return torch.cat(start_columns_for_tokens(parts, tensor.axis).wait(), -2)

    return with_adjoint(x, own, lambda gradient: gather_columns(gradient, tensor, shard))


def _over_columns(shard: Shard) -> ParameterSharding:
    return ParameterSharding((replace(shard, dim=-1),))


def _columns_of(x: Tensor, index: int, shard: Shard) -> Tensor:
    return shard_of(x, _over_columns(shard), {shard.axis: index})


class _AllReduce(torch.autograd.Function):
    """All-reduce in place. Every rank already holds the gradient of the sum, so the backward communicates nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        ctx.mark_dirty(x)  # in place: a second tensor of this size would be a large part of a layer's activations
        return _start_sum(x, tensor).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _column(x: Tensor, linears: Sequence[ColumnLinear]) -> tuple[Tensor, ...]:
    weights = [layer.weight for layer in linears]
    biases = [layer.bias for layer in linears]
    call = linears[0].tensor, linears[0].grad_context
    return _Column.apply(as_autocast(x), call, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


class _Column(torch.autograd.Function):
    """Compute x weight^T + bias for several weights. Save only this rank's tokens of x, and gather them again for dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[TensorParallel, WeightGradContext | None], *parameters: Any) -> Any:
        count, (tensor, grad_context) = len(parameters) // 2, call
        weights, biases = parameters[:count], parameters[count:]
        trains = any(ctx.needs_input_grad[2 : 2 + count])  # frozen weights need no input
        ctx.save_for_backward(x if trains else None, *weights)
        ctx.call, ctx.weights = call, weights
        ctx.queue = None if grad_context is None else grad_context.queue
        whole = start_all_gather(x, tensor.axis).wait() if tensor.sequence else x
        return tuple(not_a_view(linear(whole, weight, bias)) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        tensor, grad_context = ctx.call
        count = len(weights)
        needs_x, _, *needs = ctx.needs_input_grad
        wanted = [at for at in range(count) if needs[at]]
        queue: WeightGradQueue | None = ctx.queue
        deferred = [at for at in wanted if grad_context is not None and grad_context.writes_now(ctx.weights[at], queue)]
        main = None if grad_context is None else grad_context.main
        products: list[Tensor | None] = [None] * count
        # All tokens of x are gathered again. If W computes every product, it fetches them then, and they are not kept until W;
        # otherwise the gather runs beside the input gradient's product, and the reduction of that beside the weights' products.
        fetch = partial(start_all_gather, x.detach(), tensor.axis) if tensor.sequence and wanted else None
        late = queue is not None and deferred == wanted
        gathering = fetch() if fetch is not None and not late else None
        reducing = start_input_gradient(gradients, weights, tensor) if needs_x else None
        # never deferred: a sum is small beside a product
        biases = [as_rows(g).sum(0) if need else None for g, need in zip(gradients, needs[count:], strict=True)]
        if queue is not None and deferred:
            work = partial(_add, [(ctx.weights[at], gradients[at]) for at in deferred], main)
            queue.put(work if fetch is not None else partial(work, x.detach()), fetch, reads=(x, *gradients))
        if wanted and not late:
            whole = gathering.wait() if gathering is not None else x
            for at in wanted:
                if at not in deferred:
                    products[at] = matmul(as_rows(gradients[at]).t(), adjoint(as_rows(whole)))
                elif queue is None:
                    add_weight_gradient(ctx.weights[at], whole, gradients[at], main)
        return reducing.wait() if reducing is not None else None, None, *products, *biases


def start_input_gradient(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], tensor: TensorParallel
) -> PendingCollective[Tensor]:
    """Start summing the input gradient, the sum over layers of gradient · weight, over the ranks."""
    rows = matmul(as_rows(gradients[0]), adjoint(weights[0].to(gradients[0].dtype)))
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        addmm(rows, as_rows(gradient), adjoint(weight.to(gradient.dtype)))
    dx = rows.view(*gradients[0].shape[:-1], -1)
    return start_reduce_scatter(dx, tensor.axis) if tensor.sequence else _start_sum(dx, tensor)


def _start_sum(x: Tensor, tensor: TensorParallel) -> PendingCollective[Tensor]:
    """Start summing `x` over the ranks in place, through shared memory if possible."""
    through = tensor.sums.start(x) if tensor.sums is not None else None
    return through if through is not None else start_all_reduce(x, tensor.axis)


def _add(owed: Sequence[tuple[nn.Parameter, Tensor]], main: MainGradients | None, x: Tensor) -> None:
    for weight, gradient in owed:
        add_weight_gradient(weight, x, gradient, main)
