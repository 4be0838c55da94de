"""Muon over matrices that are spread over ranks.

The step of a matrix is its averaged gradient with all singular values brought near 1 (Keller Jordan, "Muon: an optimizer for
hidden layers", 2024; arXiv 2502.16982; the arithmetic of torch.optim.Muon). That needs the whole matrix: slices of replicas
(ZeRO-1) and parts of tensor-parallel ranks are gathered first, and each rank keeps its own part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.config.sections import ModelSection
from pipeloom.errors import UsageError
from pipeloom.parallel.buckets import Bucket
from pipeloom.parallel.collectives import start_all_gather, start_gather_slices
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.masters import Master
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import WHOLE, ParameterSharding, join, shard_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7

_QKV = ("c_attn", "qkv_proj", "Wqkv")  # queries, keys, values one after the other: GPT-2, Phi-3, MPT
_QKV_BY_HEAD = (
    "query_key_value",
)  # queries, keys and values of each key-value head side by side: GPT-NeoX, BLOOM, Falcon
_GATE_UP = ("gate_up_proj",)


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U S V^T of a matrix U Σ V^T, with S near 1: five quintic Newton-Schulz iterations, computed in `dtype`."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=_SMALLEST_NORM))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def scale_of(shape: Sequence[int], rule: str) -> float:
    """Return the factor of the learning rate for a matrix of `shape`; `rule` is torch.optim.Muon's `adjust_lr_fn`."""
    if rule == "original":
        return math.sqrt(max(1.0, shape[0] / shape[1]))
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True)
class Fused:
    """Matrices that one weight fuses: the indices along `dim` of each."""

    dim: int
    indices: tuple[Tensor, ...]


def fused_in(name: str, shape: tuple[int, ...], model: ModelSection | None) -> Fused | None:
    """Return the projections fused in a foreign model's weight, from its name and the model's sizes; None: it is one matrix.

    The name of the weight and the sizes of the model decide. Pipeloom's own decoder (`model` is None) has one weight for each
    projection.
    """
    words = name.split(".")
    if model is None or len(shape) < 2:
        return None
    # a weight is [outputs, inputs], except GPT-2's and stacked experts that are stored transposed
    outputs = len(shape) - 2 if shape[-1] == model.hidden_size else len(shape) - 1
    if "c_attn" in words:
        outputs = len(shape) - 1
    count = shape[outputs]
    rows = torch.arange(count)
    if any(word in _GATE_UP for word in words) and count % 2 == 0:
        return Fused(outputs, (rows[: count // 2], rows[count // 2 :]))
    keys = model.num_key_value_heads
    heads = model.num_attention_heads + 2 * keys
    if count % heads:
        return None
    width = count // heads
    if any(word in _QKV for word in words):
        return Fused(outputs, torch.split(rows, [model.num_attention_heads * width, keys * width, keys * width]))
    if any(word in _QKV_BY_HEAD for word in words):
        by_head = rows.view(keys, heads // keys, width)
        return Fused(outputs, tuple(part.flatten() for part in (by_head[:, :-2], by_head[:, -2], by_head[:, -1])))
    return None


def direction_of(update: Tensor, fused: Fused | None, rule: str, dtype: torch.dtype) -> Tensor:
    """Return the scaled step of a whole weight, computed separately for each matrix in it.

    Args:
        update: [..., a, b]; leading dimensions stack matrices (experts).
        fused: which projections the weight fuses.
    """
    if fused is not None:
        whole = torch.empty_like(update)
        for indices in fused.indices:
            rows = indices.to(update.device)
            part = update.index_select(fused.dim, rows)
            whole.index_copy_(fused.dim, rows, direction_of(part, None, rule, dtype))
        return whole
    if update.ndim > 2:
        return torch.stack([direction_of(each, None, rule, dtype) for each in update])
    return orthogonalized(update, dtype).to(update.dtype) * scale_of(update.shape, rule)


@dataclass(frozen=True)
class MuonWeight:
    """A weight that Muon steps.

    Attributes:
        name: global name.
        shape: shape of the part that this process holds.
        layout: how the whole weight is sharded.
        fused: the projections that the whole weight fuses; None where it is a single matrix.
        dtype: the dtype in which its step is computed.
    """

    name: str
    shape: torch.Size
    layout: ParameterSharding = WHOLE
    fused: Fused | None = None
    dtype: torch.dtype = torch.float32


class Muon(torch.optim.Optimizer):
    """Muon over masters, each of which holds elements of a single weight.

    It gathers the updates of this process's weights, and keeps this process's parts of their steps.

    Args:
        groups: torch's parameter groups.
        matrices: global name -> weight.
        masters: all masters.
        sync: the reduction of their gradients; None where this process holds everything.
        rule: scaling rule, as for `scale_of`.

    Raises UsageError for a weight whose tensor-parallel parts differ in size.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Mapping[str, MuonWeight],
        masters: Sequence[Master],
        sync: GradientSync | None,
        *,
        rule: str,
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})
        self._matrices, self._masters, self._sync, self._rule = matrices, masters, sync, rule
        for name, matrix in matrices.items():
            over = matrix.layout.over("tp")
            if over is not None and len(set(over.sizes)) > 1:
                raise UsageError(f"Muon needs {name} in equal parts on all tensor-parallel ranks, not {over.sizes}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step; collective over the ranks that share a weight."""
        master_of = {master.tensor: master for master in self._masters}
        updates: dict[str, tuple[Master, Tensor]] = {}
        steps = [
            (group, tensor, tensor.grad)
            for group in self.param_groups
            for tensor in group["params"]
            if tensor.grad is not None
        ]
        for group, tensor, gradient in steps:
            state, momentum = self.state[tensor], group["momentum"]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(tensor)
            average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = gradient.lerp(average, momentum) if group["nesterov"] else average
            updates[master_of[tensor].name] = (master_of[tensor], update.reshape(-1))
        directions = self._directions(updates)
        for group, tensor, _ in steps:
            tensor.mul_(1 - group["lr"] * group["weight_decay"])
            tensor.add_(directions[master_of[tensor].name].view(tensor.shape), alpha=-group["lr"])

    def _directions(self, updates: Mapping[str, tuple[Master, Tensor]]) -> dict[str, Tensor]:
        """Return name -> the flat elements of the step that belong to the piece of that name. Collective over dp and tp.

        Args:
            updates: name -> the piece that this process steps, and its flat update.
        """
        if self._sync is None:
            shaped = {name: update.view(self._matrices[name].shape) for name, (_, update) in updates.items()}
            return {name: self._own(self._matrices[name], whole, updates[name][0]) for name, whole in shaped.items()}
        result: dict[str, Tensor] = {}
        for bucket in self._sync.buckets:
            held = [slot.held for slot in bucket.slots if slot.held.name in self._matrices]
            present = [self._matrices[each.name] for each in held if each.parameter not in self._sync.absent]
            if not present:
                continue
            local = self._held_here(bucket, present, updates)
            for name, whole in self._over_tensor_ranks(present, local, self._sync.mesh.tp).items():
                if name in updates:  # each replica computes the steps of the weights that it holds elements of
                    result[name] = self._own(self._matrices[name], whole, updates[name][0])
        return result

    def _held_here(
        self, bucket: Bucket, present: Sequence[MuonWeight], updates: Mapping[str, tuple[Master, Tensor]]
    ) -> dict[str, Tensor]:
        """Return name -> the update of this process's part of the weight, including the slices that other replicas step."""
        if self._sync is None or not self._sync.sharded or bucket.axis.size == 1:
            return {weight.name: updates[weight.name][1].view(weight.shape) for weight in present}
        flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.flat.device)
        start_of = {slot.held.name: slot.start for slot in bucket.slots}
        for weight in present:
            if weight.name in updates:
                piece, update = updates[weight.name]
                flat[start_of[weight.name] + piece.start : start_of[weight.name] + piece.stop] = update
        start_gather_slices(flat, bucket.axis).wait()
        return {
            weight.name: flat[start_of[weight.name] : start_of[weight.name] + weight.shape.numel()].view(weight.shape)
            for weight in present
        }

    @staticmethod
    def _over_tensor_ranks(present: Sequence[MuonWeight], local: Mapping[str, Tensor], tp: Axis) -> dict[str, Tensor]:
        """Return name -> the update of the whole weight; one all-gather brings the parts of all other tensor-parallel ranks."""
        cut = [weight for weight in present if weight.layout.over("tp") is not None] if tp.size > 1 else []
        whole = dict(local)
        if not cut:
            return whole
        flat = torch.cat([local[weight.name].reshape(-1) for weight in cut])
        rows = start_all_gather(flat.view(1, -1), tp).wait()
        for weight, *_, parts in zip(
            cut, torch.split(rows, [weight.shape.numel() for weight in cut], dim=1), strict=True
        ):
            shard = weight.layout.over("tp")
            assert shard is not None
            by_rank: dict[tuple[int, ...], Tensor] = {(at,): part.view(weight.shape) for at, part in enumerate(parts)}
            whole[weight.name] = join(by_rank, ParameterSharding((shard,)))
        return whole

    def _own(self, matrix: MuonWeight, whole: Tensor, piece: Master) -> Tensor:
        """Return this process's elements of the step of a whole weight, flat."""
        direction = direction_of(whole, matrix.fused, self._rule, matrix.dtype)
        over = matrix.layout.over("tp")
        if over is not None and self._sync is not None:
            direction = shard_of(direction, ParameterSharding((over,)), {"tp": self._sync.mesh.place.tp})
        return direction.reshape(-1)[piece.start : piece.stop]
