"""Slow stages, drift and predictions from measured steps with noise."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.schedule.measured import drift, predict, slow_stages


def _steps(slow: int | None, seed: int, count: int = 9) -> list[pl.Timeline]:
    """Steps whose stages differ by 1 % noise, each, of the 8 stages of 4 ranks; `slow` takes 10 % longer."""
    rng = random.Random(seed)
    schedule = pl.schedules.interleaved(ranks=4, chunks=2, microbatches=8)
    steps = []
    for _ in range(count):
        factors = [rng.gauss(1, 0.01) * (1.1 if stage == slow else 1) for stage in range(8)]
        factors[0] *= 1.3  # the embedding is no layer
        factors[-1] *= 1.6  # nor is the head
        forward, backward = (tuple(base * factor for factor in factors) for base in (2e-3, 1.9e-3))
        costs = pl.Costs(forward=forward, input_grad=backward, weight_grad=backward)
        steps.append(replace(pl.simulate(schedule, costs), source="measured"))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_a_stage_slowed_by_a_tenth_is_named_and_no_other(seed: int) -> None:
    slow = 1 + seed % 6
    found = slow_stages(_steps(slow, seed))
    assert [one.stage for one in found] == [slow]
    assert found[0].excess == pytest.approx(0.1, abs=0.03)
    assert found[0].rank == slow % 4
    assert slow_stages(_steps(None, 100 + seed)) == ()


def test_layers_explain_what_a_stage_takes() -> None:
    steps = _steps(3, 1)
    assert slow_stages(steps, [1.3, 1, 1, 1.1, 1, 1, 1, 1.6]) == ()
    assert [one.stage for one in slow_stages(steps, [1.3, 1, 1, 1, 1, 1, 1, 1.6])] == [3]


def test_half_of_the_steps_predict_the_others() -> None:
    found = predict(_steps(None, 5))
    assert (found.fitted, found.tested) == (4, 4)
    assert abs(found.error) < 0.02
    assert set(found.by_kind) == {"F", "B"}
    assert max(map(abs, found.by_kind.values())) < 0.02
    alone = predict(_steps(None, 5, count=1))
    assert alone.error == pytest.approx(0, abs=1e-9)


def test_drift_is_the_median_slope() -> None:
    schedule = pl.schedules.gpipe(ranks=2, microbatches=3)
    spans = [5.0, 1.0, 1.01, 1.02, 9.0, 1.04, 1.05]  # the first step, and one that was held up, do not count
    steps = [replace(pl.simulate(schedule, pl.Costs().scaled(span)), source="measured") for span in spans]
    assert drift(steps) == pytest.approx(0.05, rel=0.2)
    with pytest.raises(pl.PipeloomError, match="no measured step"):
        drift([])
