"""Periodic schedules: their period against the simulator's, their memory, what they unroll to, and what annealing finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.placement import linear, loop, vee
from pipeloom.solver.construct import list_scheduled, sequences_of
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance
from pipeloom.solver.period_search import AnnealingRun, PeriodSearch, modulo_starts, periodic_starts, widened
from pipeloom.solver.periodic import (
    PeriodicSchedule,
    balanced_window,
    modulo_packed,
    periodic_part,
    repeat_period,
    with_repeated_part,
)

COSTS = [Costs(), Costs(10, 12, 8, 1), Costs((3.0, 1.0, 2.0, 5.0), 2.0, (0.0, 1.0, 4.0, 2.0), 0.5, held=0.5)]


def a_start(random: Random, chunks: int = 1, memory_limit: float = 6) -> PeriodicSchedule:
    costs = random.choice(COSTS[: 3 if chunks == 1 else 2])
    place = loop(4, chunks) if chunks == 1 else random.choice([loop, vee, linear])(4, chunks)
    return next(periodic_starts(Instance(tuple(place), 20, costs, memory_limit), ()))


def growth(cyclic: PeriodicSchedule, periods: int = 30) -> float:
    """How much longer the step becomes with one more period, by the plain simulator."""
    each = cyclic.instance.microbatches
    ends = []
    for count in (periods, 2 * periods):
        instance = replace(cyclic.instance, microbatches=each * count)
        timeline = simulate(instance.schedule_of(cyclic.unrolled(instance)), instance.costs)
        ends.append(timeline.makespan)
    return (ends[1] - ends[0]) / periods


@pytest.mark.parametrize("seed", range(8))
def test_the_length_is_what_the_simulator_grows_by(seed: int) -> None:
    random = Random(seed)
    start = a_start(random, random.choice([1, 2]), random.choice([4, 6, 9]))
    if seed % 2:
        start = widened(start, 2)
        assert start.measure()
    walk = AnnealingRun(start, random, 0.3)
    compared = 0
    for step in range(120):
        walk.run(1, 0.0)
        if step % 12 == 0:
            assert walk.now.interval == pytest.approx(growth(walk.now), rel=1e-6)
            compared += 1
    assert compared == 10
    assert walk.interval <= start.work * 20


def test_words_that_wait_for_one_another_have_no_length() -> None:
    """Rank 0 takes its input gradient before the forward that leads to it."""
    instance = Instance((0, 1), 1, Costs(), 9)
    fine = PeriodicSchedule(instance, [[0, 2, 4], [1, 3, 5]], [0] * 6)
    assert fine.measure()
    assert fine.interval == 5  # F F I I W, one micro-batch at a time: the W of rank 0 ends after 5
    assert not PeriodicSchedule(instance, [[2, 0, 4], [1, 3, 5]], [0] * 6).measure()
    ahead = PeriodicSchedule(instance, [[0, 2, 4], [1, 3, 5]], [2, 1, 0, 1, 0, 1])
    assert ahead.measure()
    assert ahead.interval == 3
    assert not fine.measure(most=4.9)


@pytest.mark.parametrize("seed", range(6))
def test_memory_of_full_periods(seed: int) -> None:
    random = Random(seed)
    start = a_start(random, random.choice([1, 2]), 8)
    walk = AnnealingRun(start, random, 0.3)
    walk.run(60, 0.0)
    best = PeriodicSchedule(start.instance, *walk.best)
    instance = replace(start.instance, microbatches=40)
    timeline = simulate(instance.schedule_of(best.unrolled(instance)), instance.costs)
    check(timeline.schedule)
    assert timeline.peak_memory == pytest.approx([best.peak(rank) for rank in range(instance.ranks)])
    assert max(timeline.peak_memory) <= 8
    assert best.fits


@pytest.mark.parametrize("seed", range(4))
def test_annealing_passes_through_too_much_memory_and_keeps_what_fits(seed: int) -> None:
    """Two micro-batches of memory on four ranks: on the way to a shorter period it holds more, and the best holds no more."""
    instance = Instance((0, 1, 2, 3), 1, Costs(10, 12, 8, 1), 2)
    start = widened(next(modulo_starts(instance)), 3)
    assert start.measure()
    before, over = start.interval, []
    walk = AnnealingRun(start, Random(seed), 0.3)
    walk.run(400, 0.0, lambda done: over.append(walk.over) or True)
    assert max(over) > 0
    assert PeriodicSchedule(start.instance, *walk.best).fits
    assert walk.interval <= before


def test_a_mutated_shift_is_seen() -> None:
    """The length and the memory follow the shifts: one forward that runs ahead by one more period holds one more."""
    start = a_start(Random(1), memory_limit=9)
    before = start.peak(0)
    start.shift[0] += 1
    start.link(0)
    assert start.peak(0) == before + 1
    start.shift[0] -= 9
    start.link(0)
    assert not start.measure()


def test_widened_sequences_are_the_same_sequences() -> None:
    start = a_start(Random(2), 2, 7)
    assert start.measure()
    wide = widened(start, 3)
    assert wide.measure()
    assert wide.interval == pytest.approx(3 * start.interval)
    instance = replace(start.instance, microbatches=12)
    assert wide.unrolled(instance) == start.unrolled(instance)


@pytest.mark.parametrize("seed", range(20))
def test_even_stretch_is_the_nearest_to_the_middle(seed: int) -> None:
    random = Random(seed)
    operation_types = [random.randrange(3) for _ in range(24)] + [0, 1, 2]
    for each in (1, 2, 3):
        size = each * len(set(operation_types))
        fitting = [
            at
            for at in range(len(operation_types) - size + 1)
            if all(
                operation_types[at : at + size].count(operation_type) == each for operation_type in set(operation_types)
            )
        ]
        found = balanced_window(operation_types, each)
        assert (found is None) == (not fitting)
        if found is not None:
            away = [abs(2 * at + size - len(operation_types)) for at in fitting]
            assert abs(2 * found + size - len(operation_types)) == min(away)


def test_a_stretch_of_1f1b_repeats_as_1f1b() -> None:
    small = Instance((0, 1, 2, 3), 12, Costs(), 4)
    sequences = sequences_of(small, build("1f1b", 4, 12))
    part = periodic_part(small, sequences, 1)
    assert part is not None
    assert part.measure()
    assert part.interval == 3
    instance = replace(small, microbatches=50)
    for longer in (with_repeated_part(small, sequences, 2, instance), repeat_period(small, sequences, instance)):
        assert longer == sequences_of(instance, build("1f1b", 4, 50))
    assert with_repeated_part(small, sequences, 13, instance) is None


def test_repeated_words_keep_their_ends() -> None:
    costs = Costs(10, 12, 8, 1)
    small = Instance((0, 1, 2, 3), 16, costs, 4)
    sequences, _ = next(list_scheduled(small))
    instance = replace(small, microbatches=16 + 24)
    longer = repeat_period(small, sequences, instance)
    assert longer is not None
    assert instance.fits(longer)
    check(instance.schedule_of(longer))
    short, long_ = evaluate(small, sequences), evaluate(instance, longer)
    assert short is not None
    assert long_ is not None
    assert long_.value <= short.value + 24 * 30 * 1.2


@pytest.mark.slow
def test_annealing_beats_the_families_at_half_of_the_memory() -> None:
    """p = 8, m = 32, two chunks, 10 : 12 : 8: the best family (v-min) takes 2616, one period searched for a second 2422."""
    instance = Instance(tuple(vee(8, 2)), 32, Costs(10, 12, 8, 1), 8)
    family = simulate(pl.schedules.v_min(8, 32, costs=instance.costs), instance.costs)
    assert family.makespan == 2616
    seeds = []
    for count, (sequences, _) in enumerate(list_scheduled(instance)):
        found = evaluate(instance, sequences)
        assert found is not None
        seeds.append((found.value, count, sequences))
    search = PeriodSearch(instance, Random(0), [(instance, sequences) for _, _, sequences in sorted(seeds)[:3]])
    search.run(lambda: search.work < 400_000)
    assert search.best is not None
    assert instance.fits(search.best)
    assert search.value <= 2500
    ended = simulate(instance.schedule_of(search.best), instance.costs)
    assert ended.makespan == pytest.approx(search.value)
    again = PeriodSearch(instance, Random(0), [(instance, sequences) for _, _, sequences in sorted(seeds)[:3]])
    again.run(lambda: again.work < 400_000)
    assert again.best == search.best


def test_packed_words_hold_one_micro_batch_when_the_period_is_long() -> None:
    instance = Instance((0, 1, 2), 1, Costs(2, 3, 1, 0.5), 1)
    slow = modulo_packed(instance, 30.0)
    assert slow.fits
    assert slow.measure()
    assert slow.interval <= 30.0
    fast = modulo_packed(instance, 6.0)
    assert not fast.fits
