"""The table of docs/schedules.md is what the families give, and every family has its section and its drawing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from paths import ROOT
from pipeloom.cli import app
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.transforms import unpair

DOCS = ROOT / "docs"
TEXT = (DOCS / "schedules.md").read_text(encoding="utf-8")
TABLES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")]
ROWS = [row for row in TABLES if len(row) == 6]
COOLED = [row for row in TABLES if len(row) == 4 and row[1].replace(".", "").isdecimal()]


def made(cell: str, **options: str) -> tuple[Schedule, int, Costs]:
    """The schedule of a table's first cell, its stages that share 1/p of the model, and their costs."""
    name, chunks = cell.split("`")[1], re.search(r"v = (\d+)", cell)
    asked = int(chunks[1]) if chunks else None
    per_rank = build(name, 8, 24, asked).positions // 8
    costs = Costs().resized(1 / per_rank)
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


def compared(words: str) -> dict[str, Any]:
    """Label -> figures of what `compare` prints."""
    result = CliRunner().invoke(app, ["compare", *words.split(), "--json"])
    return {schedule["label"]: schedule for schedule in json.loads(result.stdout)["schedules"]}


def test_the_table_is_what_the_command_above_it_prints() -> None:
    command = re.search(r"^pipeloom compare (all .*)$", TEXT, re.MULTILINE)
    assert command is not None
    schedules = compared(command[1])
    assert len(ROWS) == len(schedules)
    for row in ROWS:
        figures = schedules[row[0].split("`")[1] + (":chunks=4" if "v = 4" in row[0] else "")]
        assert float(row[1]) == pytest.approx(figures["makespan"])
        assert float(row[2]) == pytest.approx(figures["bubble_ratio"], abs=6e-5)
        assert float(row[3]) == pytest.approx(figures["span_bubble_rate"], abs=6e-5)
        assert float(row[4]) == max(figures["full_rank_activations"])
        assert row[5] == f"{len(figures['routes'])}×"


def test_uneven_times_of_v_min() -> None:
    schedules = compared("v-min 1f1b --ranks 8 --microbatches 24 --forward 10 --input-grad 12 --weight-grad 8 --p2p 1")
    words = f"it takes {schedules['v-min']['makespan']:g} where 1F1B takes {schedules['1f1b']['makespan']:g}."
    assert words in TEXT


def test_every_family_is_there() -> None:
    assert {row[0].split("`")[1] for row in ROWS} == set(FAMILIES)
    for name in FAMILIES:
        assert f"\n### {name}\n" in TEXT
        assert f"![{name}](img/{name}.svg)" in TEXT
        assert (DOCS / "img" / f"{name}.svg").is_file()


def test_no_file_cites_a_document_that_is_not_here() -> None:
    """Whoever has this repository alone can follow every citation."""
    root = ROOT
    files = [
        path for folder in ("src", "tests", "docs", "benchmarks", "examples") for path in (root / folder).rglob("*")
    ]
    names = "|".join(("SP" + "EC", "DES" + "IGN", "REV" + "IEW"))
    words = re.compile(rf"\b({names})\b")
    cited = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in [*files, *root.glob("*.md")]
        if path.suffix in (".py", ".md", ".toml")
        for line in path.read_text().splitlines()
        if words.search(line)
    ]
    assert not cited


def test_the_table_of_slices_is_what_its_command_prints() -> None:
    text = (DOCS / "long_sequences.md").read_text()
    command = re.search(r"^pipeloom compare (1f1b .*)$", text, re.MULTILINE)
    assert command is not None
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if re.match(r"\| `\S+` \|.*\d \|$", line)
    ]
    assert rows == [
        [f"`{label}`", f"{each['makespan']:.5g}", f"{each['bubble_ratio']:.4f}", f"{max(each['peak_memory']):.2f}"]
        for label, each in compared(command[1]).items()
    ]
