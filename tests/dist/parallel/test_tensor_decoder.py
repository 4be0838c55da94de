"""The decoder over tensor-parallel ranks: loss and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from layouts import WAYS, model, parts, serial, step, tensor_parallel, whole, worst
from processes import run_ranks

CASES = [(sequence, way) for sequence in (False, True) for way in WAYS]


def run_cases(rank: int, dropout: float) -> list[tuple[float, Any]]:
    results = []
    for sequence, way in CASES:
        loss, built = step(model(dropout=dropout), way, tensor_parallel(sequence))
        results.append((loss, parts(built)))
    return results


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


OPTIONS = [
    {"qkv_bias": True, "rms_norm_eps": 1e-2},
    {"attention_bias": True, "head_dim": 12},
]


def run_options(rank: int) -> list[tuple[float, Any]]:
    results = []
    for changes in OPTIONS:
        for sequence, way in CASES:
            loss, built = step(model(**changes), way, tensor_parallel(sequence))
            results.append((loss, parts(built)))
    return results


def test_biases_head_width_and_epsilon_are_those_of_one_process() -> None:
    results = run_ranks(run_options, 2)
    wanted = [(serial(model(**changes), way), sequence, way) for changes in OPTIONS for sequence, way in CASES]
    for at, ((want_loss, want), sequence, way) in enumerate(wanted):
        assert [rank[at][0] for rank in results] == pytest.approx([want_loss] * 2, rel=1e-6)
        assert sum(name.endswith("_proj.bias") for name in want) in (2 * 3, 2 * 4)
        assert worst(whole([rank[at][1] for rank in results]), want) <= 3e-5, (sequence, way)  # rounding of fp32
