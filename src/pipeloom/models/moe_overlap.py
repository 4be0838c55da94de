"""All-to-all hidden inside one micro-batch: behind the experts of other tokens, or behind the attention of other tokens.

Each communication is two nodes of autograd (ops/segments.py), so the backward overlaps in mirror image. What a token gets
does not depend on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.models.decoder import Attention, visible
from pipeloom.models.moe import SparseBlock, SparseFeedForward
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Communication, Compute, Segment, Values, begin, in_order
from pipeloom.parallel.dispatch import (
    DispatchPlan,
    ExpertParallel,
    begin_dispatch,
    combine_segments,
    dispatch_segments,
    permute_for_dispatch,
    unpermute_and_mix,
)
from pipeloom.parallel.router import RouterNoise, Routing

Finish = Callable[[], Values]


class OverlappedSparseBlock(SparseBlock):
    """A block whose tokens are cut into parts (`ExpertParallel.chunks` or `blocks`), which overlap in one segment."""

    def segments(
        self, *, microbatch: MicrobatchContext | None = None, position_ids: Tensor | None = None
    ) -> Sequence[Segment]:
        """Return the one segment, x -> the block's output."""
        if _spread(self).chunks > 1:
            return [Compute("block in chunks", partial(run_in_chunks, self, microbatch, position_ids))]
        run = partial(run_in_sequence_blocks, self, microbatch, position_ids)
        return [Compute("block in sequence blocks", run)]


def run_in_chunks(
    block: SparseBlock, microbatch: MicrobatchContext | None, position_ids: Tensor | None, values: Values
) -> Values:
    """The block with its tokens in chunks: dispatch(i+1) beside experts(i) beside combine(i-1) (Tutel, arXiv 2206.03382)."""
    mlp, expert = block.mlp, _spread(block)
    attended = block.attend(values[0], microbatch, position_ids)
    tokens = block.tokens(attended).flatten(0, 1)
    chunks = tokens.tensor_split(expert.chunks)
    routings = _cut(mlp.route(tokens, microbatch), expert.chunks)
    dispatch = begin_dispatch(routings, expert)
    first = permute_for_dispatch(chunks[0], routings[0].weights, dispatch.leaving[0], expert)
    dispatch_plans = dispatch.plans()

    def send(at: int) -> Finish:
        plan = dispatch_plans[at]
        rows = permute_for_dispatch(chunks[at], routings[at].weights, plan.leaving, expert) if at else first
        return _dispatch(rows, plan, expert)

    coming, going = send(0), None
    shared = mlp.share(tokens)
    mixed: list[Tensor] = []
    for at, dispatch_plan in enumerate(dispatch_plans):
        arrived, coming = coming, (send(at + 1) if at + 1 < len(dispatch_plans) else coming)
        leaving = _experts_and_combine(mlp, arrived, dispatch_plan, expert)
        if going is not None:
            mixed.append(_landed(going, dispatch_plans[at - 1]))
        going = leaving
    assert going is not None
    mixed.append(_landed(going, dispatch_plans[-1]))
    whole = torch.cat(mixed)
    return (block.add(attended, whole if shared is None else whole + shared, microbatch),)


def run_in_sequence_blocks(
    block: SparseBlock, microbatch: MicrobatchContext | None, position_ids: Tensor | None, values: Values
) -> Values:
    """The block with its sequences in blocks: dispatch(i) beside attention(i+1), combine(i) beside what follows (AMPipe).

    Nothing is dropped for its place here (config/expert_checks.py): capacity is known only when all tokens are routed.
    """
    (x,) = values
    mlp, expert = block.mlp, _spread(block)
    whole_draws = mlp.gate.draw(x.flatten(0, 1), microbatch)
    dropped = _mask(block, x, microbatch)
    attention = BlockAttention(block.self_attn, block.input_layernorm(x), position_ids)
    spans = [(int(part[0]), int(part[-1]) + 1) for part in torch.arange(x.shape[1]).tensor_split(expert.blocks)]
    tally = None
    ready: list[tuple[Finish, DispatchPlan, Tensor]] = []
    landing: list[tuple[Finish, DispatchPlan, Tensor | None]] = []
    attended: list[Tensor] = []
    for start, end in spans:
        gained = attention.run(start, end)
        attended.append(x[:, start:end] + (gained if dropped is None else gained * dropped[:, start:end]))
        tokens = block.tokens(attended[-1]).flatten(0, 1)
        routing = mlp.gate.choose(tokens, _of_block(whole_draws, x, start, end))
        tally = routing.tally if tally is None else tally + routing.tally
        if end == x.shape[1]:
            mlp.gate.record_load(tally.counts, None, microbatch)
            routing = replace(routing, weights=mlp.gate.attach_aux_loss(routing.weights, tally, microbatch))
        dispatch = begin_dispatch([routing], expert)
        rows = permute_for_dispatch(tokens, routing.weights, dispatch.leaving[0], expert)
        if ready:
            landing.append(_experts_of(mlp, *ready.pop(), expert))
        (dispatch_plan,) = dispatch.plans()  # the counts have travelled beside the last block's experts
        ready.append((_dispatch(rows, dispatch_plan, expert), dispatch_plan, tokens))
    landing.append(_experts_of(mlp, *ready.pop(), expert))
    parts = []
    for (finish, dispatch_plan, shared), block_of in zip(landing, attended, strict=True):
        mixed = _landed(finish, dispatch_plan)
        parts.append((mixed if shared is None else mixed + shared).view_as(block_of))
    return (block.add(torch.cat(attended, 1), torch.cat(parts, 1).flatten(0, 1), microbatch),)


class BlockAttention:
    """Causal attention of one run of queries at a time over all keys up to them."""

    def __init__(self, attention: Attention, x: Tensor, position_ids: Tensor | None) -> None:
        self._attention = attention
        self._position_ids = position_ids
        self._query, self._key, self._value = attention.split_heads(x, position_ids)

    def run(self, start: int, end: int) -> Tensor:
        """Return what positions start..end-1 get: [batch, end - start, hidden]."""
        if self._position_ids is None:
            mask = torch.ones(end - start, end, dtype=torch.bool, device=self._query.device).tril(start)
        else:
            mask = visible(self._position_ids, start, end)
        mixed = F.scaled_dot_product_attention(
            self._query[:, :, start:end],
            self._key[:, :, :end],
            self._value[:, :, :end],
            attn_mask=mask,
            enable_gqa=self._key.shape[1] < self._query.shape[1],
        )
        return self._attention.merge_heads(mixed)


def _spread(block: SparseBlock) -> ExpertParallel:
    assert block.mlp.expert is not None
    return block.mlp.expert


def _cut(routing: Routing, chunks: int) -> list[Routing]:
    """The routing of each run of tokens; each keeps the tally of all."""
    kept_masks: list[Tensor | None] = (
        [None] * chunks if routing.kept is None else list(routing.kept.tensor_split(chunks))
    )
    parts = zip(routing.experts.tensor_split(chunks), routing.weights.tensor_split(chunks), kept_masks, strict=True)
    return [Routing(experts, weights, mask, routing.tally) for experts, weights, mask in parts]


def _dispatch(rows: tuple[Tensor, Tensor], dispatch_plan: DispatchPlan, expert: ExpertParallel) -> Finish:
    first, *rest = dispatch_segments(expert)
    assert isinstance(first, Communication)
    finish = begin(first, (*rows, dispatch_plan))
    return lambda: in_order(rest, finish())


def _experts_and_combine(
    mlp: SparseFeedForward, arrived: Finish, dispatch_plan: DispatchPlan, expert: ExpertParallel
) -> Finish:
    *before, last = combine_segments(expert)
    assert isinstance(last, Communication)
    rows, *others = arrived()
    return begin(last, in_order(before, (mlp.compute(rows, dispatch_plan), *others)))


def _experts_of(
    mlp: SparseFeedForward, arrived: Finish, dispatch_plan: DispatchPlan, tokens: Tensor, expert: ExpertParallel
) -> tuple[Finish, DispatchPlan, Tensor | None]:
    shared = mlp.share(tokens)
    return _experts_and_combine(mlp, arrived, dispatch_plan, expert), dispatch_plan, shared


def _landed(finish: Finish, dispatch_plan: DispatchPlan) -> Tensor:
    rows, weights, *_ = finish()
    return unpermute_and_mix(rows, weights, dispatch_plan)


def _mask(block: SparseBlock, x: Tensor, microbatch: MicrobatchContext | None) -> Tensor | None:
    """Return what the attention's dropout multiplies with, of all tokens: each block takes its part."""
    dropout = block.attention_dropout
    if not dropout.training or dropout.probability == 0:
        return None
    return dropout(torch.ones_like(x), microbatch).detach()  # type: ignore[no-any-return]


def _of_block(draws: RouterNoise, x: Tensor, start: int, end: int) -> RouterNoise:
    """The random numbers of positions start..end-1 of each sequence."""
    if all(value is None for value in (draws.inputs, draws.logits, draws.second)):
        return draws
    positions = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[:2])
    return draws.rows(positions[:, start:end].flatten())
