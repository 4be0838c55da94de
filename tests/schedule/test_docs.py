"""The table of docs/schedules.md is what the families give, and every family has its section and its drawing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import FAMILIES, build

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "schedules.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row(row: list[str]) -> None:
    name = row[0].split("`")[1]
    chunks = re.search(r"v = (\d+)", row[0])
    schedule = build(name, 8, 24, int(chunks[1]) if chunks else None)
    per_rank = schedule.positions // 8  # stages that share 1/p of the model
    timeline = simulate(schedule, Costs().scaled(1 / per_rank))
    assert float(row[1]) == pytest.approx(timeline.makespan)
    assert float(row[2]) == pytest.approx(timeline.bubble_ratio, abs=6e-5)
    assert float(row[3]) == pytest.approx(timeline.span_bubble_rate, abs=6e-5)
    assert float(row[4]) == max(timeline.peak_activations) / per_rank
    assert row[5] == f"{len(schedule.routes)}×"


def test_every_family_is_there() -> None:
    assert {row[0].split("`")[1] for row in ROWS} == set(FAMILIES)
    for name in FAMILIES:
        assert f"\n### {name}\n" in TEXT
        assert f"![{name}](img/{name}.svg)" in TEXT
        assert (DOCS / "img" / f"{name}.svg").is_file()
