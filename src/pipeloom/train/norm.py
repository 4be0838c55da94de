"""The global gradient norm of a step, from one number per parameter: bitwise the same for every layout of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.parallel.grad_norm import exact_sum, global_norm
from pipeloom.runtime import Pipeline
from pipeloom.train.collect import maxima
from pipeloom.train.optimizer import Optimizer


class NormRow:
    """The row that one rank sends per step: some flags, then the squared norm of each gradient that it counts.

    Constructing one is collective over the run: all rows have the same length.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._width = int(maxima(pipeline, [float(optimizer.counted)])[0])

    def make(self, *flags: float) -> list[float]:
        """Return the row of the last step."""
        squares = self._optimizer.squares()
        return [*flags, *squares, *[0.0] * (self._width - len(squares))]


def norm_of(rows: Sequence[Sequence[float]], flags: int) -> float:
    """Return the global norm from the rows of all ranks, each with `flags` numbers in front."""
    return global_norm(square for row in rows for square in row[flags:])


def own_square(row: Sequence[float], flags: int) -> float:
    """Return the sum of the squares in one row."""
    return exact_sum(row[flags:])
