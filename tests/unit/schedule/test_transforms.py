"""Transforms, together over all families: they pass `check`, do the same work, and hold what their docstrings say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import (
    TRANSFORMS,
    cut_stages,
    defer_last_stage_weights,
    forward_only,
    half_split,
    merge_backward,
    split_cooldown,
    transformed,
    unpair,
)

Transform = Callable[[Schedule], Schedule]
SIZES = ((1, 3), (2, 4), (2, 5), (4, 8), (3, 7))
HOLDS_NO_MORE: dict[str, Transform] = {
    "unpair": unpair,
    "half-split": half_split,
    "half-split, the odd ones": lambda schedule: half_split(schedule, 1),
    "merge-backward": merge_backward,
    "split-cooldown": split_cooldown,
}
SAME_WORK = HOLDS_NO_MORE | {
    "defer all": defer_last_stage_weights,
    "defer one": lambda schedule: defer_last_stage_weights(schedule, 1),
    "twice": lambda schedule: split_cooldown(defer_last_stage_weights(half_split(schedule), 2 % schedule.microbatches)),
}


def schedules(name: str) -> Iterator[Schedule]:
    """The family at the sizes that it takes, at uniform and at random costs."""
    draw = random.Random(name)
    for p, m in SIZES:
        costs = Costs(draw.uniform(1, 3), draw.uniform(1, 3), draw.uniform(0.5, 3), held=draw.uniform(0.3, 1))
        try:
            yield build(name, p, m, None, None, costs)
        except PipeloomError:
            continue


def work(schedule: Schedule) -> list[Counter[object]]:
    """Every (kind, stage, micro-batch) of each rank, a B as its I and W."""
    return [
        Counter(
            (letter, *action[1:])
            for cell in program
            for action in parts(cell)
            for letter in {"B": "IW"}.get(action.kind, action.kind)
        )
        for program in schedule.programs
    ]


def input_gradients(schedule: Schedule) -> list[list[tuple[int, int]]]:
    return [[a[1:] for c in program for a in parts(c) if a.kind in "BI"] for program in schedule.programs]


@pytest.mark.slow
@pytest.mark.parametrize("transform", SAME_WORK)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_transform_of_every_family(name: str, transform: str) -> None:
    """It can run, does the same work on the same ranks, and no other rank's gradients arrive in another order."""
    seen = 0
    for schedule in schedules(name):
        seen += 1
        changed = SAME_WORK[transform](schedule)
        check(changed)
        assert work(changed) == work(schedule)
        assert input_gradients(changed) == input_gradients(schedule)
        kept = ("placement", "routes", "route_of", "microbatches", "name")
        assert [getattr(changed, each) for each in kept] == [getattr(schedule, each) for each in kept]
        if transform == "split-cooldown":
            assert simulate(changed).makespan <= simulate(schedule).makespan
        if transform in HOLDS_NO_MORE:
            for costs in (Costs(), Costs(held=0.4)):
                before, after = simulate(schedule, costs).peak_memory, simulate(changed, costs).peak_memory
                assert all(b <= a + 1e-9 for a, b in zip(before, after, strict=True)), schedule
    assert seen >= 2


def kinds(schedule: Schedule, stage: int) -> dict[int, set[str]]:
    """micro-batch -> the kinds of its backward on this stage."""
    found: dict[int, set[str]] = {}
    for program in schedule.programs:
        for action in (action for cell in program for action in parts(cell)):
            if action.stage == stage and action.kind != "F":
                found.setdefault(action.microbatch, set()).add(action.kind)
    return found


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_the_backwards_are_split(name: str, parity: int) -> None:
    for schedule in schedules(name):
        half = half_split(schedule, parity)
        for stage in range(half.stages):
            split = {mb for mb, letters in kinds(half, stage).items() if letters == {"I", "W"}}
            assert split == {mb for mb in kinds(half, stage) if mb % 2 == parity}
            assert all(letters in ({"B"}, {"I", "W"}) for letters in kinds(half, stage).values())


def test_the_one_backward_that_exists_is_split() -> None:
    schedule = pl.schedules.one_f_one_b(2, 1)
    assert all(half_split(schedule, parity).splits_backward for parity in (0, 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_backwards_are_whole(name: str) -> None:
    for schedule in schedules(name):
        assert not merge_backward(schedule).splits_backward
        some = merge_backward(half_split(schedule), [(0, 0)])
        assert kinds(some, 0).get(0, {"B"}) == {"B"}
        assert kinds(some, 0).get(2, {"I", "W"}) == {"I", "W"}


@pytest.mark.slow
@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_last_stages_weights_wait_for_the_cool_down(name: str, last: int) -> None:
    """Those of the last micro-batches alone, behind the last forward; other ranks run what they ran."""
    for schedule in schedules(name):
        deferred = defer_last_stage_weights(schedule, last)
        ends = {route[-1] for route in schedule.routes}
        homes = {schedule.placement[stage] for stage in ends}
        for rank, program in enumerate(deferred.programs):
            if rank not in homes:
                assert program == schedule.programs[rank]
                continue
            actions = [action for cell in program for action in parts(cell)]
            order = [a.microbatch for a in actions if a.stage in ends and a.kind in "BI"]
            waiting = order[-last:] if last else order
            final = max(at for at, action in enumerate(actions) if action.kind == "F")
            places = {a[1:]: at for at, a in enumerate(actions) if a.kind == "W"}
            for stage in ends & set(schedule.stages_of[rank]):
                for mb in (mb for mb in waiting if (stage, mb) in {a[1:] for a in actions if a.kind in "BI"}):
                    assert places[stage, mb] > final
                untouched = {mb: letters for mb, letters in kinds(schedule, stage).items() if mb not in waiting}
                assert {mb: kinds(deferred, stage)[mb] for mb in untouched} == untouched
        for costs in (Costs(), Costs(held=0.4)):
            before, after = simulate(schedule, costs).peak_memory, simulate(deferred, costs).peak_memory
            most = (last or schedule.microbatches) * costs.held  # type: ignore[operator]
            assert all(
                b <= a + most * (rank in homes) + 1e-9 for rank, (a, b) in enumerate(zip(before, after, strict=True))
            )


def test_where_they_go() -> None:
    """At the end where the rank never waits in its cool-down; in the waits for the first chunk's gradients where it does."""
    last = [str(cell) for cell in defer_last_stage_weights(pl.schedules.one_f_one_b(2, 4), 2).programs[1]]
    assert last == ["1F0", "1B0", "1F1", "1B1", "1F2", "1I2", "1F3", "1I3", "1W2", "1W3"]
    looped = defer_last_stage_weights(pl.schedules.interleaved(2, 4, 2))
    tail = " ".join(map(str, looped.programs[1])).split("3F3 ")[1]
    assert tail == "3I3 3W0 3W1 1B2 1B3 3W2 3W3"


def test_a_heavy_last_stage_gains_by_it() -> None:
    """The other ranks no longer wait for its weight gradients: that is what it is for."""
    costs = Costs((1, 1, 1, 3), (1, 1, 1, 3), (1, 1, 1, 3))
    schedule = pl.schedules.one_f_one_b(4, 4)
    deferred = defer_last_stage_weights(schedule, 0, costs)
    assert simulate(deferred, costs).makespan <= simulate(schedule, costs).makespan - 2
    assert simulate(defer_last_stage_weights(schedule), Costs()).makespan < simulate(schedule).makespan


def test_stages_are_cut() -> None:
    for name in ("1f1b", "interleaved", "zbv", "dualpipev"):
        schedule = build(name, 2, 4)
        cut = cut_stages(schedule, 2)
        check(cut)
        assert cut.placement == tuple(rank for rank in schedule.placement for _ in range(2))
        whole = simulate(unpair(schedule), Costs(2, 2, 2)).makespan
        assert simulate(cut).makespan <= whole + 2  # an input gradient no longer waits for a whole stage's
    with pytest.raises(UsageError, match="has 2 routes; it must have one"):
        cut_stages(pl.schedules.chimera(2, 4), 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_forwards_alone(name: str) -> None:
    for schedule in schedules(name):
        for count in (1, schedule.microbatches):
            alone = forward_only(schedule, count)
            for rank, program in enumerate(alone.programs):
                forwards = [a for c in schedule.programs[rank] for a in parts(c) if a.kind == "F"]
                assert list(program) == [action for action in forwards if action.microbatch < count]
        twice = forward_only(schedule, 2 * schedule.microbatches)
        for first, both in zip(forward_only(schedule).programs, twice.programs, strict=True):
            later = [a._replace(microbatch=a.microbatch + schedule.microbatches) for a in first]
            assert list(both) == [*first, *later]


def test_by_name() -> None:
    schedule = pl.schedules.dualpipev(2, 8)
    assert transformed(schedule, ["unpair"]) == unpair(schedule)
    assert transformed(schedule, []) is schedule
    assert transformed(schedule, ["unpair", "defer-last-stage-weights=2"]) == defer_last_stage_weights(
        unpair(schedule), 2
    )
    assert transformed(schedule, ["half-split = 1"]) == half_split(schedule, 1)
    plain = pl.schedules.one_f_one_b(2, 4)
    costs = Costs((1, 3), 1, 2)
    assert transformed(plain, ["split-cooldown"], costs) == split_cooldown(plain, costs)
    assert transformed(plain, ["cut-stages=2"]) == cut_stages(plain, 2)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("unpiar", "there is no transform 'unpiar'; did you mean 'unpair'"),
        ("", "there is no transform ''; known: cut-stages, "),
        ("unpair=2", "transform unpair takes no number, but is given '2'"),
        ("cut-stages", "transform cut-stages needs a number (pieces of a stage), such as cut-stages=2"),
        ("cut-stages=0", "cut_stages: pieces is 0; use 1 or more"),
        ("half-split=x", "transform half-split: 'x' is not a whole number of at least 0 (the first micro-batch"),
        ("defer-last-stage-weights=9", "last is 9; a step has 8 micro-batches: use 1 to 8, or 0 for all"),
    ],
)
def test_one_clear_error(word: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        transformed(pl.schedules.one_f_one_b(2, 8), [word])
    assert problem in str(raised.value)


def test_each_name_is_described() -> None:
    assert all(transform.words for transform in TRANSFORMS.values())


def test_pairs_leave_the_weights_of_a_last_stage() -> None:
    deferred = defer_last_stage_weights(pl.schedules.dualpipev(2, 4))
    check(deferred)
    assert all(letters == {"I", "W"} for letters in kinds(deferred, 3).values())


@pytest.mark.parametrize("word", ["split-cooldown", "offload", "defer-last-stage-weights=2"])
def test_a_name_gives_the_costs_to_its_transform(word: str) -> None:
    costs = Costs(1, 1, 3, 0.5, host_bandwidth=0.5)
    schedule = pl.schedules.one_f_one_b(4, 8)
    name, _, number = word.partition("=")
    apply = TRANSFORMS[name].function
    assert transformed(schedule, [word], costs) == apply(schedule, *map(int, filter(None, [number])), costs=costs)
    assert word != "offload" or transformed(schedule, [word]) != transformed(schedule, [word], costs)
