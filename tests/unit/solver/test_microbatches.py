"""Micro-batches that differ: the simulator, bounds against every order there is, the search, the options."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, UsageError
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.costs import PairTimes
from pipeloom.schedule.families import build
from pipeloom.solver.search import microbatch_orders


def test_a_factor_scales_times_memory_and_message() -> None:
    costs = Costs(2, 3, 1, p2p=1, message=4, bandwidth=2, microbatch=(1, 3))
    timeline = simulate(pl.schedules.gpipe(2, 2), costs)
    # F0 0..2, F1 2..8; on rank 1 F0 arrives at 2 + 1 + 2, F1 at 8 + 1 + 3*2
    assert timeline.starts[0][:2] == (0, 2)
    assert timeline.starts[1][:2] == (5, 15)
    assert timeline.busy == (24, 24)
    assert timeline.peak_memory == (4, 4)
    assert [level for _, level in timeline.memory_curve[0]] == [1, 4, 3, 0]


def test_pairs_of_different_microbatches() -> None:
    shared = PairTimes.of(Costs(1, 1, 0.5, all_to_all=0.5), 1)
    assert shared.time(0, 0, False, (2, 1)) == max(2 * 0.5 + 0.5 + 0.5, 2 * 0.5 + 0.5)
    assert shared.time(0, 0, True, (2, 1)) == max(2 * 0.5 + 0.5, 1.5)
    given = PairTimes.of(Costs(1, 1, 1, pair=2.0), 1)  # gains 1 of 3
    assert given.time(0, 0, False, (2, 1)) == 2 + 2 - 1
    assert given.time(0, 0, False, (2, 2)) == 4
    plain = PairTimes.of(Costs(), 1)
    assert plain.time(0, 0, False, (3, 1)) == 3 + 2
    with pytest.raises(UsageError, match=r"^microbatch has 2 values"):
        simulate(pl.schedules.gpipe(2, 3), Costs(microbatch=(1, 2)))


def test_another_order_of_the_microbatches_is_found() -> None:
    """Long ones at both ends make a long warm-up and cool-down: short ones belong there."""
    factors = (4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0)
    costs = Costs(microbatch=factors)
    found = pl.search(4, 8, costs, 20, iterations=300)
    kept = simulate(build("zb-h2", 4, 8), costs)
    assert found.value < kept.makespan - 1
    order = [action.microbatch for action in found.schedule.programs[0] if action.kind == "F"]  # type: ignore[union-attr]
    assert factors[order[0]] == 1


def test_orders() -> None:
    assert microbatch_orders((1.0, 1.0, 1.0)) == [()]
    assert microbatch_orders((1.0, 2.0)) == [(), (1, 0)]
    assert (0, 2, 3, 1) in microbatch_orders((1.0, 2.0, 3.0, 4.0))


def test_what_is_refused() -> None:
    uneven = Costs(microbatch=(1, 2, 1, 1))
    with pytest.raises(UsageError, match="prove requires equal micro-batches"):
        pl.search(2, 4, uneven, prove=True)
    with pytest.raises(UsageError, match="pairs require equal"):
        pl.search(2, 4, uneven, pairs=True)
    with pytest.raises(UsageError, match="give 5"):
        pl.search(2, 5, uneven)
    with pytest.raises(CapacityError, match="takes 2"):
        pl.search(2, 4, uneven, memory=1.5)
