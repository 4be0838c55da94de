"""A few rounds of what `make soak` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak import corrupt, soak


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    said: list[str] = []
    soak(tmp_path, rounds=2, seed=11, say=said.append)
    assert len(said) == 3


def test_damages_are_refused_or_change_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    corrupt(tmp_path, count=40, seed=5, say=said.append)
    assert int(said[0].split()[2]) >= 30  # most of them matter
