"""A block whose feed-forward part is a mixture of experts (Mixtral; Qwen-MoE with shared experts).

The block declares its segments: attention and router, dispatch, experts, combine, mixture. Its plain forward runs them in
order, an overlapped pair interleaves those of two micro-batches. Shared experts run beside the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.decoder_shape import DecoderShape
from pipeloom.models.decoder import Block
from pipeloom.models.gate import TopKGate
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Compute, Segment, Values, beside, in_order
from pipeloom.parallel.dispatch import (
    AllToAll,
    DispatchPlan,
    ExpertParallel,
    begin_dispatch,
    combine_segments,
    dispatch_segments,
    group_by_expert,
    permute_for_dispatch,
    ungroup,
    unpermute_and_mix,
)
from pipeloom.parallel.expert import Experts, PartialSumLinear
from pipeloom.parallel.router import Routing, dropped_between
from pipeloom.parallel.tensor import TensorParallel, enter, sum_over_ranks


class SharedExpert(nn.Module):
    """SwiGLU that every token goes through; under tensor parallelism this rank's term of it."""

    def __init__(self, hidden: int, inner: int, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.gate_proj = PartialSumLinear(hidden, inner, 0, tensor)
        self.up_proj = PartialSumLinear(hidden, inner, 0, tensor)
        self.down_proj = PartialSumLinear(inner, hidden, 1, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
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


class SparseFeedForward(nn.Module):
    """The parts of a mixture of experts, called by the segments of its block. Tokens are [tokens, hidden] here."""

    def __init__(
        self,
        shape: DecoderShape,
        tensor: TensorParallel | None = None,
        expert: ExpertParallel | None = None,
        classes: MoeClasses = MoeClasses(),
    ) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.expert_width
        self.expert = expert if expert is not None and expert.size > 1 else None
        self.gate = classes.router(shape, tensor)
        self.experts = classes.experts(shape.num_experts, hidden, inner, self.expert, tensor)
        self.shared_expert: SharedExpert | None = None
        if shape.num_shared_experts:
            self.shared_expert = SharedExpert(hidden, shape.num_shared_experts * inner, tensor)
            self.shared_expert_gate = PartialSumLinear(hidden, 1, None, tensor)

    def route(self, tokens: Tensor, microbatch: MicrobatchContext | None) -> Routing:
        """Return where all tokens of a micro-batch go; the weights carry its auxiliary losses."""
        wanted = self.gate.choose(tokens, self.gate.draw(tokens, microbatch))
        routing = self.gate.limit(wanted)
        self.gate.record_load(routing.tally.counts, dropped_between(wanted, routing), microbatch)
        return replace(routing, weights=self.gate.attach_aux_loss(routing.weights, routing.tally, microbatch))

    def compute(self, rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """Rows as they came through this rank's experts, in the same order."""
        return ungroup(self.experts(group_by_expert(rows, dispatch_plan), dispatch_plan.arrival.counts), dispatch_plan)

    def share(self, tokens: Tensor) -> Tensor | None:
        """Return what the shared experts add: sigmoid(gate x) · expert(x) (Qwen-MoE); None where there are none."""
        if self.shared_expert is None:
            return None
        gate: Tensor = self.shared_expert_gate(tokens).sigmoid()
        added: Tensor = self.shared_expert(tokens)
        return gate * added


class SparseBlock(Block):
    """One transformer block with experts: [batch, length, hidden] -> the same shape; under sequence parallelism length / tp.

    Args:
        expert: the ranks that the experts are spread over; each has tokens of its own, and its replica of all else.
        classes: of the experts and the router.
    """

    mlp: SparseFeedForward

    def __init__(
        self,
        shape: DecoderShape,
        tensor: TensorParallel | None = None,
        expert: ExpertParallel | None = None,
        classes: MoeClasses = MoeClasses(),
    ) -> None:
        super().__init__(shape, tensor, SparseFeedForward(shape, tensor, expert, classes))
        self.tensor = tensor

    def forward(
        self, x: Tensor, microbatch: MicrobatchContext | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """`microbatch` is needed in training for dropout and for routers that draw; without it auxiliary losses count 1.

        `position_ids` [batch, length] restart with each document where rows hold several.
        """
        out: Tensor = in_order(self.segments(microbatch=microbatch, position_ids=position_ids), (x,))[0]
        return out

    def segments(
        self, *, microbatch: MicrobatchContext | None = None, position_ids: Tensor | None = None
    ) -> Sequence[Segment]:
        """x -> the block's output, cut at the all-to-alls."""
        return [
            Compute("attention", partial(self._attend_and_route, microbatch, position_ids)),
            *self._dispatch_and_share(),
            Compute("experts", self._compute),
            *combine_segments(self.mlp.expert),
            Compute("mixture", partial(self._mix, microbatch)),
        ]

    def _dispatch_and_share(self) -> list[Segment]:
        """The dispatch, and the shared experts, which need no token of another rank, while its first hop is under way."""
        dispatch = dispatch_segments(self.mlp.expert)
        if self.mlp.shared_expert is None:
            return dispatch
        share = Compute("shared experts", self._share)
        if not dispatch:
            return [share]
        first, *rest = dispatch
        assert isinstance(first, AllToAll)
        return [*beside(first, first.filled, share), *rest]

    def attend(self, x: Tensor, microbatch: MicrobatchContext | None, position_ids: Tensor | None = None) -> Tensor:
        """x and what attention adds to it."""
        mixed = self.self_attn(self.input_layernorm(x), position_ids)
        gained: Tensor = self.attention_dropout(mixed, microbatch)
        return x + gained

    def tokens(self, attended: Tensor) -> Tensor:
        """Return what the router and the experts see: all tokens, on every tensor-parallel rank, [batch, length, hidden]."""
        return enter(self.post_attention_layernorm(attended), self.tensor)

    def add(self, attended: Tensor, mixed: Tensor, microbatch: MicrobatchContext | None) -> Tensor:
        """The block's output from this rank's term of the mixture [tokens, hidden]."""
        batch, length, width = attended.shape
        if self.tensor is None:
            whole = mixed.view(batch, length, width)
        else:
            parts = self.tensor.size if self.tensor.sequence else 1
            whole = sum_over_ranks(mixed.view(batch, parts * length, width), self.tensor)
        gained: Tensor = self.mlp_dropout(whole, microbatch)
        return attended + gained

    def _attend_and_route(
        self, microbatch: MicrobatchContext | None, position_ids: Tensor | None, values: Values
    ) -> Values:
        attended = self.attend(values[0], microbatch, position_ids)
        tokens = self.tokens(attended).flatten(0, 1)
        routing = self.mlp.route(tokens, microbatch)
        dispatch = begin_dispatch([routing], self.mlp.expert)
        rows, weights = permute_for_dispatch(tokens, routing.weights, dispatch.leaving[0], self.mlp.expert)
        (dispatch_plan,) = dispatch.plans()  # the counts have travelled while the rows were gathered
        return rows, weights, dispatch_plan, attended, (tokens if self.mlp.shared_expert is not None else None)

    def _share(self, values: Values) -> Values:
        rows, weights, dispatch_plan, attended, tokens = values
        return rows, weights, dispatch_plan, attended, self.mlp.share(tokens)

    def _compute(self, values: Values) -> Values:
        rows, weights, dispatch_plan, attended, shared = values
        return self.mlp.compute(rows, dispatch_plan), weights, dispatch_plan, attended, shared

    def _mix(self, microbatch: MicrobatchContext | None, values: Values) -> Values:
        rows, weights, dispatch_plan, attended, shared = values
        return (self.add(attended, _plus(unpermute_and_mix(rows, weights, dispatch_plan), shared), microbatch),)


def _plus(mixed: Tensor, shared: Tensor | None) -> Tensor:
    return mixed if shared is None else mixed + shared
