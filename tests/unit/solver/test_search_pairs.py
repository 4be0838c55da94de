"""The search over pairs: known figures, limits kept, nothing worse than a family, and bounds that hold."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families import build
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, SegmentCosts
from pipeloom.solver.bounds import pair_bound, pairs_gain
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance

ONE_ROUTE = (
    "1f1b",
    "zb-h1",
    "zb-h2",
    "1f1b-overlap",
    "interleaved",
    "interleaved-zb",
    "interleaved-overlap",
    "zbv",
    "v-half",
    "dualpipev",
)


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


@pytest.mark.slow
@pytest.mark.parametrize("memory", [3, 6, 8.5, 12])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_never_worse_than_a_family(memory: float, chunks: int, share: float) -> None:
    costs = Costs(1, 1.2, 0.8, 0.1, all_to_all=share)
    found = pl.search(4, 10, costs, memory, chunks=chunks, pairs=True, iterations=30)
    check(found.schedule)
    assert simulate(found.schedule, costs).makespan == pytest.approx(found.value)
    assert max(found.timeline.peak_memory) <= memory + TIME_TOLERANCE
    assert found.lower_bound <= found.value + TIME_TOLERANCE
    compared = 0
    for name in ONE_ROUTE:
        if chunks == 1 and build(name, 4, 10).chunks > 1:
            continue
        timeline = simulate(made := build(name, 4, 10), costs)
        if made.chunks == chunks and max(timeline.peak_memory) <= memory + TIME_TOLERANCE:
            assert found.value <= timeline.makespan + TIME_TOLERANCE
            compared += 1
    assert compared or memory < 4


def test_stages_that_differ_and_segments() -> None:
    """Pair times by both stages, a B and an F|B that hide what F|I and W do not: taken where they are shorter."""
    layers = [LayerSegments(PhaseTimes(1, 1, 1), PhaseTimes(1, 1, 1), x, x) for x in (0.2, 1.5, 1.8, 1.1)]
    costs = SegmentCosts(tuple((layer,) for layer in layers)).costs(p2p=0.1)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "costs",
    [
        Costs(weight_grad=0.7, all_to_all=0.3),
        Costs(1, 1.5, 0.5, 0.2, all_to_all=0.8),
        Costs(3, 1, 0.2, all_to_all=0.9),
        Costs(pair=2.0),
        Costs(2, 1, 1, 0.5, pair=3.2, pair_split=2.5, backward=1.5),
        SegmentCosts.uniform(LayerSegments(dispatch=1.5, combine=1.5)).costs(p2p=0.25),
    ],
)
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_bound_is_below_every_family(costs: Costs, objective: str) -> None:
    tried = 0
    for name, p, m in product(ONE_ROUTE, (2, 4), (4, 8, 13)):
        try:
            made = build(name, p, m)
        except PipeloomError:
            continue
        timeline = simulate(made, costs)
        reached = timeline.makespan if objective == "makespan" else max(timeline.spans)
        for memory_limit in (max(timeline.peak_memory), 1e9):
            assert pair_bound(Instance(made.placement, m, costs, memory_limit, objective)) <= reached + 1e-6  # type: ignore[arg-type]
        tried += 1
    assert tried > 40


def all_rows(instance: Instance, rank: int) -> list[list[int]]:
    """Every row of a rank that holds one stage, two micro-batches."""
    blocks = instance.table
    nodes = [node for node in range(blocks.none) if blocks.rank[node] == rank]
    found: list[list[int]] = []

    def grow(row: list[int], left: list[int]) -> None:
        if not left:
            found.append(row)
        for node in left:
            if (node % 2 and node - 1 in left) or (node >= 2 * blocks.stride and node - blocks.stride in left):
                continue
            rest = [other for other in left if other != node]
            grow([*row, node], rest)
            if blocks.stride <= node < 2 * blocks.stride:
                if node + blocks.stride in rest:
                    grow([*row, blocks.backward(node)], [n for n in rest if n != node + blocks.stride])
                for mate in (n for n in rest if n < blocks.stride and not (n % 2 and n - 1 in rest)):
                    grow([*row, blocks.pair(mate, node, False)], [n for n in rest if n != mate])
                    gone = (mate, node + blocks.stride)
                    grow([*row, blocks.pair(mate, node, True)], [n for n in rest if n not in gone])

    grow([], nodes)
    return [row for row in found if instance.peak(row) <= instance.memory_limit + TIME_TOLERANCE]


@pytest.mark.parametrize("case", range(8))
def test_against_every_schedule_there_is(case: int) -> None:
    """Two ranks, two micro-batches: no row of any kind beats the bound, and the search finds the best."""
    random = Random(case)
    times = [random.choice([0.5, 1.0, 1.5]) for _ in range(3)]
    more = {"pair": 1.8, "pair_split": 1.2} if case == 7 else {"all_to_all": random.choice([0.3, 0.5, 0.8])}
    costs = Costs(*times, random.choice([0.0, 0.25]), **more)  # type: ignore[arg-type]
    instance = Instance((0, 1), 2, costs, random.choice([1.0, 2.0]))
    values = (evaluate(instance, list(rows)) for rows in product(all_rows(instance, 0), all_rows(instance, 1)))
    best = min(found.value for found in values if found is not None)
    assert pair_bound(instance) <= best + TIME_TOLERANCE
    found = pl.search(2, 2, costs, instance.memory_limit, pairs=True, iterations=300)
    assert found.value == pytest.approx(best)
