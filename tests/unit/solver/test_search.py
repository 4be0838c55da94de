"""`pl.search`: proven literals, never worse than the families, within the memory, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

import pipeloom as pl
from fuzz._brute_force import least
from pipeloom.errors import CapacityError, PipeloomError, UsageError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.families import build
from pipeloom.solver import Progress
from pipeloom.solver.incumbent import Budget

UNEVEN = Costs(10, 12, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "microbatches", "memory", "moves", "most"),
    [(4, 8, 2, 100, 41), (4, 8, 3, 100, 31), (8, 16, 6, 100, 61), (8, 24, 6, 4500, 87)],
)
def test_literals(ranks: int, microbatches: int, memory: int, moves: int, most: float) -> None:
    found = pl.search(ranks, microbatches, memory=memory, iterations=moves)
    assert found.timeline.makespan <= most
    assert found.lower_bound <= found.value
    assert max(found.timeline.peak_memory) <= memory
    check(found.schedule)


def random_costs(random: Random, stages: int) -> Costs:
    def values(low: int, high: int) -> tuple[float, ...]:
        return tuple(float(random.randint(low, high)) for _ in range(stages))

    return Costs(
        values(5, 15), values(5, 15), values(0, 12), random.choice([0.0, 1.0, 2.5]), held=random.choice([1, 0.5])
    )


KINDS: dict[str, dict[str, Any]] = {
    "makespan": {},
    "span": {"objective": "span"},
    "pairs": {"pairs": True},
    "micro-batches that differ, receivers that wait": {"overlap_p2p": False},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_never_worse_than_the_families_that_fit(seed: int, kind: str) -> None:
    random, options = Random(seed), KINDS[kind]
    ranks, chunks = random.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2)])
    microbatches = random.randint(1, 3 * ranks)
    costs = random_costs(random, ranks * chunks)
    memory = max(chunks, random.choice([0.5, 0.75, 1, 2]) * ranks * chunks)
    if kind == "pairs":
        costs = replace(costs, all_to_all=random.choice([0.1, 0.5]))
    if "differ" in kind:
        costs = replace(costs, microbatch=tuple(round(random.uniform(0.5, 3), 2) for _ in range(microbatches)))
        memory *= max(costs.microbatch)
    found = pl.search(ranks, microbatches, costs, memory, chunks=chunks, iterations=150, **options)
    check(found.schedule)
    timeline = simulate(found.schedule, costs, overlap_p2p=options.get("overlap_p2p", True))
    assert timeline.value(options.get("objective", "makespan")) == pytest.approx(found.value)
    assert max(timeline.peak_memory) <= memory + 1e-9
    assert 0 < found.lower_bound <= found.value
    assert found.value <= best_family(ranks, microbatches, chunks, costs, memory, options) + 1e-9


def best_family(
    ranks: int, microbatches: int, chunks: int, costs: Costs, memory: float, options: dict[str, Any]
) -> float:
    """The least value of the families with this many chunks that fit, built and simulated one by one."""
    values = [float("inf")]
    for name in pl.schedules.FAMILIES:
        try:
            made = build(name, ranks, microbatches, None, {"memory": memory} if name == "zb-auto" else {}, costs)
            timeline = simulate(made, costs, overlap_p2p=options.get("overlap_p2p", True))
        except PipeloomError:
            continue
        paired = made.has_pairs and not options.get("pairs")
        if (
            len(made.routes) == 1
            and made.chunks == chunks
            and not paired
            and max(timeline.peak_memory) <= memory + 1e-9
        ):
            values.append(timeline.value(options.get("objective", "makespan")))
    return min(values)


@pytest.mark.parametrize("case", range(12))
def test_two_ranks_and_two_microbatches_get_the_best_schedule_there_is(case: int) -> None:
    random, pairs = Random(case), case % 3 > 0
    times = [random.choice([0.5, 1.0, 1.5]) for _ in range(3)]
    more = {"pair": 1.8, "pair_split": 1.2} if case == 7 else {"all_to_all": random.choice([0.3, 0.5, 0.8])}
    costs = Costs(*times, random.choice([0.0, 0.25]), held=random.choice([0.5, 1.0]), **more)  # type: ignore[arg-type]
    memory = random.choice([1.0, 2.0])
    if not pairs:
        factors = random.choice([(1.0, 2.0), (3.0, 1.0), (0.5, 0.5)])
        costs, memory = replace(costs, microbatch=factors), memory * max(factors)
    found = pl.search(2, 2, costs, memory, pairs=pairs, iterations=300)
    assert found.lower_bound <= found.value == pytest.approx(least((0, 1), 2, costs, memory, pairs=pairs))


def test_fewer_chunks_count_too() -> None:
    """The families of one chunk are among the starts of two, their stages cut in half."""
    memory = 8
    whole = simulate(pl.schedules.zb_h1(4, 8), Costs(2, 2, 2))
    found = pl.search(4, 8, Costs(1, 1, 1), memory, chunks=2, iterations=0)
    assert found.timeline.makespan <= whole.makespan


def test_the_same_for_the_same_seed() -> None:
    first, second = (pl.search(4, 9, UNEVEN, 3, iterations=700, seed=5) for _ in range(2))
    assert first.schedule == second.schedule
    assert (first.value, first.iterations, first.origin) == (second.value, second.iterations, second.origin)


def test_a_reached_bound_is_a_proof_and_ends_the_search() -> None:
    found = pl.search(4, 16, UNEVEN, 8, chunks=2)
    assert found.proved
    assert found.gap == 0
    assert found.value == found.lower_bound == 1005
    assert found.iterations == 0


def test_one_rank_and_one_microbatch() -> None:
    assert pl.search(1, 3, iterations=5).value == 9
    assert pl.search(3, 1, memory=1, iterations=5).value == 7


def test_a_given_placement_is_kept() -> None:
    found = pl.search(2, 5, memory=4, placement=[0, 1, 1, 0], iterations=300)
    assert found.schedule.placement == (0, 1, 1, 0)
    odd = pl.search(2, 4, memory=6, placement=[0, 0, 1, 0], iterations=300)
    assert odd.schedule.placement == (0, 0, 1, 0)
    check(odd.schedule)


def test_a_time_limit_holds() -> None:
    found = pl.search(8, 32, UNEVEN, 12, chunks=2, time_limit=1.5)  # without its end, 1,000,000 moves of minutes
    check(found.schedule)


def test_the_shortest_time_limit_gives_the_best_start() -> None:
    assert pl.search(2, 4, memory=2, time_limit=5e-324).schedule == build("1f1b", 2, 4)


def test_a_budget_ends_by_itself() -> None:
    """Without a limit after the moves of about ten seconds, at most 30 s; a number of moves is not cut by the clock."""
    default, pairs, counted, timed = (
        Budget(200, limit, moves, prove=False, pairs=pairs)
        for limit, moves, pairs in ((None, None, False), (None, None, True), (None, 7, False), (2.0, None, False))
    )
    assert (default.deadline - default.begin, default.allowed) == (pytest.approx(30), 40_000)
    assert pairs.allowed == 15_000
    assert (counted.deadline, counted.allowed) == (float("inf"), 7)
    assert timed.deadline - timed.begin == pytest.approx(2)
    assert timed.allowed > 10**6


def test_an_interrupt_keeps_the_best() -> None:
    def stop(now: Progress) -> None:
        if now.iterations > 20:
            raise KeyboardInterrupt

    found = pl.search(4, 8, UNEVEN, 2, progress=stop)
    assert found.interrupted
    assert found.iterations < 2000
    check(found.schedule)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"memory": 0}, UsageError, "memory is 0"),
        ({"memory": 0.5}, CapacityError, "takes 1"),
        ({"memory": 1, "chunks": 2}, CapacityError, "takes 2"),
        (
            {"memory": [3, 4, 0.5, 0.8]},
            CapacityError,
            r"memory is 0\.5; one micro-batch in all stages of rank 2 takes 1$",
        ),
        ({"placement": "lop"}, UsageError, "did you mean 'loop'"),
        ({"placement": [0, 1, 2]}, UsageError, "without a stage"),
        ({"placement": [0, 1, 2, 7]}, UsageError, "names rank 7"),
        ({"placement": [0, 1, 2, 3], "chunks": 2}, UsageError, "chunks is 2"),
        ({"objective": "spam"}, UsageError, "one of 'makespan', 'span'"),
        ({"time_limit": -1}, UsageError, "time_limit is -1"),
        ({"time_limit": float("nan")}, UsageError, "time_limit is nan"),
        ({"time_limit": 1e7}, UsageError, "time_limit is 1e.07; it must be at most 1e.06"),
        ({"iterations": -1}, UsageError, "iterations is -1"),
        ({"iterations": 1.5}, UsageError, "iterations is 1.5"),
        ({"chunks": 0}, UsageError, "chunks is 0"),
        ({"costs": Costs(forward=(1.0, 2.0))}, UsageError, "forward has 2 values"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pl.search(4, 8, **{"iterations": 10, **arguments})


@pytest.mark.slow
def test_a_repeated_stretch_beats_interleaved_within_less_memory() -> None:
    """A size above those that are searched move by move; interleaved would hold 78 stage-micro-batches, here 64 fit."""
    answers: list[Progress] = []
    found = pl.search(16, 448, UNEVEN, 64, chunks=4, placement="loop", iterations=0, progress=answers.append)
    check(found.schedule)
    assert "repeated" in found.origin
    assert max(found.timeline.peak_memory) <= 64
    interleaved = simulate(build("interleaved", 16, 448, 4), UNEVEN)
    assert max(interleaved.peak_memory) > 64
    assert found.value < interleaved.makespan
    assert found.gap < 0.01


def test_an_interrupt_during_the_search_of_one_period_keeps_the_best() -> None:
    seen: list[float] = []

    def stop(now: Progress) -> None:
        seen.append(now.value)
        if now.iterations:
            raise AssertionError("the local search has begun")
        if now.value < 2500:  # the best family takes 2620
            raise KeyboardInterrupt

    found = pl.search(8, 32, UNEVEN, 8, chunks=2, placement="vee", progress=stop)
    assert found.interrupted
    assert found.origin == "one period"
    assert found.value == min(seen)
    check(found.schedule)


@pytest.mark.slow
def test_a_size_that_no_cheap_family_fits_has_an_answer_soon() -> None:
    """Half of the memory of 1F1B, two chunks, above the sizes that are searched move by move."""
    answers: list[Progress] = []
    found = pl.search(16, 700, UNEVEN, 16, chunks=2, placement="vee", iterations=0, progress=answers.append)
    check(found.schedule)
    assert max(found.timeline.peak_memory) <= 16
    assert answers[0].value < 1.6 * found.lower_bound


@pytest.mark.parametrize(("sends", "pairs"), [("rendezvous", False), ("coupled", False), ("coupled", True)])
def test_search_for_senders_that_wait(sends: Any, pairs: bool) -> None:
    costs = Costs(p2p=0.5, sends=sends)
    found = pl.search(3, 6, costs, placement="linear", iterations=200, pairs=pairs)
    check(found.schedule, sends=sends)
    assert found.timeline.costs == costs
    assert found.value == simulate(found.schedule, costs).makespan >= found.lower_bound
    families = [simulate(build(name, 3, 6), costs).makespan for name in ("1f1b", "gpipe")]
    assert found.value <= min(families)
    # the best order without waits deadlocks or takes longer
    free = pl.search(3, 6, replace(costs, sends="free"), placement="linear", iterations=200)
    assert free.value < found.value
