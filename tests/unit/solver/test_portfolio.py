"""The portfolio of walks: a larger budget continues a smaller one, and restarts leave the basins of the warm starts."""

from __future__ import annotations

from typing import Any

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_more_moves_are_never_worse(seed: int) -> None:
    costs = Costs(10, 12, 8, 2)
    values = [
        pl.search(4, 8, costs, 4, placement="loop", chunks=2, seed=seed, iterations=moves).value
        for moves in (0, 150, 700, 1000, 2500)
    ]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


WHOLE = Costs(
    (4.0, 6.0, 3.0, 7.0, 4.0, 2.0, 8.0, 8.0),
    (3.0, 3.0, 4.0, 7.0, 9.0, 9.0, 8.0, 5.0),
    (5.0, 7.0, 7.0, 7.0, 8.0, 3.0, 10.0, 9.0),
    p2p=1.0,
    backward=(6.6, 7.9, 8.8, 11.1, 13.0, 9.6, 16.3, 11.4),
)
PAIRED = Costs(3, 3, 2, 1, all_to_all=0.5)


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ({"ranks": 4, "microbatches": 5, "costs": WHOLE, "memory": 4, "placement": "vee", "chunks": 2}, 20),
        ({"ranks": 3, "microbatches": 4, "costs": PAIRED, "memory": 3, "pairs": True}, 0),
    ],
    ids=["whole backwards", "pairs"],
)
def test_merging_backwards_makes_no_search_worse_than_a_shorter_one(arguments: dict[str, Any], seed: int) -> None:
    values = [pl.search(**arguments, seed=seed, iterations=moves).value for moves in (0, 15, 40)]
    assert values == sorted(values, reverse=True)


def test_a_restart_finds_what_no_warm_start_leads_to() -> None:
    best = pl.search(4, 8, Costs(10, 12, 8, 2), 4, placement="loop", chunks=2, seed=3, iterations=2000)
    assert best.value == 754
