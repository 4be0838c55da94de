"""The learning rate: warm-up, decay, and what a larger batch does to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from pipeloom.config import load, load_layout
from pipeloom.config.rates import batch_factor, learning_rate
from pipeloom.config.settings import _validate, merge
from pipeloom.errors import ConfigError

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


def of_torch(schedule: str, steps: int, warmup: int, decay: int) -> list[float]:
    """torch's schedulers, one behind another."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    names = torch.optim.lr_scheduler
    last = steps - 1
    rising: Any = names.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    flat = names.ConstantLR(optimizer, 1.0, 0)
    falling: Any = names.LinearLR(optimizer, 1.0, 0.1, decay if schedule == "wsd" else last - warmup)
    if schedule == "cosine":
        falling = names.CosineAnnealingLR(optimizer, last - warmup, 0.1)
    later, marks = [falling], [warmup]
    if schedule == "wsd":
        later, marks = [flat, falling], [warmup, last - decay]
    if schedule == "constant":
        later = [flat]
    chained = names.SequentialLR(optimizer, [rising, *later], marks)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chained.step()
    return rates


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.filterwarnings("ignore")
def test_schedules_are_torchs(schedule: str) -> None:
    found = rates(lr=1.0, min_lr=0.1, lr_schedule=schedule, decay_steps=20)
    assert found == pytest.approx(of_torch(schedule, STEPS, 12, 20), rel=1e-6)


def test_wsd_decays_over_a_tenth_where_nothing_is_said() -> None:
    found = rates(lr=1.0, min_lr=0.1, lr_schedule="wsd")
    assert found[12:54] == [1.0] * 42
    assert all(a > b for a, b in pairwise(found[53:]))
    assert found[-1] == pytest.approx(0.1)


def test_a_decay_longer_than_the_run_is_refused() -> None:
    keys = {"warmup_steps": 4, "lr_schedule": "wsd", "decay_steps": 9}
    with pytest.raises(ConfigError, match=r"decay_steps = 9: .* leaves 6 steps; nearest: 6"):
        load_layout("tiny", {"train.steps": 10, **{f"optimizer.{key}": value for key, value in keys.items()}})


LLAMA = {"model.preset": "llama3-8b"}  # 8.03 billion parameters: 6e-4 · (125e6 / 8.03e9)^¼ is 2.1e-4


@pytest.mark.parametrize(
    ("keys", "rate", "why"),
    [
        ({}, 3e-3, "for a new model of this size"),
        (LLAMA, 2.1e-4, "for a new model of this size"),
        (LLAMA | {"model.weights": "trained"}, 2.1e-5, "that starts from trained"),
        (LLAMA | {"model.weights": "trained", "lora.r": 8}, 2e-4, "for adapters"),
        ({"model.weights": "trained"}, 3e-4, "that starts from trained"),
    ],
)
def test_a_rate_that_nobody_set_suits_the_model(keys: dict[str, Any], rate: float, why: str) -> None:
    merged = merge(None, keys)
    options, _, _ = _validate(merged)
    assert options is not None
    assert (options.optimizer.lr, options.optimizer.min_lr) == (rate, pytest.approx(rate / 10))
    assert all(merged.origins[f"optimizer.{key}"].startswith("auto: ") for key in ("lr", "min_lr", "warmup_steps"))
    assert merged.origins["optimizer.lr"].endswith(why)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (12, 3), (40, 10), (300, 10), (1000, 30)])
def test_warm_up_is_three_percent_of_the_steps(steps: int, warmup: int) -> None:
    assert load(None, {"train.steps": steps}).optimizer.warmup_steps == warmup


def test_a_rate_that_is_set_stays_and_the_last_one_is_a_tenth_of_it() -> None:
    options = load(None, LLAMA | {"optimizer.lr": 0.02, "optimizer.warmup_steps": 0}).optimizer
    assert (options.lr, options.min_lr, options.warmup_steps) == (0.02, 0.002, 0)
    assert load(None, {"optimizer.min_lr": 1e-5}).optimizer.min_lr == 1e-5
