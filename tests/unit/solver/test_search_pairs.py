"""The search over pairs: known figures, limits kept, nothing worse than a family, and bounds that hold."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families import build
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, segment_costs
from pipeloom.solver.bounds import pairs_gain
from pipeloom.solver.instance import Instance


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most", "proved"), [(0.3, 73.8, False), (0.5, 57.75, True)], ids=["x=.3", "x=.5"])
def test_ahead_of_interleaved_overlap_and_dualpipe(share: float, most: float, proved: bool) -> None:
    """p = 8, m = 32, v = 4, interleaved-overlap's memory; all in full-rank units."""
    full = Costs(1, 1, 1 - share, all_to_all=share)
    families = {
        name: simulate(build(name, 8, 32, chunks), full.resized(1 / (chunks or 1) if name != "dualpipev" else 0.5))
        for name, chunks in (("dualpipe", None), ("dualpipev", None), ("interleaved-overlap", 4))
    }
    overlap = families["interleaved-overlap"]
    assert overlap.makespan < min(families["dualpipe"].makespan, families["dualpipev"].makespan)
    assert (len(families["dualpipe"].schedule.routes), len(overlap.schedule.routes)) == (2, 1)
    found = pl.search(
        8, 32, full.resized(0.25), memory=40 * 0.25, placement="loop", chunks=4, pairs=True, iterations=50
    )
    check(found.schedule)
    assert found.value <= most + TIME_TOLERANCE
    assert found.value < overlap.makespan - 0.8
    assert max(found.timeline.peak_activations) <= max(overlap.peak_activations) == 40
    assert len(found.schedule.routes) == 1
    assert found.schedule.has_pairs
    assert found.lower_bound <= found.value
    assert found.proved == proved


def test_stages_that_differ_and_segments() -> None:
    """Pair times by both stages, a B and an F|B that hide what F|I and W do not: taken where they are shorter."""
    layers = [LayerSegments(PhaseTimes(1, 1, 1), PhaseTimes(1, 1, 1), x, x) for x in (0.2, 1.5, 1.8, 1.1)]
    costs = segment_costs([(layer,) for layer in layers], p2p=0.1)
    found = pl.search(2, 8, costs, 8, placement="loop", chunks=2, pairs=True, iterations=300)
    check(found.schedule)
    family = simulate(build("interleaved-overlap", 2, 8, 2), costs)
    assert max(family.peak_memory) <= 8
    assert found.value < family.makespan
    assert found.lower_bound <= found.value


def test_where_no_pair_gains_it_is_the_other_search() -> None:
    assert not pairs_gain(Instance(tuple(range(4)), 8, Costs(), 3))
    found = pl.search(4, 8, memory=3, pairs=True, iterations=500)
    assert found.schedule == pl.search(4, 8, memory=3, iterations=500).schedule
