"""Searches and proofs where a B takes less than I and W, against every schedule of small sizes."""

from __future__ import annotations

from random import Random

import pytest

import pipeloom as pl
from fuzz._brute_force import least


def case(seed: int) -> tuple[int, int, pl.Costs, int]:
    """Return (ranks, micro-batches, costs, memory); a B takes 0.75 to 0.95 of I and W."""
    random = Random(seed)
    ranks, microbatches = random.randint(2, 4), random.randint(3, 5)
    times = [tuple(float(random.randint(2, 10)) for _ in range(ranks)) for _ in range(3)]
    backward = tuple(round(random.uniform(0.75, 0.95) * (i + w), 1) for i, w in zip(times[1], times[2], strict=True))
    costs = pl.Costs(*times, p2p=random.choice([0.0, 1.0]), backward=backward)
    return ranks, microbatches, costs, random.randint(1, ranks + 1)


@pytest.mark.parametrize("seed", [0, 4, 8, 14])
def test_the_search_finds_the_optimum(seed: int) -> None:
    ranks, microbatches, costs, memory = case(seed)
    optimum = least(tuple(range(ranks)), microbatches, costs, memory, pairs=False)
    assert pl.search(ranks, microbatches, costs, memory, iterations=3000).value == pytest.approx(optimum)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 7, 9])
def test_the_optimum_is_proved(seed: int) -> None:
    pytest.importorskip("ortools")
    ranks, microbatches, costs, memory = case(seed)
    optimum = least(tuple(range(ranks)), microbatches, costs, memory, pairs=False)
    result = pl.search(ranks, microbatches, costs, memory, iterations=50, prove=True, time_limit=600)
    assert result.proved
    assert result.value == pytest.approx(optimum)
