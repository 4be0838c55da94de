"""No family is longer than its published generator at the same memory. All cells: benchmarks/published.py."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from random import Random

import pytest

from paths import DATA
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.families import build

DATA = DATA / "published"
# Where the families were longer before: sizes and times that a sample might miss.
KNOWN = [
    ("zb-auto", 16, 16, (10, 10, 10)),
    ("zb-auto", 12, 12, (10, 15, 20)),
    ("v-half", 16, 16, (10, 10, 10)),
    ("v-half", 12, 48, (12, 10, 10)),
    ("v-half", 16, 17, (18, 18, 9)),
    ("v-min", 12, 24, (10, 15, 20)),
    ("v-min", 6, 7, (10, 10, 10)),
    ("zbv", 5, 10, (10, 15, 20)),
    ("interleaved-zb", 7, 14, (10, 12, 8)),
    ("interleaved-zb", 4, 8, (20, 10, 15)),
]
PLANNED = ("zb-auto", "zbv", "v-half", "v-min")
Row = dict[str, str]


def rows() -> Iterator[Row]:
    for path in sorted(DATA.glob("*.csv")):
        for row in csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")):
            yield {**row, "source": path.stem}


def key(row: Row) -> tuple[str, int, int, tuple[int, ...]]:
    times = tuple(int(row[name]) for name in ("forward", "input_grad", "weight_grad"))
    return row["family"], int(row["ranks"]), int(row["microbatches"]), times


def sample() -> list[Row]:
    """The known cells, and for each family some of the smaller and a few of those that take less than half a second."""
    every = [row for row in rows() if int(row["ranks"]) * int(row["microbatches"]) <= 300 or key(row) in KNOWN]
    chosen = [row for row in every if key(row) in KNOWN or row["source"] == "primus"]
    random = Random(13)
    for family in sorted({row["family"] for row in every}):
        own = [row for row in every if row["family"] == family]
        small = [row for row in own if int(row["ranks"]) * int(row["microbatches"]) <= 100]
        few = family not in PLANNED and family != "interleaved-zb"
        chosen += random.sample(small, 6 if few else 12) + random.sample(own, 1 if few else 3)
    return chosen


def test_the_grid_is_whole() -> None:
    cells = {key(row) for row in rows() if row["source"] == "zero_bubble"}
    times = {cell[3] for cell in cells}
    assert len(times) == 8
    assert any(f > i for f, i, _ in times)
    assert any(f < i for f, i, _ in times)
    assert {cell[1] for cell in cells} == set(range(4, 17))
    assert all({p, 4 * p} <= {cell[2] for cell in cells if cell[1] == p} for p in range(4, 17))
    assert len(cells) == 4 * 13 * 5 * 8
    assert {known for known in KNOWN if known[0] in PLANNED} <= cells


@pytest.mark.slow
@pytest.mark.parametrize("row", sample(), ids=lambda row: "-".join(list(row.values())[:8]))
def test_no_family_is_longer_than_its_published_generator(row: Row) -> None:
    costs = Costs(*(float(row[name]) for name in ("forward", "input_grad", "weight_grad", "p2p")))
    sizes, memory = (int(row["ranks"]), int(row["microbatches"])), int(row["memory"])
    options = {"memory": memory} if row["family"] in ("zb-auto", "interleaved-zb") else {}
    schedule = build(row["family"], *sizes, None, options, costs)
    check(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.makespan <= float(row["makespan"]) + 1e-6
    assert max(timeline.peak_activations) <= memory
    if row["source"] == "zero_bubble":  # planned for the least span
        if row["family"] in ("zbv", "zb-auto"):
            options |= {"objective": "span"}
            timeline = simulate(build(row["family"], *sizes, None, options, costs), costs)
        assert max(timeline.spans) <= float(row["span"]) + 1e-6
