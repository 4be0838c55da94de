"""The portfolio of walks: a larger budget continues a smaller one, and restarts leave the basins of the warm starts."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs


@pytest.mark.parametrize("seed", [1, 2])
def test_more_moves_are_never_worse(seed: int) -> None:
    costs = Costs(10, 12, 8, 2)
    values = [
        pl.search(4, 8, costs, 4, placement="loop", chunks=2, seed=seed, iterations=moves).value
        for moves in (0, 150, 700, 1000, 2500)
    ]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


def test_a_restart_finds_what_no_warm_start_leads_to() -> None:
    best = pl.search(4, 8, Costs(10, 12, 8, 2), 4, placement="loop", chunks=2, seed=3, iterations=2000)
    assert best.value == 754
