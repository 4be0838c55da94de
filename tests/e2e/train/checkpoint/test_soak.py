"""A few rounds of what `make soak` does."""

from __future__ import annotations

from pathlib import Path

from soak import soak


def test_a_run_that_is_killed_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    said: list[str] = []
    soak(tmp_path, rounds=2, seed=11, say=said.append)
    assert len(said) == 3
