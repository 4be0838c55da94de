"""The search over cuts for a limit in bytes, against all cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError
from pipeloom.solver.cuts import cut_costs
from pipeloom.solver.in_bytes import search_cuts_in_bytes, search_in_bytes

TIMES = (1.0, 1.0, 1.0, 1.0, 1.0, 3.0)  # a head of three blocks
LAYERS = pl.Costs(
    TIMES, TIMES, TIMES, recompute=TIMES, bytes={"saved": 90, "kept": 10, "layer": 90, "params": (5, 5, 5, 5, 5, 500)}
)
ALL = [(a, 6 - a) for a in range(2, 6)]  # with one layer and five, nothing fits


def costs_of(cut: tuple[int, ...]) -> pl.Costs:
    return cut_costs(LAYERS, cut)


def test_the_best_cut_is_reached_layer_by_layer() -> None:
    values = {cut: search_in_bytes(2, 4, costs_of(cut), 1000.0, placement="linear", iterations=20).value for cut in ALL}
    cut, result = search_cuts_in_bytes(
        (1, 5), costs_of, 2, 4, 1000.0, placement="linear", iterations=20, time_limit=600.0
    )
    assert (cut, result.value) == (min(values, key=values.__getitem__), min(values.values()))
    assert cut != (1, 5)
    assert max(result.timeline.peak_bytes["device"]) <= 1000


def test_the_bound_holds_on_every_placement() -> None:
    costs, limits = costs_of((2, 1, 1, 2)), {"iterations": 5, "chunks": 2}
    every = search_in_bytes(2, 3, costs, 2000.0, **limits)
    each = [search_in_bytes(2, 3, costs, 2000.0, placement=name, **limits) for name in ("linear", "loop", "vee")]
    bounds = [result.lower_bound for result in each]
    assert min(bounds) < max(bounds)
    assert every.lower_bound == min(bounds)


def test_a_cut_that_does_not_fit_leads_to_one_that_does() -> None:
    """The head's weights leave room for one layer beside it."""
    heavy = replace(LAYERS, bytes=dict(LAYERS.bytes) | {"params": (5.0, 100.0, 100.0, 100.0, 100.0, 300.0)})

    def costs(cut: tuple[int, ...]) -> pl.Costs:
        return cut_costs(heavy, cut)

    with pytest.raises(CapacityError):
        search_in_bytes(2, 2, costs((3, 3)), 530.0, placement="linear", iterations=5)
    cut, _ = search_cuts_in_bytes((3, 3), costs, 2, 2, 530.0, placement="linear", iterations=5, time_limit=600.0)
    assert cut == (4, 2)
    with pytest.raises(CapacityError, match="stands for the whole step"):
        search_cuts_in_bytes((3, 3), costs, 2, 2, 400.0, placement="linear", iterations=5, time_limit=0.5)
