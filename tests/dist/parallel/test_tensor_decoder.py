"""The decoder over tensor-parallel ranks: loss and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import WAYS, Way, model, parts, serial, step, tensor_parallel, whole, worst

from pipeloom.parallel import collectives, tensor
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


def twice_and_wrong(rank: int) -> tuple[bool, Any, Any]:
    """Bitwise equal when run again; gradients with the sum over tokens' parts forgotten; with no reduction of dx."""
    shape, way = model(), Way(split=True)
    first, again = (step(shape, way, tensor_parallel(True)) for _ in range(2))
    same = first[0] == again[0] and all(
        torch.equal(a.grad, b.grad)
        for name in first[1]
        for a, b in zip(first[1][name].parameters(), again[1][name].parameters(), strict=True)
    )
    forgotten = parts(again[1], sum_partial=False)
    plain, tensor.start_input_gradient = tensor.start_input_gradient, own_term
    try:
        _, unreduced = step(shape, Way(), tensor_parallel(False))
    finally:
        tensor.start_input_gradient = plain
    return same, forgotten, parts(unreduced)


def own_term(gradients: Any, weights: Any, _: Any) -> Any:
    dx = sum(gradient @ weight for gradient, weight in zip(gradients, weights, strict=True))
    return collectives.PendingCollective(Done(), lambda: dx, dx)


class Done:
    def wait(self) -> None:
        """Nothing was started."""


@pytest.mark.core
def test_runs_are_bitwise_equal_and_mutations_are_seen() -> None:
    results = run_ranks(twice_and_wrong, 2)
    assert all(same for same, _, _ in results)
    _, want = serial(model(), Way())
    norm = "model.layers.0.input_layernorm.weight"
    forgotten = torch.from_numpy(results[0][1][norm][1])
    assert float((forgotten - want[norm]).abs().max() / want[norm].abs().max()) > 1e-2
    with pytest.raises(AssertionError, match="norm"):  # the ranks' copies of a norm's gradient differ
        whole([rank[2] for rank in results])
