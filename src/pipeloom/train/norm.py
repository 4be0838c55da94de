"""The global gradient norm of a step, from one number per parameter: the same bits wherever parameters are."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.parallel.grad_norm import exact_sum, global_norm
from pipeloom.runtime import Pipeline
from pipeloom.train.collect import maxima
from pipeloom.train.optimizer import Optimizer


class NormRow:
    """Data that one rank sends of a step: some flags, then the squared norm of each gradient that it counts.

    Making one is collective over the run: all rows have the same length.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._width = int(maxima(pipeline, [float(optimizer.counted)])[0])

    def make(self, *flags: float) -> list[float]:
        """The row of the step just made."""
        squares = self._optimizer.squares()
        return [*flags, *squares, *[0.0] * (self._width - len(squares))]


def norm_of(rows: Sequence[Sequence[float]], flags: int) -> float:
    """The global norm from the rows of all ranks, each with so many flags in front."""
    return global_norm(square for row in rows for square in row[flags:])


def own_square(row: Sequence[float], flags: int) -> float:
    """The sum of the squares in one row."""
    return exact_sum(row[flags:])
