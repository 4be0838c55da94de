"""The table of pairs in docs/memory.md: a sample of its cells against one process; `make full` compares all of them."""

from __future__ import annotations

import re

import pytest

from pairs import BEGIN, END, FEATURES, PAGE, TOLERANCE, Combination, errors, lacking, pairs, table
from processes import run_ranks


def equal(combinations: list[Combination]) -> bool:
    found = run_ranks(errors, 4, combinations)[0]
    assert len(found) == len(combinations)
    return all(isinstance(error, float) and error <= TOLERANCE for error in found)


def test_a_sample_is_equal() -> None:
    """Each feature is in two of the pairs."""
    assert equal([Combination((first, second)) for first, second in zip(FEATURES[:5], FEATURES[5:], strict=False)])
    assert equal([Combination(("R:norms", "O, L", "experts", "F|B")), Combination(("uneven", "tp", "(R;B)"))])


@pytest.mark.full
def test_every_pair_is_equal() -> None:
    assert equal(pairs())


def test_the_page_has_the_table_of_these_pairs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == "\n".join(table(dict.fromkeys(pairs(), 0.0))) + "\n"


def test_the_schedules_have_their_features() -> None:
    assert {combination.features: lacking(combination) for combination in pairs() if lacking(combination)} == {}


def test_a_refusal_is_in_the_table() -> None:
    lines = [*table(dict.fromkeys(pairs(), 0.0) | {Combination(("R", "tp")): "it cannot be"})]
    assert re.search(r"\| tp \| no \((\d)\) \|", "\n".join(lines))
    assert any(line.endswith("it cannot be  ") for line in lines)
