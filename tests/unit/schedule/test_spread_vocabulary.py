"""The vocabulary over the ranks: group entries in `check` and `simulate`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_walk import check_batches
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, Timeline, check, simulate
from pipeloom.schedule.actions import Action
from pipeloom.schedule.bounds import lower_bound
from pipeloom.schedule.channels import traffic
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.families import build
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.slices import balanced_cuts, cut_sequences
from pipeloom.schedule.transforms import forward_only, transformed
from pipeloom.schedule.vocabulary import costs_of_all, layers_alone
from pipeloom.traces.measured import costs_of

COSTS = Costs(scores=0.5, scores_grad=0.5, combine=0.1)
MEASURED = Costs(1.0, 1.0, 1.0, scores=0.6, scores_grad=0.3, broadcast=0.2, combine=0.1)
FIRST = "0F0 2BROADCAST0 2S0 2REDUCE0 2T0 0B0"
SECOND = "1F0 3BROADCAST0 3S0 3REDUCE0 1B0 3T0"


def two_ranks(*programs: str, microbatches: int = 1) -> Schedule:
    return Schedule.of(
        [program.split() for program in programs],
        placement=[0, 1, 0, 1],
        microbatches=microbatches,
        routes=[[0, 1]],
        route_of=[0] * microbatches,
    )


def test_times_by_hand() -> None:
    """A group starts once its data is there and every rank has reached it; it keeps no rank from computing."""
    schedule = two_ranks(FIRST, SECOND)
    check(schedule)
    costs = Costs(broadcast=0.25, scores=(0, 0, 0.5, 1.5), scores_grad=2, combine=0.25, bytes={"hidden": (0, 0, 3, 5)})
    timeline = simulate(schedule, costs)
    assert timeline.starts == ((0, 2, 2.25, 3.75, 4, 6), (1, 2, 2.25, 3.75, 4, 6))
    assert timeline.ends == ((1, 2.25, 2.75, 4, 6, 8), (2, 2.25, 3.75, 4, 6, 8))
    assert timeline.peak_bytes["device"] == (3, 5)
    assert timeline.peak_activations == (1, 1)
    assert timeline.critical_path == ((0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5))
    assert from_csv(to_csv(schedule), "custom") == from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (FIRST.replace("2S0 ", ""), SECOND, "2S0 is missing"),
        (FIRST, SECOND.replace("3T0", ""), "3T0 is missing"),
        (
            FIRST.replace("2BROADCAST0 ", ""),
            SECOND,
            "2BROADCAST0 is missing on rank 0: .* together, and 1 of 2 have it",
        ),
        (FIRST.replace("2REDUCE0", "2REDUCE_SUM0 2REDUCE_INPUT0"), SECOND, "3REDUCE_SUM0 is missing on rank 1"),
        (FIRST.replace("2T0", "2REDUCE_SUM0 2T0"), SECOND.replace("1B0", "3REDUCE_SUM0 1B0"), "sums a second time"),
        (FIRST.replace("2S0", "2F0"), SECOND, "2F0, but stage 2 holds a share of the vocabulary"),
        (FIRST.replace("0B0", "0T0"), SECOND, "0T0, but stage 0 holds layers"),
        (
            FIRST.replace("2REDUCE0 2T0", "2T0 2REDUCE0"),
            SECOND,
            "2T0 needs what is sums .*; 2REDUCE0 or 2REDUCE_SUM0 makes",
        ),
        (FIRST, SECOND.replace("3REDUCE0 1B0", "1B0 3REDUCE0"), None),  # issued when B starts, which waits for it
    ],
)
def test_what_check_refuses(first: str, second: str, words: str | None) -> None:
    with pytest.raises(ScheduleError, match=words or "deadlocks"):
        check(two_ranks(first, second))


def test_groups_in_different_orders() -> None:
    """Each rank has one group entry at the head of its queue and another behind it: `check` names both ranks and both groups."""
    ahead = "0F0 0F1 2BROADCAST0 2S0 2BROADCAST1 2S1 2REDUCE0 2T0 2REDUCE1 2T1 0B0 0B1"
    other = "1F0 1F1 3BROADCAST0 3S0 3BROADCAST1 3S1 3REDUCE1 3T1 3REDUCE0 3T0 1B0 1B1"
    check(two_ranks(ahead, other.replace("3REDUCE1 3T1 3REDUCE0 3T0", "3REDUCE0 3T0 3REDUCE1 3T1"), microbatches=2))
    with pytest.raises(ScheduleError) as refused:
        check(two_ranks(ahead, other, microbatches=2))
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    assert "REDUCE of stage 2 micro-batch 0 (action 6), which waits for REDUCE of stage 3 micro-batch 0" in lines[1]
    assert "REDUCE of stage 3 micro-batch 1 (action 6), which waits for REDUCE of stage 2 micro-batch 1" in lines[2]


@pytest.mark.parametrize(
    ("microbatches", "form", "least"), [(4, "fused", 23), (4, "two", 25), (6, "fused", 30), (6, "two", 33)]
)
def test_the_transform_reaches_the_optimum_of_an_exact_model(microbatches: int, form: str, least: int) -> None:
    """CP-SAT proved that no order of 1F1B's work is shorter within p + 1 micro-batches (p + 2 with two reductions)."""
    timeline = simulate(transformed(build("1f1b", 4, microbatches), [f"vocabulary={form}"], COSTS), COSTS)
    assert max(timeline.peak_activations) <= (5 if form == "fused" else 6)
    assert timeline.makespan == least


@pytest.mark.parametrize("shares", [{}, {"slice_times": (0.3, 0.7), "slice_sizes": (0.6, 0.4)}])
def test_a_measured_step_shows_what_its_shares_and_groups_took(shares: dict[str, tuple[float, ...]]) -> None:
    """A group's entry ends at once on all ranks: the one that begins last shows its time, and one that waits more."""
    given = replace(MEASURED, **shares)
    schedule = transformed(build("1f1b", 2, 4, None, {"slices": 2 if shares else 1}), ["vocabulary"], given)
    timeline = simulate(schedule, given)
    starts = [list(row) for row in timeline.starts]
    for at, cell in enumerate(schedule.programs[0]):
        if isinstance(cell, Action) and cell.kind in ("BROADCAST", "REDUCE"):
            starts[0][at] -= 0.5
    measured = Timeline.measured(schedule, starts, timeline.ends)
    costs = costs_of([measured])
    assert costs.scores == pytest.approx((0, 0, 0.6, 0.6))
    assert costs.scores_grad == pytest.approx((0, 0, 0.3, 0.3))
    assert costs.broadcast == pytest.approx((0.2,) * 4)
    assert costs.combine == pytest.approx((0.1,) * 4)
    assert {name: pytest.approx(getattr(costs, name)) for name in shares} == shares
    assert simulate(schedule, costs).makespan == pytest.approx(timeline.makespan)


def test_the_layers_alone_are_those_of_the_schedule_without_shares() -> None:
    plain = build("zbv", 2, 4)
    assert layers_alone(plain) is plain
    alone = layers_alone(transformed(plain, ["vocabulary"], COSTS))
    assert (alone.placement, alone.vocabulary) == (plain.placement, range(4, 4))
    assert [sorted(map(str, program)) for program in alone.programs] == [
        sorted(map(str, program)) for program in plain.programs
    ]


EMBEDS = "2EMBED0 0F0 2BROADCAST0 2S0 2REDUCE0 2T0 0B0 2EMBED_GRAD0"
WITH_EMBEDS = "3EMBED0 1F0 3BROADCAST0 3S0 3REDUCE0 1B0 3T0 3EMBED_GRAD0"


def test_the_first_stage_waits_for_the_tokens_rows() -> None:
    """F of it for EMBED on all ranks, EMBED_GRAD for its B, and T's sum and the rows' gradients for each other."""
    schedule = two_ranks(EMBEDS, WITH_EMBEDS)
    check(schedule)
    timeline = simulate(schedule, Costs(scores=0.5, scores_grad=1.5, combine=0.25, broadcast=0.5))
    starts = [dict(zip(map(str, schedule.programs[rank]), timeline.starts[rank], strict=True)) for rank in (0, 1)]
    assert starts[0]["0F0"] == 0.25
    assert starts[0]["0B0"] == starts[1]["1B0"] + 2 == 5.5
    assert (starts[0]["2EMBED_GRAD0"], timeline.makespan) == (7.5, 8.0)
    assert list(map(str, forward_only(schedule, 1).programs[0])) == ["2EMBED0", "0F0", "2BROADCAST0", "2S0", "2REDUCE0"]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (EMBEDS.replace("2EMBED0 ", ""), WITH_EMBEDS, "2EMBED0 is missing on rank 0"),
        (
            EMBEDS.replace(" 2EMBED_GRAD0", ""),
            WITH_EMBEDS.replace(" 3EMBED_GRAD0", ""),
            "nothing frees what is embedded",
        ),
        (
            EMBEDS.replace("2EMBED0 0F0", "0F0 2EMBED0"),
            WITH_EMBEDS,
            "deadlocks",
        ),  # issued when F starts, which waits for it
    ],
)
def test_which_lookups_check_refuses(first: str, second: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check(two_ranks(first, second))


def test_each_micro_batch_is_looked_up() -> None:
    pair = [" ".join([text, text.replace("0 ", "1 ").removesuffix("0") + "1"]) for text in (EMBEDS, WITH_EMBEDS)]
    check(two_ranks(*pair, microbatches=2))
    with pytest.raises(ScheduleError, match="2EMBED1 is missing"):
        check(two_ranks(*(each.replace("2EMBED1 ", "").replace("3EMBED1 ", "") for each in pair), microbatches=2))


@pytest.mark.parametrize(
    ("name", "chunks", "slices"), [("1f1b", None, 1), ("1f1b", None, 4), ("interleaved", 2, 1), ("zbv", 2, 1)]
)
def test_lookups_take_the_step_one_sum_and_one_copy(name: str, chunks: int | None, slices: int) -> None:
    """The first one is before all else and the last rows' gradient behind it; others run beside the computation, at most one
    hundredth of it aside."""
    costs = replace(COSTS, broadcast=0.1)
    head = transformed(build(name, 4, 8, chunks, {"slices": slices}), ["vocabulary"], costs)
    both = transformed(head, ["embedding"], costs)
    check(both)
    times = [simulate(each, costs_of_all(costs, each)) for each in (head, both)]
    assert times[1].makespan <= 1.01 * times[0].makespan + 0.2
    assert times[0].peak_activations == times[1].peak_activations
    check(transformed(both, ["slices=2"]) if slices == 1 else both)
    assert layers_alone(both) == layers_alone(head)
    first = [str(cell) for cell in both.programs[0] if cell.stage in both.vocabulary or cell.stage == 0]
    ahead = [first[: first.index(f"0F{unit}")] for unit in both.unit_names]
    share = both.vocabulary[0]
    assert (
        max(
            sum(each.startswith(f"{share}EMBED") and "GRAD" not in each for each in a) - at
            for at, a in enumerate(ahead)
        )
        == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "two"])
@pytest.mark.parametrize(
    ("name", "chunks", "slices"), [("1f1b", None, 1), ("1f1b", None, 4), ("interleaved", 2, 1), ("zbv", 2, 1)]
)
def test_a_micro_batch_more_takes_its_work(name: str, chunks: int | None, slices: int, form: str) -> None:
    """S and T of every rank included; the work of the route's own actions stays, and memory grows by the form's allowance."""
    ends, ranks = [], 2 if name == "zbv" else 4
    counts = (12 // slices, 16 // slices)
    for m in counts:
        plain = build(name, ranks, m, chunks, {"slices": slices})
        schedule = transformed(plain, [f"vocabulary={form}"], COSTS)
        timeline = simulate(schedule, COSTS)
        ends.append(timeline.makespan)
        assert lower_bound(schedule, COSTS, split_backward=True) <= timeline.makespan
        allowed = (1 if form == "fused" else 2) * plain.chunks / slices
        assert max(timeline.peak_memory) <= max(simulate(plain, COSTS).peak_memory) + allowed
    check(schedule)
    check_batches(traffic(schedule))
    work = 3 * plain.chunks + 1
    assert work - 0.2 <= (ends[1] - ends[0]) / (counts[1] - counts[0]) <= 1.04 * work
    kinds = [action.kind for program in schedule.programs for action in program if action.stage in schedule.vocabulary]
    assert {kind: kinds.count(kind) for kind in "ST"} == dict.fromkeys("ST", ranks * m * slices)


def test_a_rank_that_never_waits_does_not_keep_the_scores_of_all_micro_batches() -> None:
    costs = Costs(scores=1.2, scores_grad=0.6)
    peaks = []
    for microbatches in (10, 20):
        schedule = transformed(build("1f1b", 2, microbatches), ["vocabulary"], costs)
        held = simulate(schedule, replace(costs, bytes={"scores": (0, 0, 1, 1)})).peak_bytes["device"]
        peaks.append(max(held))
    assert peaks[1] <= peaks[0] <= 7


def test_rounded_times_do_not_change_the_placement() -> None:
    whole = build("1f1b", 4, 8, None, {"slices": 2})
    first, second = (
        transformed(whole, ["vocabulary"], Costs(1.0, 1.0, 1.0, scores=each, scores_grad=each / 2))
        for each in (1.2, 1.2 * (1 + 1e-15))
    )
    assert first.codes == second.codes


def test_a_slice_takes_its_share_of_the_tokens() -> None:
    """Attention makes the second slice as long as the longer first one, and no word costs more for it."""
    cuts = balanced_cuts(100, 2, 0.6)
    schedule = transformed(build("1f1b", 2, 2, None, {"slices": 2}), ["vocabulary"], cuts.costs(COSTS))
    timeline = simulate(schedule, cuts.costs(COSTS))
    cells = zip(schedule.programs[0], timeline.starts[0], timeline.ends[0], strict=True)
    lengths = {str(cell): end - start for cell, start, end in cells}
    assert lengths["2S0.0"] == pytest.approx(0.5 * cuts.sizes[0]) != pytest.approx(lengths["2S0.1"])
    assert lengths["2T0.1"] == pytest.approx(0.5 * cuts.sizes[1])
    assert lengths["0F0.1"] == pytest.approx(cuts.times[1])


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("1f1b", ["vocabulary=three"], "vocabulary: 'three' is neither fused"),
        ("1f1b", ["vocabulary", "vocabulary"], "is spread over the ranks already"),
        ("chimera", ["vocabulary"], "has two routes"),
        ("1f1b-overlap", ["vocabulary"], "has overlapped pairs .*unpair"),
        ("1f1b", ["offload", "vocabulary"], "has entries beside the computation"),
        ("1f1b", ["embedding"], "embedding: schedule 1f1b has no shares of the vocabulary"),
        ("1f1b", ["vocabulary", "embedding", "embedding"], "embedding: schedule 1f1b is spread over the ranks already"),
    ],
)
def test_what_the_transform_refuses(name: str, words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        transformed(build(name, 4, 8), words)


def test_lookups_do_not_pass_entries_that_start_after_them() -> None:
    """A rank may run ahead of a sum that is late; another order of the two than on other ranks would be a deadlock."""
    costs = Costs(scores=0.3, scores_grad=1.7, combine=1.3)
    check(transformed(build("1f1b", 4, 8), ["vocabulary=two", "embedding"], costs))


def test_gradients_of_rows_come_in_the_order_of_backwards() -> None:
    cut = cut_sequences(transformed(build("1f1b", 2, 4), ["vocabulary", "embedding"]), 2)
    order = [(action.microbatch, action.slice) for action in cut.programs[1] if action.kind == "EMBED_GRAD"]
    assert order == [(mb, at) for mb in range(4) for at in (1, 0)]


def test_costs_of_layers_are_0_on_stages_of_shares_those_of_pairs_too() -> None:
    schedule = transformed(build("1f1b", 2, 4), ["vocabulary=two"])
    costs = Costs(forward=(1, 2), pair=(3, 4), pair_split=((5, 6), (7, 8)), held=(0.5, 1), parts={"norms": (1, 2)})
    longer = costs_of_all(costs, schedule)
    assert longer.per_stage("forward", 4) == (1, 2, 0, 0)
    assert longer.per_pair("pair", 4) == ((3,) * 4, (4,) * 4, (0,) * 4, (0,) * 4)
    assert longer.per_pair("pair_split", 4) == ((5, 6, 0, 0), (7, 8, 0, 0), (0,) * 4, (0,) * 4)
    assert (longer.held, longer.parts) == ((0.5, 1, 0, 0), (("norms", (1, 2, 0, 0)),))
