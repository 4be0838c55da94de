"""Experts: stacked feed-forward networks, spread over the expert-parallel ranks, each cut over the tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.ops.deferred import DeferringLayer, apply_linear
from pipeloom.ops.grouped import apply_grouped_linear
from pipeloom.ops.parts import in_part
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.sharding import ParameterSharding, Shard, shard_of
from pipeloom.parallel.tensor import TensorParallel


class ExpertLinear(DeferringLayer):
    """One linear layer of each of this rank's experts: weight [own experts, outputs, inputs], bias [own experts, outputs].

    The first values are those of `nn.Linear`, the same for a seed however many ranks the experts are spread over.

    Args:
        experts: number of experts over all ranks.
        cut: the dimension that is cut over the tensor-parallel ranks: 1 outputs, 2 inputs.
        bias: whether there is one. Where the inputs are cut, each rank returns a term, and the first rank's has the bias.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        cut: int = 1,
        parallel: ExpertParallel | None = None,
        tensor: TensorParallel | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        shards, shape = [], [experts, outputs, inputs]
        if parallel is not None and parallel.size > 1:
            shards.append(Shard("ep", 0, parallel.own(experts)))
            shape[0] = shards[-1].sizes[parallel.axis.index]
        if tensor is not None:
            shards.append(Shard("tp", cut, tensor.split(shape[cut], "columns inside an expert")))
            shape[cut] = shards[-1].sizes[tensor.index]
        self._laid = ParameterSharding(tuple(shards))
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:2])) if bias else None
        term = tensor is not None and cut == 2
        self._bias_laid = ParameterSharding(tuple(shard for shard in shards if shard.dim < 2), partial=term)
        self._adds_bias = not term or tensor is None or tensor.index == 0
        if not self.weight.is_meta:
            index = {"ep": 0 if parallel is None else parallel.axis.index, "tp": 0 if tensor is None else tensor.index}
            self._draw("weight", (experts, outputs, inputs), inputs**-0.5, index)
            if bias:
                self._draw("bias", (experts, outputs), inputs**-0.5, index)

    @torch.no_grad()
    def _draw(self, name: str, whole: tuple[int, ...], bound: float, index: Mapping[str, int]) -> None:
        """Draw the experts of all ranks, one at a time, and keep this rank's part."""
        parameter, shards = self.get_parameter(name), self.sharding()[name].shards
        rows = ParameterSharding(tuple(shard for shard in shards if shard.axis == "ep"))
        inner = ParameterSharding(tuple(shard for shard in shards if shard.axis == "tp"))
        held = shard_of(torch.arange(whole[0]), rows, index).tolist()
        for expert in range(whole[0]):
            drawn = torch.empty(1, *whole[1:]).uniform_(-bound, bound)
            if expert in held:
                parameter[held.index(expert)].copy_(shard_of(drawn, inner, index)[0])

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": self._laid} | ({} if self.bias is None else {"bias": self._bias_laid})

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        out = apply_grouped_linear(rows, self.weight, counts, self.grad_context)
        if self.bias is None:
            return out
        # Elsewhere zeros of it, so that it has a gradient, a term of the sum over the ranks.
        bias = self.bias if self._adds_bias else self.bias * 0
        ones = rows.new_ones(rows.shape[0], 1)
        return out + apply_grouped_linear(ones, bias.unsqueeze(-1), counts)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Experts(nn.Module):
    """SwiGLU networks, down(silu(gate x) · up x): rows by expert in, rows in the same order out.

    Under tensor parallelism each rank holds a part of the inner width, and returns its term of the sum.
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
        inner = in_part("activation", _gated, self.gate_proj(rows, counts), self.up_proj(rows, counts))
        out: Tensor = self.down_proj(inner, counts)
        return out


class PartialSumLinear(DeferringLayer):
    """A linear layer of which each tensor-parallel rank computes one term; the caller distributes the input and sums the terms.

    Args:
        cut: the dimension of the weight [outputs, inputs] that is cut; None: every rank has all of it, and its gradient is
            that of its own terms only.
    """

    def __init__(self, inputs: int, outputs: int, cut: int | None, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.tensor, self.cut = tensor, cut
        shape, self._laid = [outputs, inputs], ParameterSharding(partial=tensor is not None)
        if tensor is not None and cut is not None:
            sizes = tensor.split(shape[cut], "columns inside the shared experts")
            shape[cut], self._laid = sizes[tensor.index], ParameterSharding((Shard("tp", cut, sizes),))
        self.weight = nn.Parameter(torch.empty(shape))

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": self._laid}

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.weight, None, self.grad_context)
