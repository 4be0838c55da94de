"""A run holds no more after some hundred steps than after some dozen."""

from __future__ import annotations

from pathlib import Path

import pytest

import growth


@pytest.mark.full
def test_nothing_grows(tmp_path: Path) -> None:
    rows = growth.watched(tmp_path, "shared memory", steps=400, early=60)
    assert sorted(rows) == [0, 1]
    # an allocator that warms up takes about 1 MiB; the leak of 52 KiB per log line that this is for would take 3.4
    assert growth.growth(rows, most_kib=2048) == []


def test_growth_is_named() -> None:
    before, after = growth.Held(100_000, 9, 3, 400), growth.Held(101_025, 18, 4, 408)
    assert growth.growth({1: (before, after)}) == [
        "rank 1: kib grew from 100000 to 101025",
        "rank 1: descriptors grew from 9 to 18",
        "rank 1: threads grew from 3 to 4",
    ]
