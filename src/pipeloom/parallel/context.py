"""Context parallelism: ranks share the tokens of the same sequences, and exchange keys and values inside attention.

A sequence is cut into 2 cp pieces. Rank r holds the pieces r and 2 cp - 1 - r, so that causal attention gives all ranks equal
work (Megatron-LM; the "zigzag" of ring attention). Everything but attention is local to a token.

Attention is a list of blocks, each a range of this rank's queries and a range of keys, computed by torch's fused kernels and
merged by their log-sum-exp (arXiv 2205.14135; ring attention, arXiv 2310.01889). The kernels' backward takes the merged output
and log-sum-exp, and so returns a block's exact part of the gradients. No matrix of scores of a sequence is ever held.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeloom.mesh_shape import mirrored_pieces
from pipeloom.parallel.collectives import (
    PendingCollective,
    start_all_gather,
    start_all_reduce,
    start_collective,
    start_reduce_scatter,
)
from pipeloom.parallel.mesh import Axis

Exchange = Literal["gather", "ring"]


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


@dataclass(frozen=True)
class ContextParallel:
    """Distribution of the tokens of sequences over the ranks of an axis.

    Attributes:
        axis: the ranks that share sequences, 2 or more.
        exchange: gather: keys and values are gathered for a layer's forward, dropped, and gathered again for its backward. ring:
            they travel from rank to rank while attention computes, so that one other rank's are held at a time.
    """

    axis: Axis
    exchange: Exchange = "gather"

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return the two ranges of the tokens of a sequence of `length` that this rank holds."""
        return mirrored_pieces(length, self.axis.index, self.axis.size)

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of the tokens of whole sequences, which are dimension `dim` of `x`.

        Raises UsageError if 2 cp does not divide them.
        """
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.pieces(x.shape[dim])], dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return causal attention of this rank's queries to all keys of their document.

        Args:
            query: [batch, heads, tokens, width]; `key` and `value` with as many heads or a divisor of them.
            position_ids: each token's position in its document, of whole sequences [batch, cp · tokens]; None: a sequence is one
                document. Reading it waits for the device.
        """
        length = query.shape[2] * self.axis.size
        spans = [(slice(None), [0])] if position_ids is None else list(_documents(position_ids))
        blocks = [block for rows, starts in spans for block in self._blocks(rows, starts, length)]
        out: Tensor = _Attention.apply(query, key, value, self, tuple(blocks))  # type: ignore[no-untyped-call]
        return out

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, detached."""
        return replace(start_all_reduce(values.detach().clone(), self.axis), kind="cp").wait()

    def _blocks(self, rows: slice, documents: Sequence[int], length: int) -> Iterator[AttentionBlock]:
        """Yield, for documents that begin at these tokens, each range of queries to itself and to the keys before it."""
        held = 0
        for start, end in self.pieces(length):
            for at, begin in enumerate(documents):
                stop = documents[at + 1] if at + 1 < len(documents) else length
                first, last = max(begin, start), min(stop, end)
                if first >= last:
                    continue
                queries = held + first - start, held + last - start
                yield AttentionBlock(rows, *queries, first, last, True)
                if begin < first:
                    yield AttentionBlock(rows, *queries, begin, first, False)
            held += end - start


@contextlib.contextmanager
def whole_sequences(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the layers inside `modules` compute whole sequences meanwhile, on every rank, as text is generated."""
    spread = [part for module in modules for part in module.modules() if getattr(part, "context", None) is not None]
    contexts = [part.context for part in spread]
    for part in spread:
        part.context = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, context in zip(spread, contexts, strict=True):
            part.context = context


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


class _Keys:
    """The keys and values that a rank holds at one moment, [2, batch, heads, tokens, width], and their ranges in the sequence."""

    def __init__(self, held: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        self.held, self._ranges = held, ranges

    def inside(self, block: AttentionBlock) -> Iterator[tuple[AttentionBlock, int]]:
        """Yield the parts of a block whose keys are here, each with the place of its first key in `held`."""
        before = 0
        for start, end in self._ranges:
            first, last = max(start, block.start), min(end, block.end)
            if first < last:
                yield block._replace(start=first, end=last), before + first - start
            before += end - start


class _Gathered:
    """The exchange in one piece: every rank gets all keys and values, and returns what it adds to all of their gradients."""

    def __init__(self, context: ContextParallel, held: Tensor) -> None:
        self._axis = context.axis
        whole = replace(start_all_gather(held, self._axis), kind="cp").wait()
        length = whole.shape[-2]
        self._order = [mirrored_pieces(length, index, self._axis.size) for index in range(self._axis.size)]
        self._keys = _Keys(whole, [piece for pieces in self._order for piece in pieces])

    def turns(self) -> Iterator[_Keys]:
        yield self._keys

    def add(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def total(self) -> Tensor:
        return replace(start_reduce_scatter(self._gradient, self._axis), kind="cp").wait()


class _Ring:
    """The exchange in cp turns: in each, the keys and values of one rank are here, while the next ones arrive."""

    def __init__(self, context: ContextParallel, held: Tensor) -> None:
        self._axis, self._held = context.axis, held.contiguous()
        self._arriving: PendingCollective[Tensor] | None = None

    def turns(self) -> Iterator[_Keys]:
        held, length = self._held, self._held.shape[-2] * self._axis.size
        for turn in range(self._axis.size):
            coming = self._shift(held) if turn + 1 < self._axis.size else None
            yield _Keys(held, mirrored_pieces(length, (self._axis.index - turn) % self._axis.size, self._axis.size))
            if coming is not None:
                held = coming.wait()

    def add(self, gradient: Tensor) -> None:
        """Add this rank's part to the gradient that travels with the keys and values of this turn, and send it on."""
        if self._arriving is not None:
            gradient = self._arriving.wait().add_(gradient)
        self._arriving = self._shift(gradient)

    def total(self) -> Tensor:
        assert self._arriving is not None
        return self._arriving.wait()

    def _shift(self, x: Tensor) -> PendingCollective[Tensor]:
        """Start to send `x` to the next rank, and to receive that of the one before."""
        counts = [[0] * self._axis.size for _ in range(2)]
        for count, step in zip(counts, (-1, 1), strict=True):
            count[(self._axis.index + step) % self._axis.size] = x.numel()
        received = torch.empty_like(x)
        work = start_collective(dist.all_to_all_single, received.view(-1), x.view(-1), *counts, group=self._axis.group)
        return PendingCollective(work, lambda: received, x, "cp")


class _Attention(torch.autograd.Function):
    """Saves queries, this rank's keys and values, the output, and its log-sum-exp [batch, heads, tokens]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: ContextParallel, blocks: Any) -> Tensor:
        ctx.context, ctx.blocks = context, blocks
        out = torch.zeros(query.shape, dtype=_wide(query.dtype), device=query.device)
        sums = out.new_full(query.shape[:3], -math.inf)
        for keys in _exchange(context, key, value).turns():
            for block, at in _here(blocks, keys):
                q, k, v = _operands(block, at, query, keys.held)
                attended, logsumexp = _forward(q, k, v, block.causal)
                where = block.rows, slice(None), slice(block.first, block.last)
                before, logsumexp = sums[where], logsumexp.to(sums.dtype)
                both = torch.logaddexp(before, logsumexp)
                old, new = (torch.exp(each - both).unsqueeze(-1) for each in (before, logsumexp))
                out[where] = out[where] * old + attended * new
                sums[where] = both
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        d_query = torch.zeros(query.shape, dtype=_wide(query.dtype), device=query.device)
        exchange = _exchange(ctx.context, key, value)
        for keys in exchange.turns():
            d_keys = torch.zeros(keys.held.shape, dtype=d_query.dtype, device=query.device)
            for block, at in _here(ctx.blocks, keys):
                where = block.rows, slice(None), slice(block.first, block.last)
                q, k, v = _operands(block, at, query, keys.held)
                dq, *d_both = _backward(gradient[where], q, k, v, out[where], sums[where], block.causal)
                d_query[where] += dq
                groups = keys.held.shape[2]
                for total, part in zip(d_keys, d_both, strict=True):
                    grouped = part.reshape(part.shape[0], groups, -1, *part.shape[2:]).sum(2, dtype=total.dtype)
                    total[block.rows, :, at : at + block.end - block.start] += grouped
            exchange.add(d_keys)
        d_key, d_value = exchange.total().to(key.dtype)
        return d_query.to(query.dtype), d_key, d_value, None, None


def _exchange(context: ContextParallel, key: Tensor, value: Tensor) -> _Gathered | _Ring:
    return (_Gathered if context.exchange == "gather" else _Ring)(context, torch.stack((key, value)))


def _here(blocks: Sequence[AttentionBlock], keys: _Keys) -> Iterator[tuple[AttentionBlock, int]]:
    """Yield the parts of all blocks whose keys are here."""
    for block in blocks:
        yield from keys.inside(block)


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
    return q.device.type == "cpu" or (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16))


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
