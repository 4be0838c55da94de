"""Plans of steps whose sequences differ in length: every sequence once, limits kept, as short as all partitions of a few."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, UsageError
from pipeloom.plan import step
from pipeloom.plan.step import SequenceTime, StepPlan, plan_step
from pipeloom.schedule.families import build

ATTENTION = SequenceTime(0.0, 1 / 8192, 1 / 8192**2)


def lengths_of(count: int, sigma: float = 1.0, most: int = 16384, seed: int = 1) -> list[int]:
    numbers = random.Random(seed)
    return [max(16, min(most, int(math.exp(numbers.gauss(6.5, sigma))))) for _ in range(count)]


def batches_of(plan: StepPlan) -> list[tuple[int, ...]]:
    return [batch for each in plan.replicas for batch in each.microbatches]


@pytest.mark.parametrize(("ranks", "replicas", "count"), [(2, 1, 9), (4, 2, 40), (3, 4, 30)])
def test_every_sequence_is_in_one_micro_batch_within_the_limit(ranks: int, replicas: int, count: int) -> None:
    lengths = lengths_of(count, most=4096)
    plan = plan_step(lengths, ranks, replicas, tokens=4096, time=ATTENTION)
    assert sorted(at for batch in batches_of(plan) for at in batch) == list(range(count))
    assert max(sum(lengths[at] for at in batch) for batch in batches_of(plan)) <= 4096
    assert len(plan.replicas) == replicas
    assert plan == plan_step(lengths, ranks, replicas, tokens=4096, time=ATTENTION)
    for each in plan.replicas:
        assert each.tokens == tuple(sum(lengths[at] for at in batch) for batch in each.microbatches)
        pl.check(each.schedule)
        factors = tuple(sum(map(ATTENTION.of, (lengths[at] for at in batch))) for batch in each.microbatches)
        stage = 1 / each.schedule.chunks
        costs = pl.Costs(stage, stage, stage, microbatch=factors)
        assert pl.simulate(each.schedule, costs).makespan == pytest.approx(each.timeline.makespan)
    assert plan.makespan == max(each.timeline.makespan for each in plan.replicas)
    assert plan.bound <= plan.makespan


def ordered_partitions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not items:
        yield ()
    for mask in range(1, 1 << len(items)):
        first = tuple(each for at, each in enumerate(items) if mask >> at & 1)
        for rest in ordered_partitions(tuple(each for each in items if each not in first)):
            yield (first, *rest)


def shortest(lengths: list[int], ranks: int, replicas: int, tokens: int, time: SequenceTime) -> float:
    """Of all divisions among replicas, and all ordered partitions of each replica's sequences, with 1F1B."""
    known: dict[int, float] = {}

    def of(members: int) -> float:
        if members not in known:
            known[members] = math.inf
            for order in ordered_partitions(tuple(at for at in range(len(lengths)) if members >> at & 1)):
                if max(sum(lengths[at] for at in batch) for batch in order) <= tokens:
                    factors = tuple(time.fixed + sum(time.of(lengths[at]) for at in batch) for batch in order)
                    run = pl.simulate(build("1f1b", ranks, len(order)), pl.Costs(microbatch=factors))
                    known[members] = min(known[members], run.makespan)
        return known[members]

    everyone = (1 << len(lengths)) - 1
    if replicas == 1:
        return of(everyone)
    return min(max(of(some), of(everyone ^ some)) for some in range(1, everyone))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_few_sequences_take_as_long_as_in_the_best_of_all_partitions(seed: int) -> None:
    numbers = random.Random(seed)
    count, ranks, replicas = numbers.choice([3, 4, 5, 5, 6]), numbers.randint(2, 4), numbers.randint(1, 2)
    lengths = lengths_of(count, seed=seed, most=6000)
    tokens = max(*lengths, numbers.choice([1000, 2000, 4000]))
    time = SequenceTime(numbers.choice([0.0, 50.0]), 1.0, numbers.choice([0.0, 1 / 2000]))
    plan = plan_step(lengths, ranks, replicas, tokens=tokens, time=time, families=[("1f1b", 1)])
    assert plan.makespan == pytest.approx(shortest(lengths, ranks, replicas, tokens, time), rel=1e-9)


@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_it_is_never_longer_than_simple_packings(sigma: float) -> None:
    """Sequences in turn, packed as they come, and balanced by tokens, with 1F1B."""
    lengths, tokens = lengths_of(48, sigma, 8192), 8192
    in_turn = [[[0]], [[1]]]
    for at in range(2, 48):
        last = in_turn[at % 2][-1]
        if sum(lengths[each] for each in last) + lengths[at] > tokens:
            in_turn[at % 2].append([])
        in_turn[at % 2][-1].append(at)
    steps = []
    for packed in in_turn:
        factors = tuple(sum(ATTENTION.of(lengths[at]) for at in batch) for batch in packed)
        steps.append(pl.simulate(pl.schedules.one_f_one_b(4, len(packed)), pl.Costs(microbatch=factors)).makespan)
    alone = plan_step(lengths, 4, 2, tokens=tokens, time=ATTENTION, families=[("1f1b", 1)])
    assert plan_step(lengths, 4, 2, tokens=tokens, time=ATTENTION).makespan <= alone.makespan <= max(steps)


def test_memory_is_a_limit_on_tokens_that_a_rank_holds() -> None:
    lengths = lengths_of(24, most=3000)
    free = plan_step(lengths, 4, tokens=4096)
    most = max(held_by(free))
    tight = plan_step(lengths, 4, tokens=4096, memory=0.7 * most)
    assert max(held_by(tight)) <= 0.7 * most
    assert tight.makespan >= free.makespan
    with pytest.raises(
        CapacityError, match=rf"^no plan of 24 sequences keeps 10 tokens .* longest has {max(lengths)}$"
    ):
        plan_step(lengths, 4, tokens=4096, memory=10)


def held_by(plan: StepPlan) -> list[float]:
    peaks = []
    for each in plan.replicas:
        costs = pl.Costs(activation=1 / each.schedule.chunks, microbatch=tuple(map(float, each.tokens)))
        peaks.append(max(pl.simulate(each.schedule, costs).peak_memory))
    return peaks


def test_the_next_step_takes_over_family_and_packing() -> None:
    lengths = lengths_of(64)
    first = plan_step(lengths, 4, 2, tokens=16384, time=ATTENTION)
    others = lengths_of(64, seed=2)
    again = plan_step(others, 4, 2, tokens=16384, time=ATTENTION, last=first)
    assert again.family == first.family
    assert set(again.packings) <= set(first.packings)
    assert again.makespan <= 1.1 * plan_step(others, 4, 2, tokens=16384, time=ATTENTION).makespan


def test_only_the_ways_of_the_last_plan_are_tried() -> None:
    first = plan_step(lengths_of(64), 4, 2, tokens=16384, time=ATTENTION)
    last = replace(first, packings=((1.35, 2), (1.35, 2)))
    assert plan_step(lengths_of(64), 4, 2, tokens=16384, time=ATTENTION, last=last).packings == last.packings


def test_a_stage_of_two_chunks_takes_half() -> None:
    (run,) = plan_step(lengths_of(16), 2, tokens=16384, families=[("interleaved", 2)]).replicas
    costs = pl.Costs(0.5, 0.5, 0.5, microbatch=tuple(map(float, run.tokens)))
    assert pl.simulate(run.schedule, costs).makespan == pytest.approx(run.timeline.makespan)


def test_attention_changes_the_plan() -> None:
    lengths = lengths_of(40, 1.5)
    plain, squares = (
        plan_step(lengths, 4, tokens=16384, time=time) for time in (replace(ATTENTION, square=0.0), ATTENTION)
    )
    assert batches_of(plain) != batches_of(squares)


def test_the_costs_of_a_stage_count() -> None:
    lengths = lengths_of(16)
    plan = plan_step(lengths, 2, tokens=16384, costs=pl.Costs(1, 1.5, 0.5), families=[("1f1b", 1)])
    run = plan.replicas[0]
    factors = tuple(map(float, run.tokens))
    costs = pl.Costs(1, 1.5, 0.5, microbatch=factors)
    assert pl.simulate(run.schedule, costs).makespan == pytest.approx(plan.makespan)


@pytest.mark.parametrize(
    ("lengths", "replicas", "words"),
    [
        ([], 1, "^lengths: give the tokens"),
        ([3, 0], 1, r"^lengths is \[3, 0\]; it must be a list of whole numbers of at least 1"),
        ([5, float("nan")], 1, r"^lengths is \[5, nan\]; it must be a list of whole numbers"),
        ([3], 2, "^1 sequences for 2 replicas: .* replicas=1$"),
        ([3, 900], 1, "^tokens=100: sequence 1 has 900; nearest: tokens=900$"),
        ([3], 0, "^replicas is 0; it must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(lengths: list[Any], replicas: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_step(lengths, 2, replicas, tokens=100)


def test_a_family_that_is_not_known_no_time_and_no_memory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^families=\(\('1g1b', 1\),\): give \(name, chunks\) of known ones"):
        plan_step([3], 2, tokens=100, families=[("1g1b", 1)])
    for families, shown in (
        ((), r"\(\)"),
        ([("zbv", 0)], ".*"),
    ):
        with pytest.raises(UsageError, match=rf"^families={shown}: give \(name, chunks\)"):
            plan_step([3], 2, tokens=100, families=families)  # type: ignore[arg-type]
    for tokens in (math.nan, "100"):
        with pytest.raises(UsageError, match=r"^tokens is .*; it must be a whole number"):
            plan_step([3], 2, tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="memory is nan; it must be a number above 0"):
        plan_step([3], 2, tokens=100, memory=math.nan)
    with pytest.raises(UsageError, match="a micro-batch takes no time; nearest: "):
        plan_step([3], 2, tokens=100, time=SequenceTime(0.0, 0.0, 0.0))


def test_it_says_what_it_planned() -> None:
    text = str(plan_step([900, 80, 70, 60, 500, 400], 2, 2, tokens=1000, families=[("1f1b", 1)]))
    assert text.splitlines()[0].startswith("1f1b: makespan ")
    assert "% above the bound" in text
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == ["replica 0", "replica 1"]


def test_a_sequence_costs_more_than_its_tokens_where_it_is_computed_alone() -> None:
    times = {
        name: plan_step([10, 10], 1, tokens=20, time=SequenceTime(**{name: 5.0}), families=[("1f1b", 1)]).makespan
        for name in ("fixed", "each")
    }
    assert times == {"fixed": 3 * (20 + 5), "each": 3 * (20 + 2 * 5)}


def test_a_plan_whose_packings_do_not_serve_is_made_anew() -> None:
    """`dualpipev` on 1 rank needs 2 micro-batches, and the packing of a step with one sequence makes 1."""
    family = [("dualpipev", 2)]
    last = replace(plan_step([90, 10, 80], 1, tokens=100, families=family), packings=((1.0, 0),))
    plan = plan_step([10, 20, 30], 1, tokens=100, families=family, last=last)
    assert len(plan.replicas[0].microbatches) >= 2
    assert plan.packings != last.packings


def test_improvements_keep_the_limit_of_tokens() -> None:
    plan = plan_step([10] * 8, 1, tokens=20, time=SequenceTime(fixed=1000.0), families=[("1f1b", 1)])
    assert plan.replicas[0].tokens == (20,) * 4


def test_replicas_exchange_sequences() -> None:
    """The longest first, each to the replica with the least, would make 7 and 5 tokens of these."""
    plan = plan_step([3, 3, 2, 2, 2], 1, 2, tokens=10, families=[("1f1b", 1)])
    assert plan.makespan == 3 * 6


def test_a_replica_that_waits_more_starts_with_less_work() -> None:
    lengths = tuple(lengths_of(24, 1.5, 4096, 2))
    question = step.StepQuestion(lengths, 4, 2, 4096, ATTENTION, pl.Costs(), math.inf, 1)
    equal, less = question.starts(("1f1b", 1), [(1.0, 0)])
    assert less.makespan < 0.993 * equal.makespan


ANSWERS = [806, 659, 188, 122, 239, 181, 702, 140, 210, 362, 1053, 228]


def of_changed(name: str, value: Any, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> float:
    """The makespan over that with another value of a constant of the search."""
    plan = plan_step(lengths, 4, tokens=8192, time=ATTENTION, families=[("1f1b", 1)])
    monkeypatch.setattr(step, name, value)
    other = plan_step(lengths, 4, tokens=8192, time=ATTENTION, families=[("1f1b", 1)])
    return plan.makespan / other.makespan


@pytest.mark.parametrize("heat", [0.0, 0.03])
def test_changes_may_lead_over_slightly_longer_steps(heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_changed("HEAT", heat, lengths_of(10, 1.0, 8192, 3), monkeypatch) < 0.9995


@pytest.mark.parametrize("rounds", [step.SEARCH_ROUNDS[:1], step.SEARCH_ROUNDS[2:]])
def test_many_plans_are_improved_and_few_of_them_further(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_changed("SEARCH_ROUNDS", rounds, lengths_of(16, 1.5, 8192, 1), monkeypatch) < 0.999


@pytest.mark.parametrize("work", [100_000, 1_000_000])
def test_a_longer_step_on_the_way_is_not_kept(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "HEAT", 9.0)
    plans = []
    for each in (1e-9, work):
        monkeypatch.setattr(step, "SEARCH_ROUNDS", ((1, each),))
        plans.append(plan_step(ANSWERS, 4, tokens=8192, time=ATTENTION, families=[("1f1b", 1)]))
    assert plans[1].makespan <= plans[0].makespan
