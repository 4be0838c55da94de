"""Causal attention in blocks: a range of queries and a range of keys each, merged by their log-sum-exp.

Blocks are computed by torch's fused kernels (arXiv 2205.14135; merged as in ring attention, arXiv 2310.01889). The kernels'
backward takes the merged output and log-sum-exp, and so returns a block's exact part of the gradients. No matrix of scores of
a sequence is ever held, nor one tensor of all its keys: they are where an `KeyExchange` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AttentionBlock(NamedTuple):
    """Attention of some queries of a batch row to some keys.

    Attributes:
        rows: range of the rows of the batch.
        first, last: range of the queries, as this rank holds them.
        start, end: range of the keys, in the whole sequence.
        causal: whether query i of the block sees its keys 0 to i alone; otherwise it sees all.
    """

    rows: slice
    first: int
    last: int
    start: int
    end: int
    causal: bool


class KeyExchange(Protocol):
    """Keys and values of some tokens, which come to hand one after the other, and go with the gradients that belong to them."""

    def turns(self) -> Iterator[Keys]:
        """Yield the keys and values at hand, in turns."""

    def add(self, gradient: Tensor) -> None:
        """Take the gradient of the keys and values of the present turn."""

    def total(self) -> Tensor:
        """Return the gradient of the keys and values that this exchange was opened with."""


Open = Callable[[Tensor], KeyExchange]
"""Opens the exchange of keys and values [2, batch, heads, tokens, width]."""


class Keys:
    """The keys and values that a rank holds at one moment, [2, batch, heads, tokens, width], and their ranges in the sequence."""

    def __init__(self, held: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        self.held, self._ranges = held, ranges

    def inside(self, blocks: Sequence[AttentionBlock]) -> Iterator[tuple[AttentionBlock, int]]:
        """Yield the parts of the blocks whose keys are here, each with the place of its first key in `held`."""
        for block in blocks:
            before = 0
            for start, end in self._ranges:
                first, last = max(start, block.start), min(end, block.end)
                if first < last:
                    yield block._replace(start=first, end=last), before + first - start
                before += end - start


class Local:
    """The exchange of keys and values that are here, of the tokens from `start` on."""

    def __init__(self, start: int, held: Tensor) -> None:
        self._keys = Keys(held, [(start, start + held.shape[-2])])

    def turns(self) -> Iterator[Keys]:
        yield self._keys

    def add(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def total(self) -> Tensor:
        return self._gradient


def block_attention(query: Tensor, blocks: Sequence[AttentionBlock], pieces: Sequence[tuple[Tensor, Open]]) -> Tensor:
    """Return the attention of queries [batch, heads, tokens, width] to the keys of their blocks, of the same shape.

    Args:
        pieces: keys and values, with as many heads or a divisor of them, and how to open their exchange.
    """
    held, openings = zip(*pieces, strict=True)
    out: Tensor = _Attention.apply(query, tuple(blocks), openings, *held)  # type: ignore[no-untyped-call]
    return out


def causal_blocks(
    position_ids: Tensor | None, length: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[AttentionBlock]:
    """Yield the blocks of causal attention: each range of queries to itself, and to the keys of its document before it.

    Args:
        position_ids: each token's position in its document, [batch, length]; None: a sequence is one document. Reading it waits
            for the device.
        length: the number of tokens up to the last query.
        ranges: the tokens that are queries, in the order in which they are held.
    """
    for rows, starts in [(slice(None), [0])] if position_ids is None else _documents(position_ids):
        held = 0
        for start, end in ranges:
            for begin, stop in zip(starts, [*starts[1:], length], strict=True):
                first, last = max(begin, start), min(stop, end)
                if first < last:
                    queries = held + first - start, held + last - start
                    yield AttentionBlock(rows, *queries, first, last, True)
                    if begin < first:
                        yield AttentionBlock(rows, *queries, begin, first, False)
            held += end - start


def document_begins(position_ids: Tensor) -> Tensor:
    """Return whether a document begins at each token: bool, as `position_ids` [batch, length].

    It does wherever a position is not the one before it plus 1, as `transformers` reads packed rows.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins


def _documents(position_ids: Tensor) -> Iterator[tuple[slice, list[int]]]:
    """Yield each row with the tokens at which its documents begin."""
    for row, each in enumerate(document_begins(position_ids).cpu()):
        yield slice(row, row + 1), each.nonzero().flatten().tolist()


class _Attention(torch.autograd.Function):
    """Saves queries, the keys and values, the output, and its log-sum-exp [batch, heads, tokens]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, blocks: Any, openings: Sequence[Open], *held: Tensor) -> Tensor:
        ctx.blocks, ctx.openings = blocks, openings
        out = torch.zeros(query.shape, dtype=_wide(query.dtype), device=query.device)
        sums = out.new_full(query.shape[:3], -math.inf)
        for opened, piece in zip(openings, held, strict=True):
            for keys in opened(piece).turns():
                for block, at in keys.inside(blocks):
                    q, k, v = _operands(block, at, query, keys.held)
                    attended, logsumexp = _forward(q, k, v, block.causal)
                    where = block.rows, slice(None), slice(block.first, block.last)
                    before, logsumexp = sums[where], logsumexp.to(sums.dtype)
                    both = torch.logaddexp(before, logsumexp)
                    old, new = (torch.exp(each - both).unsqueeze(-1) for each in (before, logsumexp))
                    out[where] = out[where] * old + attended * new
                    sums[where] = both
        result = out.to(query.dtype)
        ctx.save_for_backward(query, result, sums, *held)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, out, sums, *held = ctx.saved_tensors
        d_query = torch.zeros(query.shape, dtype=_wide(query.dtype), device=query.device)
        d_held = []
        for opened, piece in zip(ctx.openings, held, strict=True):
            exchange = opened(piece)
            for keys in exchange.turns():
                d_keys = torch.zeros(keys.held.shape, dtype=d_query.dtype, device=query.device)
                for block, at in keys.inside(ctx.blocks):
                    where = block.rows, slice(None), slice(block.first, block.last)
                    q, k, v = _operands(block, at, query, keys.held)
                    dq, *d_both = _backward(gradient[where], q, k, v, out[where], sums[where], block.causal)
                    d_query[where] += dq
                    groups = keys.held.shape[2]
                    for total, part in zip(d_keys, d_both, strict=True):
                        grouped = part.reshape(part.shape[0], groups, -1, *part.shape[2:]).sum(2, dtype=total.dtype)
                        total[block.rows, :, at : at + block.end - block.start] += grouped
                exchange.add(d_keys)
            d_held.append(exchange.total().to(piece.dtype))
        return d_query.to(query.dtype), None, None, *d_held


def _operands(block: AttentionBlock, at: int, query: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a block, with as many heads each; its first key is at `at` in `held`."""
    q = query[block.rows, :, block.first : block.last]
    k, v = (each[block.rows, :, at : at + block.end - block.start] for each in held)
    group = query.shape[1] // held.shape[2]
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


# -- one block ---------------------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the parts of blocks are summed."""
    return torch.promote_types(dtype, torch.float32)


def _fused(q: Tensor) -> bool:
    """Return whether torch has a fused kernel for these queries that returns the log-sum-exp: flash attention."""
    return q.device.type in ("cpu", "meta") or (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16))


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp, [batch, heads, queries]."""
    if not _fused(q):
        scores = _scores(q, k, causal)
        logsumexp = scores.logsumexp(-1)
        return (scores - logsumexp.unsqueeze(-1)).exp() @ v.to(scores.dtype), logsumexp
    # The public scaled_dot_product_attention does not return the log-sum-exp.
    if q.is_cuda:
        out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, logsumexp


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the merged output of the queries and its log-sum-exp."""
    if not _fused(q):
        wide_gradient, wide_q, wide_k, wide_v = (each.to(logsumexp.dtype) for each in (gradient, q, k, v))
        shares = (_scores(q, k, causal) - logsumexp.unsqueeze(-1)).exp()
        inner = (wide_gradient * out).sum(-1, keepdim=True)
        d_scores = shares * (wide_gradient @ wide_v.mT - inner) / math.sqrt(q.shape[-1])
        return d_scores @ wide_k, d_scores.mT @ wide_q, shares.mT @ wide_gradient
    saved = gradient.contiguous(), q, k, v, out.contiguous(), logsumexp.contiguous()
    if q.is_cuda:
        empty = torch.empty(0, dtype=torch.uint64, device=q.device)  # no dropout, so no random numbers
        lengths = None, None, q.shape[2], k.shape[2]
        d: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *saved, *lengths, 0.0, causal, empty, empty
        )
        return d
    sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal)
    return sums[0], sums[1], sums[2]


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    wide = _wide(q.dtype)
    scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
    return scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -math.inf) if causal else scores
