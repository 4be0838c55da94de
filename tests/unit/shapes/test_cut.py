"""Stage balance and the stages string."""

from __future__ import annotations

import itertools
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import UsageError
from pipeloom.shapes.cut import balance, expand, parse_stages


def all_cuts(costs: list[int], stages: int) -> list[list[int]]:
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    return [[b - a for a, b in pairwise(cut)] for cut in cuts]


def sums(costs: list[int], sizes: list[int]) -> list[int]:
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    sizes = balance(costs, stages)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1

    def badness(cut: list[int]) -> tuple[int, int]:
        held = sums(costs, cut)
        return max(held), sum(cost * cost for cost in held)

    assert badness(sizes) == min(map(badness, all_cuts(costs, stages)))


def test_literal_of_sixteen_equal_layers() -> None:
    sizes = balance([0, *[1] * 16, 0], 8)
    assert sizes == [3, 2, 2, 2, 2, 2, 2, 3]  # stage 0 holds layers 1, 2 and stage 4 layers 9, 10: both are rank 0's


def test_larger_stages_come_first_when_the_rest_ties() -> None:
    assert balance([1] * 10, 4) == [3, 3, 2, 2]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 40), st.integers(0, 8), st.data())
def test_equal_blocks_are_balanced_as_the_best_of_all_cuts(
    first: int, block: int, last: int, blocks: int, data: st.DataObject
) -> None:
    costs = [first, *[block] * blocks, last]
    stages = data.draw(st.integers(1, len(costs)))

    def badness(cut: list[int]) -> tuple[int, int, list[int]]:
        held = sums(costs, cut)
        return max(held), sum(cost * cost for cost in held), [-size for size in cut]

    assert badness(balance(costs, stages)) == min(map(badness, all_cuts(costs, stages)))


def test_balance_takes_linear_time_for_equal_blocks() -> None:
    assert sum(balance([3, *[10] * 100_000, 400], 64)) == 100_002  # the general way takes hours


def test_repetitions_of_a_stages_string_are_bounded() -> None:
    for text in ("t*999999999", "(" * 60_000 + "t" + ")" * 60_000, "t*100000" * 900, "((t*1000)*1000)*1000"):
        with pytest.raises(UsageError) as refused:
            expand(text)
        assert len(str(refused.value)) < 300


def test_too_many_stages() -> None:
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        balance([1, 1], 3)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Et*3|ttL", "Ettt|ttL"),
        ("E(t|)*3L", "Et|t|t|L"),
        ("E((t|)*2t)*2L", "Et|t|tt|t|tL"),
        ("Et\\|tL", "Et|tL"),
        (" E t*2 | tL ", "Ett|tL"),
        ("(Et)|(tL)", "Et|tL"),
    ],
)
def test_expand(text: str, letters: str) -> None:
    assert expand(text) == letters


def test_a_bar_at_the_end_closes_the_last_stage() -> None:
    assert parse_stages("Et|tL|", 2, 2) == [2, 2]


def written(sizes: list[int], blocks: int) -> str:
    """The string for stages of these sizes, without repetitions."""
    letters = iter("E" + "t" * blocks + "L")
    return "|".join("".join(itertools.islice(letters, size)) for size in sizes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_written_strings_are_read_back(sizes: list[int]) -> None:
    sizes = [sizes[0] + 1, *sizes[1:]]
    sizes[-1] += 1
    blocks = sum(sizes) - 2
    assert parse_stages(written(sizes, blocks), blocks, len(sizes)) == sizes
