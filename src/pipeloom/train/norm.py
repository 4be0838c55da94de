"""The global gradient norm of a step, from one number per parameter: the same bits wherever parameters are."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.parallel.grad_norm import exact_sum, global_norm
from pipeloom.runtime import Pipeline
from pipeloom.train.collect import maxima
from pipeloom.train.optimizer import Optimizer


class NormRow:
    """Row of numbers that one rank sends per step: flags, then the squared norm of each gradient that it counts.

    The constructor is collective over the run: the ranks agree on one length of rows.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._width = int(maxima(pipeline, [float(optimizer.counted)])[0])

    def make(self, *flags: float) -> list[float]:
        """Return the row of the step whose gradients are at hand, padded with zeros."""
        squares = self._optimizer.squares()
        return [*flags, *squares, *[0.0] * (self._width - len(squares))]


def norm_of(rows: Sequence[Sequence[float]], flags: int) -> float:
    """Return the global gradient norm from the rows of all ranks, each of which begins with `flags` flags."""
    return global_norm(square for row in rows for square in row[flags:])


def own_square(row: Sequence[float], flags: int) -> float:
    """Return the sum of the squares in one row that begins with `flags` flags."""
    return exact_sum(row[flags:])
