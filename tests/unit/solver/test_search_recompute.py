"""The search for what to recompute: its tables against simulation, its choice against exact answers and named schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.costs import activation_limit
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import recompute
from pipeloom.solver.construct import sequences_of
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.in_bytes import search_in_bytes
from pipeloom.solver.instance import Instance, Recomputation
from pipeloom.solver.recompute import choices_of, moved, recomputed_for, with_whole_backwards

# Norms save half of 94, whole stages 94 beyond the 6 of their inputs; W needs 80; the largest layer saves 20.
BYTES = {
    "saved": 94,
    "kept": 6,
    "saved:norms": 47,
    "saved:mlp": (20, 10, 20, 10),
    "pending": 80,
    "layer": 20,
    "forward": (30, 120, 30, 30),
}
COSTS = Costs((1, 2, 1, 2), 1.5, 1, recompute=(0.5, 2, 1, 1), parts={"norms": 0.25}, bytes=BYTES, p2p=0.125)


@pytest.mark.parametrize(("name", "limit", "whole"), [("1f1b", 400, False), ("zb-h1", 560, False), ("1f1b", 300, True)])
def test_tables_say_what_simulation_says(name: str, limit: float, whole: bool) -> None:
    """Makespan and memory of each way to recompute, also of micro-batches of two lengths; each is needed to fit."""
    costs, (memory, *_) = activation_limit(replace(COSTS, microbatch=(1.0, 2.0) * 3), limit, range(4))
    plain = Instance((0, 1, 2, 3), 6, costs, memory)
    order = sequences_of(plain, build(name, 4, 6))
    values = set()
    for choices in choices_of(costs, 4):
        sequences = with_whole_backwards(plain, order) if whole else order
        recomputed = recomputed_for(plain, sequences, choices)
        assert recomputed
        instance = replace(plain, recomputed=recomputed)
        sequences = moved(sequences, plain, instance)
        schedule = instance.schedule_of(sequences)
        check(schedule)
        timeline = simulate(schedule, costs)
        evaluation = evaluate(instance, sequences)
        assert evaluation is not None
        assert evaluation.value == pytest.approx(timeline.makespan)
        assert tuple(map(instance.peak, sequences)) == pytest.approx(timeline.peak_memory)
        assert max(timeline.peak_memory) <= memory < plain.peak(order[0])
        assert timeline.peak_bytes["device"] == pytest.approx(timeline.peak_memory)
        values.add(evaluation.value)
    assert len(values) > 2


def test_parts_inside_each_other_are_not_recomputed_together() -> None:
    """Of 94 that are saved, `mlp` is 50, and 47 of these may be `norms`; two of the ways recompute all parts."""
    overlapping = replace(COSTS, bytes=BYTES | {"saved:mlp": 50})
    for costs, letters in ((COSTS, {1, 2}), (overlapping, {1})):
        parted = [way.letters for choices in choices_of(costs, 4) for way in choices[0] if way.letters != ("R",)]
        assert {len(each) for each in parted if each} == letters


def test_the_backward_that_is_farthest_away_is_recomputed() -> None:
    """Four micro-batches before the first backward, and room for three: the last one's backward comes last."""
    instance = Instance((0,), 4, Costs(recompute=1), 3)
    sequences = sequences_of(instance, build("gpipe", 1, 4))
    whole, *_ = choices_of(instance.costs, 1)
    recomputed = recomputed_for(instance, sequences, whole)
    assert recomputed is not None
    assert [node for node, _ in recomputed] == [3]
    assert recomputed_for(replace(instance, memory_limit=0.5), sequences, whole) is None


def test_a_part_that_is_not_enough_gives_way_to_the_whole_stage() -> None:
    """A forward takes 1 while it runs without the part, and 0.2 while it saves nothing."""
    instance = Instance((0,), 1, Costs(held=0, recompute=1), 0.4)
    part, block = Recomputation(("R:norms",), 0.1, 0.3, 0.3, 0.3), Recomputation((), 1, 0.9, 0.2, 0.1)
    sequences = sequences_of(instance, build("gpipe", 1, 1))
    assert recomputed_for(instance, sequences, ((part, block),)) == ((0, block),)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs", "exact"),
    [  # the least over all sets of micro-batches, each solved by constraint programming: `benchmarks/recompute.py --exact`
        (2, 2, Costs(recompute=1, kept=0.1), 8),
        (2, 2, Costs(2, recompute=1, kept=0.1), 11),
        (2, 3, Costs(recompute=1, kept=0.2, p2p=0.5), 13),
        (3, 2, Costs(recompute=0.5, kept=0.1), 10),
    ],
)
def test_small_cases_are_as_short_as_exact_ones(ranks: int, microbatches: int, costs: Costs, exact: float) -> None:
    result = pl.search(ranks, microbatches, costs, memory=1.3, iterations=40)
    check(result.schedule)
    assert result.value == exact
    assert result.lower_bound <= exact
    assert max(simulate(result.schedule, costs).peak_memory) <= 1.3
    without = pl.search(ranks, microbatches, replace(costs, recompute=None), memory=1.3, iterations=40)
    assert without.value > exact


def test_never_longer_than_named_schedules_that_fit() -> None:
    """At half of the memory of 1F1B, with the layer's bytes, where none fits without recomputation."""
    costs, (memory, *_) = activation_limit(COSTS, 200.0, range(4))
    assert memory == 200  # nothing stands for the whole step
    result = pl.search(4, 4, costs, memory=memory, iterations=20)
    names = ("1f1b", "zb-h1", "gpipe")
    parts = [recompute(recompute(build(name, 4, 4), part="mlp"), part="norms") for name in names]
    ways = [*parts, *(recompute(build(name, 4, 4), whole) for name in names for whole in (False, True))]
    timelines = [simulate(schedule, costs) for schedule in ways]
    fitting = [timeline.makespan for timeline in timelines if max(timeline.peak_memory) <= memory]
    assert fitting
    assert result.value <= min(fitting)
    assert result.timeline.peak_bytes["device"] == pytest.approx(result.timeline.peak_memory)
    assert any(cell[1:2] == "R" or cell.startswith("(") for row in result.schedule.programs for cell in map(str, row))
    with pytest.raises(CapacityError, match="memory is 20; no schedule was found that fits it, not with"):
        pl.search(4, 4, costs, memory=20.0, iterations=20)


def test_a_whole_backward_in_blocks_fits_where_what_waits_for_w_does_not() -> None:
    """Two layers of 11 a stage: a block of a B holds one of them, and an I leaves 18 of both."""
    costs = Costs(recompute=1, bytes={"saved": 22, "kept": 1, "layer": 11, "pending": 18})
    named = simulate(recompute(build("1f1b", 2, 4)), costs)
    (memory, _) = named.peak_bytes["device"]
    assert search_in_bytes(2, 4, costs, memory, chunks=1, iterations=0).value == named.makespan
