"""Micro-batches that differ: the simulator, bounds against every order there is, the search, the options."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from random import Random

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.bounds import memory_bound, work_bound
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


def every_program(stages: list[int], m: int) -> Iterator[list[str]]:
    """All orders of F, I and W of these stages and micro-batches on one rank in which I follows F and W follows I."""
    actions = [f"{stage}{kind}{mb}" for stage in stages for kind in "FIW" for mb in range(m)]
    for order in permutations(actions):
        place = {action: at for at, action in enumerate(order)}
        if all(place[f"{s}F{mb}"] < place[f"{s}I{mb}"] < place[f"{s}W{mb}"] for s, mb in product(stages, range(m))):
            yield list(order)


@pytest.mark.parametrize("factors", [(1.0, 2.0), (3.0, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("costs", [Costs(3, 2, 1, 1), Costs((1.0, 4.0), (2.0, 1.0), (0.5, 3.0), 0.5, held=0.5)])
def test_no_bound_is_above_the_best_of_all_schedules(factors: tuple[float, float], costs: Costs) -> None:
    """Two ranks, two micro-batches: all 20 x 20 pairs of programs; the bounds for every memory that some of them reach."""
    costs = Costs(costs.forward, costs.input_grad, costs.weight_grad, costs.p2p, held=costs.held, microbatch=factors)
    programs = [list(every_program([stage], 2)) for stage in (0, 1)]
    assert [len(own) for own in programs] == [20, 20]
    best: dict[float, tuple[float, float]] = {}
    for first, second in product(*programs):
        try:
            timeline = simulate(Schedule.of([first, second], placement=(0, 1), microbatches=2), costs)
        except ScheduleError:
            continue
        peak = max(timeline.peak_memory)
        makespan, span = best.get(peak, (float("inf"), float("inf")))
        best[peak] = min(makespan, timeline.makespan), min(span, max(timeline.spans))
    for peak, (makespan, span) in best.items():
        assert memory_bound((0, 1), 2, costs, peak) <= makespan + 1e-9
        assert memory_bound((0, 1), 2, costs, peak, "span") <= span + 1e-9
        assert work_bound((0, 1), 2, costs) <= makespan + 1e-9
        assert work_bound((0, 1), 2, costs, "span") <= span + 1e-9
    least = min(makespan for makespan, _ in best.values())
    found = pl.search(2, 2, costs, iterations=200)
    assert found.lower_bound <= least + 1e-9
    assert found.value == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [True, False])
def test_the_search_is_never_worse_than_the_families(seed: int, overlap: bool) -> None:
    random = Random(seed)
    m = random.randint(5, 9)
    factors = tuple(round(random.uniform(0.5, 3), 2) for _ in range(m))
    costs = Costs(10, 12, 8, 2, microbatch=factors)
    memory = 3 * max(factors)
    found = pl.search(3, m, costs, memory, iterations=100, overlap_p2p=overlap)
    check(found.schedule)
    assert max(found.timeline.peak_memory) <= memory + 1e-9
    again = simulate(found.schedule, costs, overlap_p2p=overlap)
    assert again.makespan == pytest.approx(found.value)
    assert found.value >= found.lower_bound
    fitting = []
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        timeline = simulate(build(name, 3, m), costs, overlap_p2p=overlap)
        if max(timeline.peak_memory) <= memory + 1e-9:
            fitting.append(timeline.makespan)
    assert fitting
    assert found.value <= min(fitting) + 1e-9


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
