"""A mixture of experts as a layer, and a block with one (Mixtral; Qwen-MoE with shared experts).

The layer declares its segments: router, dispatch, experts, combine, mixture; the block runs its attention in the first of
them. A plain forward runs them in order, an overlapped pair interleaves those of two micro-batches. Shared experts run beside
the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ArgumentError
from pipeloom.models.decoder import Block, gated
from pipeloom.models.gate import TopKGate
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.parts import in_part
from pipeloom.ops.segments import Communication, Compute, Segment, Values, begin, beside, in_order
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.dispatch import (
    AllToAll,
    DispatchPlan,
    ExpertParallel,
    begin_dispatch,
    chunk_segments,
    combine_segments,
    dispatch_segments,
    group_by_expert,
    permute_for_dispatch,
    ungroup,
    unpermute_and_mix,
)
from pipeloom.parallel.expert import Experts, PartialSumLinear
from pipeloom.parallel.router import Routing, dropped_between
from pipeloom.parallel.sharding import ParameterSharding, Shard
from pipeloom.parallel.tensor import TensorParallel, enter, sum_over_ranks
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.rules import require_rules

Arrival = Callable[[], Values]
"""Waits for a communication that has started, and returns its values."""


class ExpertModules(nn.ModuleList):
    """This rank's experts as modules of any kind, called one after the other with the rows of each, [rows, hidden] -> the same.

    Args:
        make: makes one expert. It is called once for each expert of all ranks, so that ranks with the same seed draw the first
            values of one process; other ranks' experts are dropped.
    """

    def __init__(self, make: Callable[[], nn.Module], experts: int, parallel: ExpertParallel | None) -> None:
        super().__init__()
        self._ranks = 1 if parallel is None else parallel.size
        held = experts if parallel is None else parallel.own(experts)[0]
        first = 0 if parallel is None else parallel.axis.index * held
        for at in range(experts):
            module = make()
            if first <= at < first + held:
                self.append(module)

    def sharding(self) -> Mapping[str, ParameterSharding]:
        """The parameters of all ranks' experts with the same place are parts of one, along their first dimension."""
        if self._ranks == 1:
            return {}
        return {
            name: ParameterSharding((Shard("ep", 0, (parameter.shape[0],) * self._ranks),))
            for name, parameter in self.named_parameters()
        }

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [rows, hidden], `counts` of them for each of this rank's experts -> [rows, hidden]."""
        return torch.cat([expert(part) for expert, part in zip(self, torch.split(rows, list(counts)), strict=True)])


class MoELayer(nn.Module):
    """A mixture of experts: x [..., hidden] -> the same shape, for each token the weighted sum of its experts' outputs.

    Experts may be spread over the ranks of a group, each of which has tokens of its own; the gate is the same on all of them.
    The forward is a collective operation of the group. It is `Segmented`: in an overlapped pair its all-to-alls run while the
    other micro-batch computes, and so they do in a layer that has its segments among its own (docs/experts.md).

    Args:
        gate: chooses the experts, and has the auxiliary losses (`aux_loss`).
        experts: makes one expert, any module [rows, hidden] -> [rows, hidden]; or a module of all of this rank's experts, which
            takes rows [rows, hidden], in runs of one expert each, and the number of rows of each, as `Experts` does.
        group: a process group, or where experts are on which rank. None: all experts are here.
        tensor: the ranks over which gate and experts are cut; only for experts that return their terms, as `Experts` do.
        shared_expert: a module that every token goes through besides, [tokens, hidden] -> [tokens, hidden].
        shared_expert_gate: [tokens, hidden] -> [tokens, 1], whose sigmoid the shared expert's output is multiplied by.

    Raises ArgumentError for a group whose size does not divide the number of experts, and for a gate that pads to a capacity
    where the group has nodes or chunks. With such a gate all ranks must have as many tokens.
    """

    def __init__(
        self,
        gate: TopKGate,
        experts: Callable[[], nn.Module] | nn.Module,
        group: Any = None,
        *,
        tensor: TensorParallel | None = None,
        shared_expert: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        parallel = ExpertParallel.of(group)
        self.parallel = parallel if parallel is not None and parallel.size > 1 else None
        self.tensor = tensor
        self.gate = gate
        if self.parallel is not None:
            nodes = self.parallel.nodes > 1 and self.parallel.nodes
            chunks = self.parallel.chunks > 1 and self.parallel.chunks
            require_rules(pad_to_capacity=gate.pads, ep_nodes=nodes, ep_chunks=chunks)
        if not isinstance(experts, nn.Module):
            if tensor is not None:
                raise ArgumentError(
                    "experts", " must be one module of terms, such as Experts, under tensor parallelism"
                )
            experts = ExpertModules(experts, gate.gate.experts, self.parallel)
        self.experts = experts
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    def forward(
        self, x: Tensor, microbatch: MicrobatchContext | None = None, slice_state: SliceState | None = None
    ) -> Tensor:
        """`microbatch` is what a `Pipeline` passes; without it the caller adds `aux_loss` to the loss."""
        out: Tensor = in_order(self.segments(microbatch=microbatch, slice_state=slice_state), (x,))[0]
        return out

    @property
    def aux_loss(self) -> Tensor:
        """Return this rank's share of the auxiliary losses of the last forward, 0-dim, for a training loop of one's own.

        Add it to the rank's mean loss divided by the number of ranks of `group`. It is 0 in evaluation, and after a forward with
        `microbatch`, whose backward adds the gradients of the losses itself.
        """
        loss, ranks = self.gate.aux_loss, 1 if self.parallel is None else self.parallel.size
        return self.gate.weight.new_zeros(()) if loss is None else loss / ranks

    def segments(
        self, *, microbatch: MicrobatchContext | None = None, slice_state: SliceState | None = None
    ) -> Sequence[Segment]:
        """(x, …) -> (output, …), cut at the all-to-alls; further values are passed on."""
        route = Compute("router", partial(self._route, microbatch, slice_state))
        if self.parallel is not None and self.parallel.chunks > 1:
            share = Compute("shared expert", self._share)
            chunks = chunk_segments(self.parallel, self._compute, share)
            return [route, *chunks, Compute("mixture", self._mix)]
        return [
            route,
            *self._dispatch_and_share(),
            Compute("experts", self._compute),
            *combine_segments(self.parallel),
            Compute("mixture", self._mix),
        ]

    def _dispatch_and_share(self) -> list[Segment]:
        """The dispatch, and the shared expert, which needs no token of another rank, while its first hop is under way."""
        dispatch = dispatch_segments(self.parallel)
        if self.shared_expert is None:
            return dispatch
        share = Compute("shared expert", self._share)
        if not dispatch:
            return [share]
        first, *rest = dispatch
        assert isinstance(first, AllToAll)
        return [*beside(first, first.filled, share), *rest]

    # -- parts, for the segments here and for other orders of them ---------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Return what the router and the experts see: all tokens, on every tensor-parallel rank, in the shape of x."""
        return enter(x, self.tensor)

    def leave(self, mixed: Tensor, shape: torch.Size) -> Tensor:
        """Return the layer's output from this rank's term of it [tokens, hidden]; `shape` is that of what `enter` returned."""
        whole = mixed.view(shape)
        return whole if self.tensor is None else sum_over_ranks(whole, self.tensor)

    def route(
        self, tokens: Tensor, microbatch: MicrobatchContext | None, slice_state: SliceState | None = None
    ) -> Routing:
        """Return where all tokens of a micro-batch [tokens, hidden] go; with `microbatch` the weights carry its losses."""
        self.gate.require_runnable(microbatch)
        wanted = self.gate.choose(tokens, self.gate.draw(tokens, microbatch))
        routing = self.gate.limit(wanted)
        self.gate.record_load(routing.tally.counts, dropped_between(wanted, routing), microbatch)
        weights = self.gate.attach_aux_loss(routing.weights, routing.tally, microbatch, slice_state)
        return replace(routing, weights=weights)

    def compute(self, rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """Rows as they came through this rank's experts, in the same order."""
        return in_part("mlp", self._compute_experts, rows, dispatch_plan)

    def _compute_experts(self, rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return ungroup(self.experts(group_by_expert(rows, dispatch_plan), dispatch_plan.arrival.counts), dispatch_plan)

    def share(self, tokens: Tensor) -> Tensor | None:
        """Return what the shared expert adds: sigmoid(gate x) · expert(x) (Qwen-MoE); None where there is none."""
        if self.shared_expert is None:
            return None
        added: Tensor = in_part("mlp", self.shared_expert, tokens)
        return added if self.shared_expert_gate is None else self.shared_expert_gate(tokens).sigmoid() * added

    def start_dispatch(self, rows: tuple[Tensor, Tensor], dispatch_plan: DispatchPlan) -> Arrival:
        """Send rows and their weights to the experts."""
        first, *rest = dispatch_segments(self.parallel)
        assert isinstance(first, Communication)
        arrive = begin(first, (*rows, dispatch_plan))
        return lambda: in_order(rest, arrive())

    def start_combine(self, arrived: Arrival, dispatch_plan: DispatchPlan) -> Arrival:
        """Wait for rows, compute their experts, and send the outputs back."""
        *before, last = combine_segments(self.parallel)
        assert isinstance(last, Communication)
        rows, *others = arrived()
        return begin(last, in_order(before, (self.compute(rows, dispatch_plan), *others)))

    # -- segments ------------------------------------------------------------------------------------------------------------

    def _route(self, microbatch: MicrobatchContext | None, slice_state: SliceState | None, values: Values) -> Values:
        x, *others = values
        entered = self.enter(x)
        tokens = entered.flatten(0, -2)
        routing = self.route(tokens, microbatch, slice_state)
        routings = [routing] if self._runs == 1 else _cut(routing, self._runs)
        dispatch = begin_dispatch(routings, self.parallel)
        leaving = [
            permute_for_dispatch(part, routing.weights, permutation, self.parallel)
            for part, routing, permutation in zip(
                tokens.tensor_split(self._runs), routings, dispatch.leaving, strict=True
            )
        ]
        plans = dispatch.plans()  # the counts have travelled while the rows were gathered
        runs = [value for rows, plan in zip(leaving, plans, strict=True) for value in (*rows, plan)]
        return *runs, None if self.shared_expert is None else tokens, entered.shape, *others

    @property
    def _runs(self) -> int:
        """The number of runs of tokens; rows, weights and dispatch plan of each are the first values between segments."""
        return 1 if self.parallel is None else self.parallel.chunks

    def _share(self, values: Values) -> Values:
        at = 3 * self._runs
        return *values[:at], None if values[at] is None else self.share(values[at]), *values[at + 1 :]

    def _compute(self, values: Values) -> Values:
        rows, weights, dispatch_plan, *others = values
        return self.compute(rows, dispatch_plan), weights, dispatch_plan, *others

    def _mix(self, values: Values) -> Values:
        *runs, shared, shape = values[: 3 * self._runs + 2]
        parts = [unpermute_and_mix(*runs[at : at + 3]) for at in range(0, len(runs), 3)]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.leave(add_shared(mixed, shared), shape), *values[3 * self._runs + 2 :]


def add_shared(mixed: Tensor, shared: Tensor | None) -> Tensor:
    """Return the sum of the experts' mixture and what the shared expert adds."""
    return mixed if shared is None else mixed + shared


def _cut(routing: Routing, chunks: int) -> list[Routing]:
    """The routing of each run of tokens; each keeps the tally of all."""
    kept_masks: list[Tensor | None] = (
        [None] * chunks if routing.kept is None else list(routing.kept.tensor_split(chunks))
    )
    parts = zip(routing.experts.tensor_split(chunks), routing.weights.tensor_split(chunks), kept_masks, strict=True)
    return [Routing(experts, weights, mask, routing.tally) for experts, weights, mask in parts]


# -- the decoder's block -----------------------------------------------------------------------------------------------------


class SharedExpert(nn.Module):
    """SwiGLU that every token goes through; under tensor parallelism this rank's term of it."""

    def __init__(self, hidden: int, inner: int, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.gate_proj = PartialSumLinear(hidden, inner, 0, tensor)
        self.up_proj = PartialSumLinear(hidden, inner, 0, tensor)
        self.down_proj = PartialSumLinear(inner, hidden, 1, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(in_part("activation", gated, self.gate_proj(x), self.up_proj(x)))
        return out


@dataclass(frozen=True)
class MoeClasses:
    """The classes that a mixture of experts is built from; put your own in their places.

    Attributes:
        experts: takes the arguments of `Experts`; its forward takes rows [rows, hidden], in runs of one expert each, and the
            number of rows of each of this rank's experts, and returns as many rows. Built from `ExpertLinear`s it is spread
            over expert- and tensor-parallel ranks as `Experts` is.
        router: a subclass of `TopKGate`; `choose` decides where tokens go.
    """

    experts: Callable[..., nn.Module] = Experts
    router: type[TopKGate] = TopKGate


class SparseBlock(Block):
    """One transformer block with experts: [batch, length, hidden] -> the same shape; under sequence parallelism length / tp.

    Args:
        expert: the ranks that the experts are spread over; each has tokens of its own, and its replica of all else.
        classes: of the experts and the router.
    """

    mlp: MoELayer

    def __init__(
        self,
        shape: DecoderShape,
        tensor: TensorParallel | None = None,
        expert: ExpertParallel | None = None,
        classes: MoeClasses = MoeClasses(),
    ) -> None:
        hidden, inner, shared = shape.hidden_size, shape.expert_width, shape.num_shared_experts
        parallel = expert if expert is not None and expert.size > 1 else None
        mixture = MoELayer(
            classes.router(shape, tensor),
            classes.experts(shape.num_experts, hidden, inner, parallel, tensor),
            parallel,
            tensor=tensor,
            shared_expert=SharedExpert(hidden, shared * inner, tensor) if shared else None,
            shared_expert_gate=PartialSumLinear(hidden, 1, None, tensor) if shared else None,
        )
        super().__init__(shape, tensor, mixture)

    def forward(
        self,
        x: Tensor,
        microbatch: MicrobatchContext | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> Tensor:
        """`microbatch` is needed in training for dropout and for routers that draw; without it see `MoELayer.aux_loss`.

        `position_ids` [batch, length] restart with each document where rows hold several.
        """
        segments = self.segments(microbatch=microbatch, position_ids=position_ids, slice_state=slice_state)
        out: Tensor = in_order(segments, (x,))[0]
        return out

    def segments(
        self,
        *,
        microbatch: MicrobatchContext | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> Sequence[Segment]:
        """x -> the block's output, cut at the all-to-alls: those of the experts, with attention in the first of them."""

        def attend(values: Values) -> Values:
            normed = in_part("norms", self.input_layernorm, values[0])
            gained = in_part("attention", self.self_attn, normed, position_ids, slice_state)
            attended = values[0] + self.attention_dropout(gained, microbatch)
            return in_part("norms", self.post_attention_layernorm, attended), attended

        def add(values: Values) -> Values:
            gained, attended = values
            return (attended + self.mlp_dropout(gained, microbatch),)

        first, *rest = self.mlp.segments(microbatch=microbatch, slice_state=slice_state)
        whole = [Compute("attention", partial(in_order, [Compute("attention", attend), first])), *rest]
        whole[-1] = Compute("mixture", partial(in_order, [whole[-1], Compute("sum", add)]))
        return whole
