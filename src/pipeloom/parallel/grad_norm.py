"""The norm of gradients that are spread over processes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


def squares(gradients: Sequence[Tensor]) -> list[float]:
    """Return the sums of squares of the tensors that have elements. Duplicate rows of a sparse gradient are summed first."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    filled = [torch.view_as_real(each) if each.is_complex() else each for each in dense if each.numel()]
    if not filled:
        return []
    wide = any(gradient.dtype == torch.float64 for gradient in filled)
    # One call for all tensors, where one call each would take longer than the norms; torch documents these functions as beta.
    norms = torch._foreach_norm(filled, 2, dtype=torch.float64 if wide else torch.float32)
    values: list[float] = torch.stack(norms).double().square().tolist()
    return values


def square_norm(gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Return the sum of squares of all elements, and the rounding error of that sum.

    The two together carry twice the digits of one number, so that sums over ranks do not depend on how gradients are spread.
    """
    terms = squares(gradients)
    total = exact_sum(terms)
    return total, exact_sum([*terms, -total]) if math.isfinite(total) else 0.0


def global_norm(squares: Iterable[float]) -> float:
    """The norm from the squares of all parameters' gradients, or from `square_norm` of each rank.

    The sum is exact up to one rounding at its end, so it does not depend on how parameters are spread over ranks.
    """
    return math.sqrt(exact_sum(squares))


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of numbers, bit for bit the same in any order; infinity if it overflows."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def clip(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scale the gradients by most / (norm + 1e-6), as torch does, unless the global `norm` is at most `most`."""
    if norm <= most:
        return
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:  # in one call, as in `squares`
        torch._foreach_mul_(dense, most / (norm + _EPSILON))
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(most / (norm + _EPSILON))
