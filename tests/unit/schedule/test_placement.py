"""Placements by name and back, those that are refused, and the families of each."""

from __future__ import annotations

import pytest

from pipeloom.errors import ArgumentError, PipeloomError, UsageError
from pipeloom.schedule.families import BASELINES, FAMILIES, ONE_ROUTE, baseline, baseline_memory, build
from pipeloom.schedule.placement import NAMED, linear, loop, name_of, named, require_placement, vee


def test_named_placements() -> None:
    assert loop(3, 2) == [0, 1, 2, 0, 1, 2]
    assert vee(3) == [0, 1, 2, 2, 1, 0]
    assert vee(2, 3) == [0, 1, 1, 0, 0, 1]
    assert linear(2, 3) == [0, 0, 0, 1, 1, 1]
    assert named("vee", 2, 2) == (0, 1, 1, 0)
    with pytest.raises(UsageError, match="placement is 'vea'; did you mean 'vee'"):
        named("vea", 2, 2)


def test_names_of_placements() -> None:
    assert {name_of(make(4, 1), 4) for make in NAMED.values()} == {"linear"}
    assert [name_of(make(4, 2), 4) for make in (loop, vee, linear)] == ["loop", "vee", ""]
    assert name_of(vee(3, 4), 3) == "vee"
    assert name_of([1, 0], 2) == name_of([0, 1, 0], 2) == ""


@pytest.mark.parametrize("name", ONE_ROUTE)
def test_the_families_of_a_placement_are_made_for_it(name: str) -> None:
    """Every family with one route stands under its own placement, and a default of every size is built on it."""
    for family in ONE_ROUTE[name]:
        assert name_of(build(family, 4, 8).placement, 4) == name, family
    assert ONE_ROUTE[name][: len(BASELINES[name])] == BASELINES[name]
    listed = {family for families in ONE_ROUTE.values() for family in families}
    assert set(FAMILIES) - listed == {family for family in FAMILIES if len(build(family, 4, 8).routes) > 1}


@pytest.mark.parametrize(
    ("placement", "chunks", "words"),
    [
        ((0, 1, 2, 9), None, r"placement names rank 9; there are 4 \(0..3\)"),
        ((0, 1, 2, -1), None, "placement names rank -1"),
        ((0, 1, 2, "x"), None, "placement names rank 'x'"),
        ((0, 1, 3), None, "placement leaves rank 2 without a stage"),
        ((0, 1, 2, 3, 3), 1, "chunks is 1, and the placement puts 2 stages on rank 3; nearest: 2"),
    ],
)
def test_placements_that_are_refused(placement: tuple[int, ...], chunks: int | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        require_placement(placement, 4, chunks)
    assert issubclass(ArgumentError, PipeloomError)


def test_the_baseline_of_a_placement() -> None:
    """The first family that fits the memory, list scheduling below all of them, an error below what holds one micro-batch."""
    names = [baseline(vee(4), 4, 8, memory).name for memory in (8, 6, 5, 3)]
    assert names == ["zbv", "v-half", "v-min", "list scheduling"]
    assert baseline_memory(vee(4), 4, 8) == (8, "zbv")
    assert baseline_memory([0, 1, 0, 1, 1], 2, 4) == (6, "1f1b")
    assert baseline(linear(4, 2), 4, 8, 8).name == "list scheduling"
    with pytest.raises(ArgumentError, match="memory is 1; no schedule was found that fits it"):
        baseline(loop(2, 2), 2, 4, 1)


def test_a_placement_that_is_given() -> None:
    assert require_placement([0, 1, 1, 0], 2) == require_placement([0, 1, 1, 0], 2, 2) == (0, 1, 1, 0)
