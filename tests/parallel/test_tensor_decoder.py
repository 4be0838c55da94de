"""The decoder over tensor-parallel ranks: loss and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layouts import WAYS, Way, batch, model, parts, serial, step, tensor_parallel, whole, worst
from pipeloom.errors import ConfigError, UsageError
from pipeloom.models import layers
from pipeloom.parallel.laid import join, layout_of
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.tensor import TensorParallel
from processes import run_ranks

CASES = [(sequence, way) for sequence in (False, True) for way in WAYS]


def run_cases(rank: int, dropout: float) -> list[tuple[float, Any]]:
    results = []
    for sequence, way in CASES:
        loss, built = step(model(dropout=dropout), way, tensor_parallel(sequence))
        results.append((loss, parts(built)))
    return results


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "dropout"), [(2, 0.0), (2, 0.2), (4, 0.0)])
def test_loss_and_gradients_are_those_of_one_process(ranks: int, dropout: float) -> None:
    """Dropout too: every layout draws the same masks, and recomputation draws them again."""
    results = run_ranks(run_cases, ranks, dropout)
    for at, (sequence, way) in enumerate(CASES):
        want_loss, want = serial(model(dropout=dropout), way)
        losses = {rank[at][0] for rank in results}
        assert len(losses) == 1
        assert abs(losses.pop() - want_loss) <= 1e-6 * want_loss
        assert worst(whole([rank[at][1] for rank in results]), want) <= 1e-5, (sequence, way)
