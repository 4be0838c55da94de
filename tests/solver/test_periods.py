"""Cyclic words: their period against the simulator's, their memory, what they unroll to, and what annealing finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.families import build
from pipeloom.solver.anneal import Walk
from pipeloom.solver.cyclic import Cyclic
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.extended import even_stretch, extended, repeated, stretch_of
from pipeloom.solver.modulo import packed
from pipeloom.solver.periods import Periods, starts_of, widened
from pipeloom.solver.placements import linear, loop_placement, vee
from pipeloom.solver.problem import Problem
from pipeloom.solver.seeds import grown, words_of

COSTS = [Costs(), Costs(10, 12, 8, 1), Costs((3.0, 1.0, 2.0, 5.0), 2.0, (0.0, 1.0, 4.0, 2.0), 0.5, held=0.5)]


def a_start(random: Random, chunks: int = 1, room: float = 6) -> Cyclic:
    costs = random.choice(COSTS[: 3 if chunks == 1 else 2])
    place = loop_placement(4, chunks) if chunks == 1 else random.choice([loop_placement, vee, linear])(4, chunks)
    return next(starts_of(Problem(tuple(place), 20, costs, room), ()))


def growth(cyclic: Cyclic, periods: int = 30) -> float:
    """How much longer the step becomes with one more period, by the plain simulator."""
    each = cyclic.problem.microbatches
    ends = []
    for count in (periods, 2 * periods):
        problem = replace(cyclic.problem, microbatches=each * count)
        timeline = simulate(problem.schedule_of(cyclic.unrolled(problem)), problem.costs)
        ends.append(timeline.makespan)
    return (ends[1] - ends[0]) / periods


@pytest.mark.parametrize("seed", range(8))
def test_the_length_is_what_the_simulator_grows_by(seed: int) -> None:
    random = Random(seed)
    start = a_start(random, random.choice([1, 2]), random.choice([4, 6, 9]))
    if seed % 2:
        start = widened(start, 2)
        assert start.measure()
    walk = Walk(start, random, 0.3)
    compared = 0
    for step in range(120):
        walk.run(1, 0.0)
        if step % 12 == 0:
            assert walk.now.length == pytest.approx(growth(walk.now), rel=1e-6)
            compared += 1
    assert compared == 10
    assert walk.length <= start.work * 20


def test_words_that_wait_for_one_another_have_no_length() -> None:
    """Rank 0 takes its input gradient before the forward that leads to it."""
    problem = Problem((0, 1), 1, Costs(), 9)
    fine = Cyclic(problem, [[0, 2, 4], [1, 3, 5]], [0] * 6)
    assert fine.measure()
    assert fine.length == 5  # F F I I W, one micro-batch at a time: the W of rank 0 ends after 5
    assert not Cyclic(problem, [[2, 0, 4], [1, 3, 5]], [0] * 6).measure()
    ahead = Cyclic(problem, [[0, 2, 4], [1, 3, 5]], [2, 1, 0, 1, 0, 1])
    assert ahead.measure()
    assert ahead.length == 3
    assert not fine.measure(most=4.9)


@pytest.mark.parametrize("seed", range(6))
def test_memory_of_full_periods(seed: int) -> None:
    random = Random(seed)
    start = a_start(random, random.choice([1, 2]), 8)
    walk = Walk(start, random, 0.3)
    walk.run(60, 0.0)
    best = Cyclic(start.problem, *walk.best)
    problem = replace(start.problem, microbatches=40)
    timeline = simulate(problem.schedule_of(best.unrolled(problem)), problem.costs)
    check(timeline.schedule)
    assert timeline.peak_memory == pytest.approx([best.peak(rank) for rank in range(problem.ranks)])
    assert max(timeline.peak_memory) <= 8
    assert best.fits


def test_a_mutated_shift_is_seen() -> None:
    """The length and the memory follow the shifts: one forward that runs ahead by one more period holds one more."""
    start = a_start(Random(1), room=9)
    before = start.peak(0)
    start.shift[0] += 1
    start.link(0)
    assert start.peak(0) == before + 1
    start.shift[0] -= 9
    start.link(0)
    assert not start.measure()


def test_widened_words_are_the_same_words() -> None:
    start = a_start(Random(2), 2, 7)
    assert start.measure()
    wide = widened(start, 3)
    assert wide.measure()
    assert wide.length == pytest.approx(3 * start.length)
    problem = replace(start.problem, microbatches=12)
    assert wide.unrolled(problem) == start.unrolled(problem)


@pytest.mark.parametrize("seed", range(20))
def test_even_stretch_is_the_nearest_to_the_middle(seed: int) -> None:
    random = Random(seed)
    letters = [random.randrange(3) for _ in range(24)] + [0, 1, 2]
    for each in (1, 2, 3):
        size = each * len(set(letters))
        fitting = [
            at
            for at in range(len(letters) - size + 1)
            if all(letters[at : at + size].count(letter) == each for letter in set(letters))
        ]
        found = even_stretch(letters, each)
        assert (found is None) == (not fitting)
        if found is not None:
            away = [abs(2 * at + size - len(letters)) for at in fitting]
            assert abs(2 * found + size - len(letters)) == min(away)


def test_a_stretch_of_1f1b_repeats_as_1f1b() -> None:
    small = Problem((0, 1, 2, 3), 12, Costs(), 4)
    words = words_of(small, build("1f1b", 4, 12))
    stretch = stretch_of(small, words, 1)
    assert stretch is not None
    assert stretch.measure()
    assert stretch.length == 3
    problem = replace(small, microbatches=50)
    for longer in (repeated(small, words, 2, problem), extended(small, words, problem)):
        assert longer == words_of(problem, build("1f1b", 4, 50))
    assert repeated(small, words, 13, problem) is None


def test_repeated_words_keep_their_ends() -> None:
    costs = Costs(10, 12, 8, 1)
    small = Problem((0, 1, 2, 3), 16, costs, 4)
    seed = next(iter(grown(small)))
    problem = replace(small, microbatches=16 + 24)
    longer = extended(small, seed.words, problem)
    assert longer is not None
    assert problem.fits(longer)
    check(problem.schedule_of(longer))
    short, long_ = evaluate(small, seed.words), evaluate(problem, longer)
    assert short is not None
    assert long_ is not None
    assert long_.value <= short.value + 24 * 30 * 1.2


def test_annealing_beats_the_families_at_half_of_the_memory() -> None:
    """p = 8, m = 32, two chunks, 10 : 12 : 8: the best family (v-min) takes 2620, one period searched for a second 2422."""
    problem = Problem(tuple(vee(8, 2)), 32, Costs(10, 12, 8, 1), 8)
    family = simulate(pl.schedules.v_min(8, 32, costs=problem.costs), problem.costs)
    assert family.makespan == 2620
    seeds = []
    for count, seed in enumerate(grown(problem)):
        found = evaluate(problem, seed.words)
        assert found is not None
        seeds.append((found.value, count, seed.words))
    search = Periods(problem, Random(0), [(problem, words) for _, _, words in sorted(seeds)[:3]])
    search.run(lambda: search.work < 400_000)
    assert search.best is not None
    assert problem.fits(search.best)
    assert search.value <= 2500
    ended = simulate(problem.schedule_of(search.best), problem.costs)
    assert ended.makespan == pytest.approx(search.value)
    again = Periods(problem, Random(0), [(problem, words) for _, _, words in sorted(seeds)[:3]])
    again.run(lambda: again.work < 400_000)
    assert again.best == search.best


def test_packed_words_hold_one_micro_batch_when_the_period_is_long() -> None:
    problem = Problem((0, 1, 2), 1, Costs(2, 3, 1, 0.5), 1)
    slow = packed(problem, 30.0)
    assert slow.fits
    assert slow.measure()
    assert slow.length <= 30.0
    fast = packed(problem, 6.0)
    assert not fast.fits
