"""All-to-all hidden behind the attention of other tokens of the same micro-batch.

Each communication is two nodes of autograd (ops/segments.py), so the backward overlaps in mirror image. What a token gets
does not depend on the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.models.decoder import Attention, visible
from pipeloom.models.moe import Arrival, SparseBlock, add_shared
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.parts import in_part
from pipeloom.ops.segments import Compute, Segment, Values
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.dispatch import DispatchPlan, begin_dispatch, permute_for_dispatch, unpermute_and_mix
from pipeloom.parallel.router import RouterNoise
from pipeloom.shapes.rules import require_rules


class SparseBlockInBlocks(SparseBlock):
    """A block whose sequences are cut into blocks (`ExpertParallel.blocks`), which overlap in one segment.

    Its forward raises ArgumentError for a capacity, tensor parallelism, and a part of the tokens of sequences.
    """

    def segments(
        self,
        *,
        microbatch: MicrobatchContext | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> Sequence[Segment]:
        """Return the one segment, x -> the block's output. Raises ArgumentError as the class says."""
        mlp, cut = self.mlp, slice_state is not None or self.self_attn.context is not None
        tp, blocks = 1 if mlp.tensor is None else mlp.tensor.size, 1 if mlp.parallel is None else mlp.parallel.blocks
        require_rules(ep_blocks=blocks, capacity_factor=mlp.gate.capacity_factor, tp=tp > 1 and tp, cut=cut)
        run = partial(run_in_sequence_blocks, self, microbatch, position_ids)
        return [Compute("block in sequence blocks", run)]


def run_in_sequence_blocks(
    block: SparseBlock, microbatch: MicrobatchContext | None, position_ids: Tensor | None, values: Values
) -> Values:
    """The block with its sequences in blocks: dispatch(i) beside attention(i+1), combine(i) beside what follows (AMPipe).

    Nothing is dropped for its place here (`shapes.rules`).
    """
    (x,) = values
    mlp, expert = block.mlp, block.mlp.parallel
    assert expert is not None
    whole_draws = mlp.gate.draw(x.flatten(0, 1), microbatch)
    dropped = _mask(block, x, microbatch)
    heads = block.self_attn.split_heads(in_part("norms", block.input_layernorm, x), position_ids)
    spans = [(int(part[0]), int(part[-1]) + 1) for part in torch.arange(x.shape[1]).tensor_split(expert.blocks)]
    tally = None
    ready: list[tuple[Arrival, DispatchPlan, Tensor]] = []
    landing: list[tuple[Arrival, DispatchPlan, Tensor | None]] = []

    def start_experts() -> None:
        arrived, plan, tokens = ready.pop()
        shared = mlp.share(tokens)
        landing.append((mlp.start_combine(arrived, plan), plan, shared))

    attended: list[Tensor] = []
    for start, end in spans:
        gained = attend_block(block.self_attn, heads, position_ids, start, end)
        attended.append(x[:, start:end] + (gained if dropped is None else gained * dropped[:, start:end]))
        tokens = mlp.enter(in_part("norms", block.post_attention_layernorm, attended[-1])).flatten(0, 1)
        routing = mlp.gate.choose(tokens, _of_block(whole_draws, x, start, end))
        tally = routing.tally if tally is None else tally + routing.tally
        if end == x.shape[1]:
            mlp.gate.record_load(tally.counts, None, microbatch)
            routing = replace(routing, weights=mlp.gate.attach_aux_loss(routing.weights, tally, microbatch))
        dispatch = begin_dispatch([routing], expert)
        rows = permute_for_dispatch(tokens, routing.weights, dispatch.leaving[0], expert)
        if ready:
            start_experts()
        (dispatch_plan,) = dispatch.plans()  # the counts have travelled beside the last block's experts
        ready.append((mlp.start_dispatch(rows, dispatch_plan), dispatch_plan, tokens))
    start_experts()
    parts = []
    for (arrive, plan, shared), part in zip(landing, attended, strict=True):
        rows, weights, *_ = arrive()
        parts.append(add_shared(unpermute_and_mix(rows, weights, plan), shared).view_as(part))
    whole = torch.cat(attended, 1)
    return (whole + block.mlp_dropout(mlp.leave(torch.cat(parts, 1), whole.shape), microbatch),)


def attend_block(
    attention: Attention, heads: tuple[Tensor, Tensor, Tensor], position_ids: Tensor | None, start: int, end: int
) -> Tensor:
    """Return what positions start..end-1 get of all keys up to them: [batch, end - start, hidden]."""
    query, key, value = heads
    if position_ids is None:
        mask = torch.ones(end - start, end, dtype=torch.bool, device=query.device).tril(start)
    else:
        mask = visible(position_ids, start, end)
    queries, keys, values = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
    grouped = key.shape[1] < query.shape[1]
    return attention.merge_heads(
        F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
    )


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
