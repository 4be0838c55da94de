"""Low-rank adapters (LoRA, arXiv 2106.09685) for linear layers, whole or sharded over tensor-parallel ranks.

y = base(x) + s · B A x, with A [r, inputs] and B [outputs, r]. Only tensors of width r, the rank of the adapter, are
communicated between tensor-parallel ranks, so an adapter adds little communication to that of its layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ArgumentError
from pipeloom.ops.deferred import DeferringLayer, WeightGradContext, apply_linear, defer_weight_gradients
from pipeloom.parallel.expert import PartialSumLinear
from pipeloom.parallel.sharding import WHOLE, HasSharding, ParameterSharding, Shard, shard_of
from pipeloom.parallel.tensor import Adapted, ColumnLinear, RowLinear, TensorParallel, enter, project, sum_over_ranks


class LowRankFactor(DeferringLayer):
    """One of the two matrices of an adapter: a weight [outputs, inputs] without a bias, or this rank's part of it."""

    def __init__(self, whole: Tensor, sharding: ParameterSharding, tensor: TensorParallel | None) -> None:
        super().__init__()
        part = shard_of(whole, sharding, {"tp": 0 if tensor is None else tensor.index})
        self.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
        self._sharding = sharding

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": self._sharding}

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.weight, None, self.grad_context)


class AdaptedLinear(Adapted):
    """A linear layer and its adapter. The parameters of the layer keep their names and are frozen.

    Args:
        base: the layer, from torch, from `transformers`, or sharded over tensor-parallel ranks.
        down: the unsharded A, [r, inputs].
        up: the unsharded B, [outputs, r].
        scale: the factor s.
        dropout: probability of zeroing an input of A in training; must be 0 if the layer is sharded over tensor-parallel ranks.

    Raises ArgumentError for dropout on a sharded layer: each rank would draw a different mask for the same input.
    """

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        # `base` is not registered as a submodule, so its parameters keep their names. Both modules share one table of
        # parameters, so a weight that is tied later changes in both.
        self.__dict__.update(base=base, _parameters=base._parameters, _buffers=base._buffers)
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.scale = scale
        self.tensor, sharding_down, sharding_up = _shardings(base)
        if dropout and self.tensor is not None:
            raise ArgumentError(
                "dropout", f"={dropout:g} on a layer that is cut over tensor-parallel ranks; nearest: 0"
            )
        self.lora_A = LowRankFactor(down, sharding_down, self.tensor)
        self.lora_B = LowRankFactor(up, sharding_up, self.tensor)
        self.dropout = nn.Dropout(dropout)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return self.base.sharding() if isinstance(self.base, HasSharding) else {}

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        defer_weight_gradients(
            self.base, grad_context
        )  # its matrix products use the context; a frozen weight has no gradient to defer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, ColumnLinear):
            (whole,) = project(x, self)
            return whole
        return self.add(x, self.base(x))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Return `out`, the output of the base layer for x, plus the output of the adapter."""
        if isinstance(self.base, RowLinear):
            x = self.base.own_inputs(x)
        low: Tensor = self.lora_A(self.dropout(x))
        if isinstance(self.base, ColumnLinear):
            low = enter(low, self.tensor)
        elif isinstance(self.base, RowLinear):
            low = sum_over_ranks(low, self.base.tensor)
        added: Tensor = self.lora_B(low * self.scale)
        return out + added


def _shardings(base: nn.Module) -> tuple[TensorParallel | None, ParameterSharding, ParameterSharding]:
    """Return (the tensor-parallel ranks that `base` is sharded over or None, the sharding of A, the sharding of B)."""
    if isinstance(base, ColumnLinear):
        # A receives only this rank's tokens under sequence parallelism; `enter` gives it the gradient of all outputs
        down = ParameterSharding(partial=base.tensor.sequence)
        return base.tensor, down, ParameterSharding((base.shard,))
    if isinstance(base, RowLinear):
        up = ParameterSharding(partial=base.tensor.sequence)
        return base.tensor, ParameterSharding((Shard("tp", 1, base.parts),)), up
    if isinstance(base, PartialSumLinear) and base.tensor is not None:
        term = ParameterSharding(
            partial=True
        )  # the caller enters and sums over tp, so each rank's gradient is one term of a sum
        sizes = base.sharding()["weight"].over("tp")
        cut = None if sizes is None else ParameterSharding((Shard("tp", sizes.dim, sizes.sizes),))
        down = cut if cut is not None and base.cut == 1 else term
        return base.tensor, down, cut if cut is not None and base.cut == 0 else term
    return None, WHOLE, WHOLE
