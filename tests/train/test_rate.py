"""The learning rate: warm-up, decay, and what a larger batch does to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pipeloom.config import load
from pipeloom.train.rate import batch_factor, learning_rate

STEPS = 60


def rates(replicas: int = 1, **overrides: Any) -> list[float]:
    keys = {f"optimizer.{key}": value for key, value in {"warmup_steps": 12, **overrides}.items()}
    options = load(None, keys).optimizer
    return [learning_rate(step, STEPS, options, replicas) for step in range(STEPS)]


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("replicas", [1, 2, 16])
def test_warm_up_rises_to_the_target_and_decay_falls_from_it(rule: str, replicas: int) -> None:
    found = rates(replicas, lr_rule=rule)
    assert all(a < b for a, b in pairwise(found[:12]))
    assert all(a > b for a, b in pairwise(found[12:]))
    assert max(found) == pytest.approx(found[11]) == pytest.approx(found[12])
    assert max(found) == pytest.approx(3e-3 * batch_factor(rule, replicas))
    assert found[-1] == pytest.approx(3e-4 * batch_factor(rule, replicas))


def test_the_same_global_batch_has_the_same_rate() -> None:
    assert rates(1) == rates(16)


def test_the_same_batch_a_replica_has_a_higher_rate() -> None:
    one = rates(1, lr_rule="linear")
    assert rates(4, lr_rule="linear") == pytest.approx([4 * rate for rate in one])
    assert rates(4, lr_rule="sqrt") == pytest.approx([2 * rate for rate in one])
    assert rates(1, lr_rule="sqrt") == one == rates(1)
