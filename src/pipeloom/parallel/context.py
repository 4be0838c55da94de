"""Context parallelism: ranks share the tokens of the same sequences, and exchange keys and values inside attention.

A sequence is cut into 2 cp pieces. Rank r holds the pieces r and 2 cp - 1 - r, so that causal attention gives all ranks equal
work (Megatron-LM; the "zigzag" of ring attention). Everything but attention is local to a token.

Attention is computed in blocks (`ops.block_attention`): keys and values are gathered, or travel in a ring (arXiv 2310.01889).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.ops.block_attention import KeyExchange, Keys, Local, Open, block_attention, causal_blocks
from pipeloom.ops.layer import SharesTokens
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.collectives import (
    PendingCollective,
    start_all_gather,
    start_all_reduce,
    start_collective,
    start_reduce_scatter,
)
from pipeloom.parallel.mesh import Axis
from pipeloom.shapes.mesh import mirrored_pieces

Exchange = Literal["gather", "ring"]
M = TypeVar("M", bound=nn.Module)


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

    def own_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of those of whole sequences, or of a whole slice of them, which are dimension `dim` of `x`.

        Raises UsageError if 2 cp does not divide them.
        """
        return torch.cat([x.narrow(dim, first, last - first) for first, last in self.pieces(x.shape[dim])], dim)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, detached."""
        return replace(start_all_reduce(values.detach().clone(), self.axis), kind="cp").wait()

    def exchanged(self, start: int, held: Tensor) -> KeyExchange:
        """Return the exchange of this rank's keys and values of the tokens from `start` on, of a sequence or of a slice of it."""
        return (_Gathered if self.exchange == "gather" else _Ring)(self.axis, start, held)


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_ids: Tensor | None = None,
    *,
    context: ContextParallel | None = None,
    state: SliceState | None = None,
) -> Tensor:
    """Return causal attention of the queries at hand to all keys of their document, of other ranks and earlier slices too.

    Args:
        query: [batch, heads, tokens, width]; `key` and `value` with as many heads or a divisor of them.
        position_ids: each token's position in its document, of whole sequences, or of whole slices [batch, cp · tokens]; None: a
            sequence is one document. Reading it waits for the device.
        context: the ranks that share the tokens of sequences, or of slices of them.
        state: of the layer, which keeps these keys and values for later slices; None: sequences are not cut.
    """
    ranks = 1 if context is None else context.axis.size
    held = torch.stack((key, value))
    earlier = [] if state is None else [piece for piece in state.held if piece is not None]
    if state is not None:
        state.keep(held) if position_ids is None else state.keep(held, position_ids)
    if position_ids is not None and earlier:
        position_ids = torch.cat((*(piece.on_device[-1] for piece in earlier), position_ids), 1)
    start, pieces = 0, []
    for piece in (*earlier, None):
        opening: Open = partial(Local if context is None else context.exchanged, start)
        pieces.append((held, opening) if piece is None else piece.opened(0, opening))
        start += ranks * (held.shape if piece is None else piece.shape(0))[-2]
    length = ranks * query.shape[2]
    ranges = ((0, length),) if context is None else context.pieces(length)
    before = start - length
    blocks = causal_blocks(position_ids, start, [(before + first, before + last) for first, last in ranges])
    return block_attention(query, list(blocks), pieces)


def share_tokens(module: M, context: ContextParallel | None) -> M:
    """Have each part of `module` that is a `SharesTokens` without a context follow `context`; return `module`."""
    for part in module.modules():
        if isinstance(part, SharesTokens) and part.context is None:
            part.context = context
    return module


@contextlib.contextmanager
def whole_sequences(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the layers inside `modules` compute whole sequences meanwhile, on every rank."""
    spread = [part for module in modules for part in module.modules() if isinstance(part, SharesTokens)]
    contexts = [part.context for part in spread]
    for part in spread:
        part.context = None
    try:
        yield
    finally:
        for part, context in zip(spread, contexts, strict=True):
            part.context = context


class _Gathered(Local):
    """The exchange in one piece: every rank gets all keys and values, and returns what it adds to all of their gradients."""

    def __init__(self, axis: Axis, start: int, held: Tensor) -> None:
        self._axis = axis
        whole = replace(start_all_gather(held, axis), kind="cp").wait()
        self._keys = Keys(whole, [piece for index in range(axis.size) for piece in _ranges(axis, start, held, index)])

    def total(self) -> Tensor:
        return replace(start_reduce_scatter(self._gradient, self._axis), kind="cp").wait()


class _Ring:
    """The exchange in cp turns: in each, the keys and values of one rank are here, while the next ones arrive."""

    def __init__(self, axis: Axis, start: int, held: Tensor) -> None:
        self._axis, self._start, self._held = axis, start, held.contiguous()
        self._arriving: PendingCollective[Tensor] | None = None

    def turns(self) -> Iterator[Keys]:
        held = self._held
        for turn in range(self._axis.size):
            coming = self._shift(held) if turn + 1 < self._axis.size else None
            yield Keys(held, _ranges(self._axis, self._start, held, (self._axis.index - turn) % self._axis.size))
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


def _ranges(axis: Axis, start: int, held: Tensor, index: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens of rank `index`, where every rank has keys and values as `held` of those from `start` on."""
    pieces = mirrored_pieces(held.shape[-2] * axis.size, index, axis.size)
    return [(start + first, start + last) for first, last in pieces]
