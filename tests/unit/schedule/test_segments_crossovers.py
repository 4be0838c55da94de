"""DualPipe against interleaved schedules: the chunks at which they meet, from simulated schedules, not from formulas.

F = I = W = 1 for 1/p of the model. Where pairs gain, half of F and of I is all-to-all, and the pair's time comes out of its
segments: F&B = B = 2. A makespan of interleaved-overlap is a + b / v, so that two simulated ones give a and b.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, segment_costs

RANKS = (4, 8, 16)
HALF = PhaseTimes(0.25, 0.25, 0.5)
HIDDEN = segment_costs([(LayerSegments(HALF, HALF, 0.25, 0.25),)])
COSTS = {"gain": replace(HIDDEN, backward=None), "no gain": Costs(), "B alone hides, too": HIDDEN}


@cache
def run(name: str, ranks: int, chunks: int | None, costs: str) -> Timeline:
    schedule = build(name, ranks, 3 * ranks, chunks)
    return simulate(schedule, COSTS[costs].resized(schedule.ranks / schedule.positions))


def worst(timeline: Timeline) -> float:
    return max(timeline.idle)


def test_a_pair_takes_as_long_as_its_backward() -> None:
    assert (HIDDEN.forward, HIDDEN.input_grad, HIDDEN.weight_grad, HIDDEN.pair) == (1, 1, 1, 2)
    assert HIDDEN.backward == 1.75


@pytest.mark.parametrize(("ranks", "expected"), [(4, 9), (8, 7), (16, 6.43)])
def test_idle_where_pairs_gain(ranks: int, expected: float) -> None:
    """v = 6 (p-1)/(p-2): idle (p/2-1)(F&B + B - 3W) against (p-1)(F+B)/v, and the sign changes there."""
    dualpipe = worst(run("dualpipe", ranks, None, "gain"))
    below, above = int(expected - 0.01), int(expected + 1)
    for name in ("interleaved", "interleaved-overlap"):
        assert worst(run(name, ranks, below, "gain")) > dualpipe > worst(run(name, ranks, above, "gain"))
        meet = below * worst(run(name, ranks, below, "gain")) / dualpipe
        assert meet == pytest.approx(6 * (ranks - 1) / (ranks - 2))
        assert meet == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_where_they_do_not(ranks: int) -> None:
    """v = 3 (p-1)/(p-2): 4.5, 3.5, 3.2."""
    expected = 3 * (ranks - 1) / (ranks - 2)
    dualpipe, below = worst(run("dualpipe", ranks, None, "no gain")), int(expected)
    for name in ("interleaved", "interleaved-overlap"):
        assert worst(run(name, ranks, below, "no gain")) > dualpipe > worst(run(name, ranks, below + 1, "no gain"))
        assert below * worst(run(name, ranks, below, "no gain")) / dualpipe == pytest.approx(expected)
    # nobody gains, so that all do the same work and idle and makespan differ by as much
    gap = run("interleaved", ranks, below, "no gain").makespan - run("dualpipe", ranks, None, "no gain").makespan
    assert gap == pytest.approx(worst(run("interleaved", ranks, below, "no gain")) - dualpipe)


@pytest.mark.parametrize(("ranks", "expected"), [(4, 3), (8, 3.5), (16, 3.75)])
def test_makespan_with_pairs_on_both_sides(ranks: int, expected: float) -> None:
    """v = 4 (p-1)/p, far below the idle times' crossover: dualpipe leaves more forwards and backwards unpaired."""
    dualpipe = run("dualpipe", ranks, None, "gain").makespan
    spans = {v: run("interleaved-overlap", ranks, v, "gain").makespan for v in (2, 3, 4, 8)}
    assert spans[2] > dualpipe > spans[4]
    assert spans[3] == pytest.approx(dualpipe) if ranks == 4 else spans[3] > dualpipe
    slope = (spans[4] - spans[8]) * 8
    assert slope / (dualpipe - (spans[8] - slope / 8)) == pytest.approx(expected)
    assert expected == 4 * (ranks - 1) / ranks
