"""Parameters gathered and freed, gradients reduced: what `check` says, when they run, their bytes, and the fewest gathers."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.sharding import gathers, reduce_gradients, shard, shard_as_torch, uses_of_parameters
from pipeloom.schedule.transforms import forward_only, of_zero, transformed
from pipeloom.schedule.vocabulary import costs_of_all, with_shares


def one_stage(*cells: str, microbatches: int = 1) -> Schedule:
    return Schedule.of([cells], placement=[0], microbatches=microbatches)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            "0F0 0UNSHARD 0B0 0RESHARD",
            "action 0: 0F0 needs the params of stage 0, which is not there; 0UNSHARD makes it",
        ),
        (
            "0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD",
            "action 1: 0UNSHARD makes what is params a second time; 0UNSHARD has",
        ),
        ("0UNSHARD 0F0 0B0", "rank 0: nothing frees the params of stage 0, which 0UNSHARD leaves"),
        ("0F0 0B0 0RESHARD", "the step ends without the params of stage 0"),
        ("0F0 0REDUCE_GRAD 0B0", "action 1: 0REDUCE_GRAD needs the grads of stage 0"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "action 3: 0REDUCE_GRAD needs the grads"),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "nothing frees the grads of stage 0, which 0B1 leaves"),
        ("0UNSHARD 0F0 0RESHARD 0I0 0W0", "action 3: 0I0 needs the params"),
        ("0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD", None),
        ("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD", None),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD", None),
    ],
)
def test_check_sweeps_over_values_of_stages(cells: str, reason: str | None) -> None:
    schedule = one_stage(*cells.split(), microbatches=1 + ("0F1" in cells))
    assert to_csv(from_csv(to_csv(schedule))) == cells.replace(" ", ",") + "\n"
    if reason is None:
        check(schedule)
    else:
        with pytest.raises(pl.ScheduleError, match=reason):
            check(schedule)


def test_slots_of_parameters_and_of_buffers_for_gradients() -> None:
    """A gather waits for the release that makes room for it; so does the first backward that adds to a stage's gradients."""

    def starts(cells: str, **slots: int) -> dict[str, float]:
        schedule = Schedule.of([cells.split()], placement=[0, 0], microbatches=1).with_slots(slots)
        check(schedule)
        timeline = simulate(schedule, Costs(gather=1, reduce=3))
        return dict(zip(map(str, schedule.programs[0]), timeline.starts[0], strict=True))

    reduced = "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD"  # 1I0 from 2, 1W0 until 4
    assert starts(reduced)["0I0"] == starts(reduced, grads=2)["0I0"] == 4
    assert starts(reduced, grads=1)["0I0"] == 7
    early = "0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD"
    assert starts(early, grads=2)["0B0"] == 4
    with pytest.raises(pl.ScheduleError, match=r"deadlocks(.|\n)*waits for REDUCE_GRAD of stage 1"):
        starts(early, grads=1)
    assert starts("0F0 1F0 1B0 1REDUCE_GRAD 0B0", grads=1)["0B0"] == 4  # those of stage 0 stay, in no slot
    twice = one_stage("0F0", "0F1", "0B0", "0REDUCE_GRAD", "0B1", "0REDUCE_GRAD", microbatches=2)
    assert [simulate(twice.with_slots({"grads": n}), Costs(reduce=3)).starts[0][4] for n in (2, 1)] == [4, 7]
    gathered = "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    programs = Schedule.of([gathered.split()], placement=[0, 0], microbatches=1)
    ahead, behind = (simulate(programs.with_slots({"params": n}), Costs(gather=1)).starts[0][1] for n in (2, 1))
    assert (ahead, behind) == (1, 2)  # behind the release at 2


def test_a_gather_on_the_wrong_rank_is_refused() -> None:
    schedule = Schedule.of([["1UNSHARD", "0F0", "0B0"], ["1F0", "1B0"]], placement=[0, 1], microbatches=1)
    with pytest.raises(pl.ScheduleError, match="1UNSHARD is on the wrong rank; stage 1 is placed on rank 1"):
        check(schedule)


def test_times_and_bytes() -> None:
    """A gather runs beside the computation before it, a reduction behind the gradients that it takes, and W beside that."""
    cells = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD"
    size = {"params": 8.0, "shard": 4.0, "grads": 16.0, "grad_shard": 8.0}
    costs = Costs(bytes=size, collective_bandwidth=8.0, microbatch=(1.0, 2.0))
    timeline = simulate(one_stage(*cells.split(), microbatches=2), costs)
    assert timeline.starts == ((0, 1, 2, 2, 3, 5, 7, 7, 11, 11),)
    assert timeline.ends == ((1, 2, 2, 3, 5, 7, 9, 11, 11, 13),)
    assert timeline.busy == (9,)
    levels = dict(timeline.bytes_curves["device"][0])  # the last level at each time
    assert levels == {0: 20, 1: 20, 2: 20, 3: 20, 5: 36, 7: 52, 9: 36, 11: 28, 13: 12}
    assert timeline.peak_bytes["device"] == (52,)


def test_costs_given_in_time() -> None:
    timeline = simulate(one_stage("0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD"), Costs(gather=0.5, reduce=0.25))
    assert timeline.makespan == 3.75


@cache
def built(name: str, *sizes: int) -> Schedule:
    return build(name, *sizes)


def least_gathers(schedule: Schedule, slots: int, for_torch: bool = False) -> tuple[int, ...]:
    """rank -> the fewest gathers for its program, by trying every set of stages before each entry."""

    def least(word: list[frozenset[int]]) -> int:
        stages, best = sorted(frozenset().union(*word)), {frozenset[int](): 0}
        for needed in word:
            rest = [stage for stage in stages if stage not in needed]
            sets = [needed.union(more) for n in range(slots - len(needed) + 1) for more in combinations(rest, n)]
            best = {there: min(cost + len(there - before) for before, cost in best.items()) for there in sets}
        return min(best.values())

    return tuple(least([stages for _, stages in uses_of_parameters(p, for_torch)]) for p in schedule.programs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_fewest_gathers_of_every_family(name: str) -> None:
    """As few as there can be on every rank, within the slots, and at most those of torch's rule."""
    tried = 0
    for (p, m), v, slots in product(((2, 4), (4, 8)), (1, 2, 3), (1, 2, 3)):
        try:
            schedule = built(name, p, m, v)
            torch_rule = shard_as_torch(schedule, slots)
        except PipeloomError:
            continue
        tried += 1
        for for_torch in (False, True):
            sharded = shard(schedule, slots, for_torch)
            check(sharded)
            assert gathers(sharded) == least_gathers(schedule, slots, for_torch)
            assert all(a <= b for a, b in zip(gathers(sharded), gathers(torch_rule), strict=True)) or schedule.has_pairs
            for program in sharded.programs:
                present = [str(cell).count("UNSHARD") - str(cell).count("RESHARD") for cell in program]
                assert max(sum(present[: at + 1]) for at in range(len(present))) <= slots
    assert tried


@pytest.mark.parametrize(
    ("name", "size", "slots", "figures"),
    [
        ("interleaved", (8, 32), 2, (18, 18, 20)),
        ("interleaved", (8, 32), 3, (11, 11, 15)),
        ("interleaved-zb", (4, 16), 2, (18, 45, 78)),
        ("interleaved-zb", (4, 16), 3, (11, 12, 17)),
    ],
)
def test_gathers_of_a_large_schedule(name: str, size: tuple[int, int], slots: int, figures: tuple[int, ...]) -> None:
    schedule = build(name, *size, 4)
    variants = shard(schedule, slots), shard(schedule, slots, for_torch=True), shard_as_torch(schedule, slots)
    assert tuple(max(gathers(each)) for each in variants) == figures
    if slots > 2:
        costs = Costs(gather=0.5, reduce=0.5)
        assert simulate(variants[0], costs).makespan <= simulate(variants[2], costs).makespan


@pytest.mark.parametrize("word", ["0102", "012012", "0120210312", "01230123", "001122001", "0213021302"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewest_gathers_of_a_word(word: str, slots: int) -> None:
    cells = [f"{stage}F{at}" for at, stage in enumerate(word)]
    schedule = Schedule.of([cells], placement=[0] * 4, microbatches=len(word))
    assert gathers(shard(schedule, slots)) == least_gathers(schedule, slots)


@pytest.mark.parametrize("slots", [0, 1])
def test_too_few_slots(slots: int) -> None:
    with pytest.raises(UsageError, match=f"slots is {slots}, and a pair needs .* nearest: 2"):
        shard(build("dualpipev", 2, 4), slots)


def test_a_second_time() -> None:
    schedule = shard(build("1f1b", 2, 2), 1)
    with pytest.raises(UsageError, match="gathers parameters already"):
        shard(schedule, 1)
    with pytest.raises(UsageError, match="reduces gradients already"):
        reduce_gradients(schedule)


def test_reductions_behind_every_second_backward() -> None:
    assert to_csv(reduce_gradients(one_stage("0F0", "0F1", "0B0", "0F2", "0B1", "0B2", microbatches=3), 2)) == (
        "0F0,0F1,0B0,0F2,0B1,0REDUCE_GRAD,0B2,0REDUCE_GRAD\n"
    )


def test_forwards_alone_keep_their_gathers() -> None:
    forwards = forward_only(shard(build("interleaved", 2, 4, 2), 1), 2)
    assert to_csv(forwards).split("\n")[0] == "0UNSHARD,0F0,0F1,0RESHARD,2UNSHARD,2F0,2F1,2RESHARD"


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 2, None), ("interleaved", 4, 2)])
def test_sums_and_gathers_do_not_hold_up_a_spread_output_layer(name: str, ranks: int, chunks: int | None) -> None:
    """They share a queue with its groups, which may run beside a computation that a sum waits for."""
    schedule = build(name, ranks, 8 * ranks, chunks)
    each = (1.0,) * schedule.stages
    costs = Costs(each, each, each, scores=0.5, scores_grad=0.5)
    spread = with_shares(schedule, costs)
    every = costs_of_all(costs, spread)
    plain = simulate(spread, every).makespan
    for level in (2, 3):
        sharded = transformed(spread, of_zero(level, spread=True))
        check(sharded)
        assert simulate(sharded, every).makespan <= 1.03 * plain
