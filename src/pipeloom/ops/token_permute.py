"""Rows of tokens: one row for each expert of a token, and the weighted sum of the returned rows.

Forward and backward only gather, so results do not depend on an order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.linear_map import with_adjoint


@dataclass(frozen=True)
class TokenPermutation:
    """The row of each choice of each token.

    Attributes:
        order: row -> choice, numbered token · k + choice: [rows] int64.
        token: row -> token: [rows] int64.
        slot: token, choice -> row, -1 for a choice that was dropped: [tokens, k] int64.
        sums: the choices' part of the sum, [tokens, k] int64, or None: all are one part. A sum over a token's rows is made
            part by part, each in order of the choices and rounded to the rows' dtype, and then over the parts.
        parts: number of parts.
        pads: whether some rows may be no choice's: they are of some token, numbered tokens · k, and nothing is made of them.
    """

    order: Tensor
    token: Tensor
    slot: Tensor
    sums: Tensor | None = None
    parts: int = 1
    pads: bool = False

    @property
    def rows(self) -> int:
        return self.order.numel()

    @property
    def complete(self) -> bool:
        """Return whether no choice was dropped."""
        return self.order.numel() == self.slot.numel() and not self.pads

    def first(self, rows: int) -> TokenPermutation:
        """Return it with the first rows alone: those of the choices that are kept, where `assign` got a mask."""
        return replace(self, order=self.order[:rows], token=self.token[:rows])

    def padded(self, counts: Tensor, size: int) -> TokenPermutation:
        """Return it with `size` rows for each key, of which `assign` counted at most as many; the host reads nothing."""
        keys, choices = counts.numel(), self.slot.numel()
        place, ends = torch.arange(self.order.numel(), device=self.order.device), counts.cumsum(0)
        key = torch.searchsorted(ends, place, right=True)  # `keys` for choices that are not kept
        row = place + (key * size - (ends - counts).index_select(0, key.clamp_max(keys - 1)))
        row = torch.where(key < keys, row, keys * size)
        order = self.order.new_full((keys * size + 1,), choices)
        order[row] = self.order
        slot = torch.where(self.slot < 0, -1, row.index_select(0, self.slot.flatten().clamp_min(0)).view_as(self.slot))
        order, (tokens, k) = order[:-1], self.slot.shape
        return replace(self, order=order, token=(order // max(k, 1)).clamp_max(tokens - 1), slot=slot, pads=True)


def count_keys(keys: Tensor, count: int) -> Tensor:
    """Return how often each of 0..count-1 is in `keys`: [count] int64. Unlike `bincount` it waits for no GPU."""
    flat = keys.flatten()
    return torch.zeros(count, dtype=torch.int64, device=keys.device).scatter_add_(0, flat, torch.ones_like(flat))


def assign(
    keys: Tensor,
    count: int,
    mask: Tensor | None = None,
    sums: Tensor | None = None,
    parts: int = 1,
) -> tuple[TokenPermutation, Tensor]:
    """Assign rows in order of their keys, rows of one key in order of tokens; count the rows of each key.

    Args:
        keys: [tokens, k] int64, 0..count-1, such as each choice's expert.
        mask: [tokens, k] bool; choices that are not kept get no row. None: all are kept.
        sums, parts: see TokenPermutation.

    Returns:
        the assignment, with the choices that are not kept in its last rows (`TokenPermutation.first` leaves them out, once the
        host knows the counts), and the counts, [count] int64 on the device of `keys`.
    """
    tokens, k = keys.shape
    flat = keys.flatten() if mask is None else torch.where(mask, keys, count).flatten()
    order = torch.argsort(flat, stable=True)
    counts = count_keys(flat, count + 1)[:count]
    slot = torch.empty_like(order)
    slot[order] = torch.arange(order.numel(), device=keys.device)
    slot = slot.view(tokens, k)
    if mask is not None:
        slot = torch.where(mask, slot, -1)
    return TokenPermutation(order, order // max(k, 1), slot, sums, parts), counts


def gather_rows(x: Tensor, permutation: TokenPermutation) -> Tensor:
    """Return the rows [rows, width] of the tokens x [tokens, width]."""
    return with_adjoint(x, lambda x: x.index_select(0, permutation.token), lambda rows: _sum(rows, None, permutation))


def combine_rows(rows: Tensor, weights: Tensor, permutation: TokenPermutation) -> Tensor:
    """[tokens, width]: the sum of each token's rows [rows, width], times its weights [tokens, k]; dropped ones add nothing."""
    return _Mix.apply(rows, weights, permutation)  # type: ignore[no-any-return, no-untyped-call]


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], `inverse` being the inverse permutation."""
    return with_adjoint(
        rows, lambda rows: rows.index_select(0, order), lambda gradient: gradient.index_select(0, inverse)
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of this dtype are summed: fp32, or fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, permutation: TokenPermutation) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(rows, weights)
        return _sum(rows, weights, permutation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        rows, weights = ctx.saved_tensors
        permutation: TokenPermutation = ctx.permutation
        spread = gradient.index_select(0, permutation.token)
        d_rows = d_weights = None
        if ctx.needs_input_grad[1]:
            products = (spread.to(accumulation_dtype(rows.dtype)) * rows).sum(-1)
            d_weights = weights.new_zeros(weights.numel() + permutation.pads)
            d_weights[permutation.order] = products.to(weights.dtype)
            d_weights = d_weights[: weights.numel()].view_as(weights)
        if ctx.needs_input_grad[0]:
            flat = torch.cat((weights.flatten(), weights.new_zeros(1))) if permutation.pads else weights.reshape(-1)
            weights_in_order = flat.index_select(0, permutation.order)
            d_rows = (spread * weights_in_order.unsqueeze(-1)).to(rows.dtype)
        return d_rows, d_weights, None


def _sum(rows: Tensor, weights: Tensor | None, permutation: TokenPermutation) -> Tensor:
    """[tokens, width]: each token's rows, times its weights (None: 1), added as the assignment says."""
    tokens, k = permutation.slot.shape
    if permutation.rows == 0:
        return rows.new_zeros(tokens, rows.shape[1])
    factors = _factors(weights, permutation, accumulation_dtype(rows.dtype))
    gathered = [rows.index_select(0, permutation.slot[:, j].clamp_min(0)) for j in range(k)]
    if permutation.sums is None:
        return _weighted(gathered, factors).to(rows.dtype)
    terms = []
    for part in range(permutation.parts):
        masks = torch.split((permutation.sums == part).to(accumulation_dtype(rows.dtype)), 1, dim=1)
        inside = [mask if f is None else mask * f for mask, f in zip(masks, factors, strict=True)]
        terms.append(_weighted(gathered, inside).to(rows.dtype))
    return _weighted(terms, [None] * len(terms)).to(rows.dtype)


def _factors(weights: Tensor | None, permutation: TokenPermutation, dtype: torch.dtype) -> list[Tensor | None]:
    """For each choice [tokens, 1], 0 where it was dropped; None for 1."""
    if weights is None and permutation.complete:
        return [None] * permutation.slot.shape[1]
    mask = None if permutation.complete else (permutation.slot >= 0).to(dtype)
    factors = mask if weights is None else weights.to(dtype) if mask is None else weights.to(dtype) * mask
    assert factors is not None
    return list(torch.split(factors, 1, dim=1))


def _weighted(gathered: Sequence[Tensor], factors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of the products, added in order."""
    total: Tensor | None = None
    for rows, factor in zip(gathered, factors, strict=True):
        term = rows.to(accumulation_dtype(rows.dtype)) if factor is None else rows * factor
        total = term if total is None else total + term
    assert total is not None
    return total
