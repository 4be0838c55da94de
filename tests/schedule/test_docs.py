"""The table of docs/schedules.md is what the families give, and every family has its section and its drawing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.transforms import unpair

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "schedules.md").read_text(encoding="utf-8")
TABLES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")]
ROWS = [row for row in TABLES if len(row) == 6]
COOLED = [row for row in TABLES if len(row) == 4]


def made(cell: str, **options: str) -> tuple[Schedule, int, Costs]:
    """The schedule of a table's first cell, its stages that share 1/p of the model, and their costs."""
    name, chunks = cell.split("`")[1], re.search(r"v = (\d+)", cell)
    asked = int(chunks[1]) if chunks else None
    per_rank = build(name, 8, 24, asked).positions // 8
    costs = Costs().scaled(1 / per_rank)
    return build(name, 8, 24, asked, options, costs if options else None), per_rank, costs


@pytest.mark.parametrize("row", COOLED, ids=lambda row: row[0])
def test_row_of_the_cooldown(row: list[str]) -> None:
    whole, per_rank, costs = made(row[0])
    assert float(row[1]) == simulate(whole, costs).makespan
    timeline = simulate(made(row[0], cooldown="split")[0], costs)
    assert float(row[2]) == pytest.approx(timeline.makespan)
    assert float(row[3]) == max(timeline.peak_activations) / per_rank


def test_pairs_apart() -> None:
    words = re.search(r"`dualpipe` then takes ([\d.]+) here, `dualpipev` ([\d.]+)\.", TEXT)
    assert words is not None
    for name, told in zip(("dualpipe", "dualpipev"), words.groups(), strict=True):
        schedule, _, costs = made(f"`{name}`")
        assert simulate(unpair(schedule), costs).makespan == float(told)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row(row: list[str]) -> None:
    schedule, per_rank, costs = made(row[0])
    timeline = simulate(schedule, costs)
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


def test_no_file_cites_a_document_that_is_not_here() -> None:
    """Whoever has this repository alone can follow every citation."""
    root = Path(__file__).parents[2]
    files = [
        path for folder in ("src", "tests", "docs", "benchmarks", "examples") for path in (root / folder).rglob("*")
    ]
    words = re.compile("|".join(("SP" + "EC", "DES" + "IGN", "REV" + "IEW")) + r"\b")
    cited = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in [*files, *root.glob("*.md")]
        if path.suffix in (".py", ".md", ".toml")
        for line in path.read_text().splitlines()
        if words.search(line)
    ]
    assert not cited
