"""Experts: stacked feed-forward networks, spread over the expert-parallel ranks, each cut over the tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.ops.deferred import Desk, apply_linear
from pipeloom.ops.grouped import apply_grouped_linear
from pipeloom.parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from pipeloom.parallel.laid import Laid, Shard
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.trip import ExpertParallel


class ExpertLinear(nn.Module):
    """One matrix of each of this rank's experts: weight [own experts, outputs, inputs].

    Args:
        experts: of all ranks.
        cut: the dimension that is cut over the tensor-parallel ranks: 1 outputs, 2 inputs.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        cut: int,
        parallel: ExpertParallel | None,
        tensor: TensorParallel | None,
    ) -> None:
        super().__init__()
        shards, shape = [], [experts, outputs, inputs]
        if parallel is not None and parallel.size > 1:
            shards.append(Shard("ep", 0, parallel.own(experts)))
            shape[0] = shards[-1].sizes[parallel.axis.index]
        if tensor is not None:
            shards.append(Shard("tp", cut, tensor.split(shape[cut], "model.moe_intermediate_size")))
            shape[cut] = shards[-1].sizes[tensor.index]
        self._laid = Laid(tuple(shards))
        self.weight = nn.Parameter(torch.empty(shape))
        self.desk: Desk | None = None

    def laid(self) -> Mapping[str, Laid]:
        return {"weight": self._laid}

    def defer_to(self, desk: Desk) -> None:
        self.desk = desk

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return apply_grouped_linear(rows, self.weight, counts, self.desk)


class Experts(nn.Module):
    """SwiGLU networks, down(silu(gate x) · up x): rows by expert in, rows in the same order out.

    Under tensor parallelism each rank has its part of the inner width, and puts out its term of the sum.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        inner: int,
        parallel: ExpertParallel | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(experts, hidden, inner, 1, parallel, tensor)
        self.up_proj = ExpertLinear(experts, hidden, inner, 1, parallel, tensor)
        self.down_proj = ExpertLinear(experts, inner, hidden, 2, parallel, tensor)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [rows, hidden], `counts` of them for each of this rank's experts -> [rows, hidden]."""
        inner = F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)
        out: Tensor = self.down_proj(inner, counts)
        return out


class TermLinear(nn.Module):
    """A linear layer of which each tensor-parallel rank computes a term; entering and summing up are the caller's.

    Args:
        cut: the dimension of the weight [outputs, inputs] that is cut; None: every rank has all of it, and its gradient is
            that of its own terms only.
    """

    def __init__(self, inputs: int, outputs: int, cut: int | None, tensor: TensorParallel | None) -> None:
        super().__init__()
        shape, self._laid = [outputs, inputs], Laid(partial=tensor is not None)
        if tensor is not None and cut is not None:
            sizes = tensor.split(shape[cut], "the shared experts' width")
            shape[cut], self._laid = sizes[tensor.index], Laid((Shard("tp", cut, sizes),))
        self.weight = nn.Parameter(torch.empty(shape))
        self.desk: Desk | None = None

    def laid(self) -> Mapping[str, Laid]:
        return {"weight": self._laid}

    def defer_to(self, desk: Desk) -> None:
        self.desk = desk

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.weight, None, self.desk)


def enter(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    """[batch, tokens, width] for layers of which each tensor-parallel rank computes a term: all tokens, on every rank.

    The gradient is the sum of the ranks' own; with sequence parallelism this rank's tokens of it. The counterpart of
    `sum_over_ranks`.
    """
    return x if tensor is None else _Enter.apply(x, tensor)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return start_all_gather(x, tensor.axis).wait() if tensor.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensor: TensorParallel = ctx.tensor
        if tensor.sequence:
            return start_reduce_scatter(gradients[0], tensor.axis).wait(), None
        # reduced in place, and another function may hold the gradient that came
        return start_all_reduce(gradients[0].clone(memory_format=torch.contiguous_format), tensor.axis).wait(), None
