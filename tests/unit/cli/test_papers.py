"""The zero-bubble paper's table comes out to four decimals from its own profile."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.cli import papers
from pipeloom.schedule import simulate
from pipeloom.schedule.families.zb_auto import zb_auto

PAPER = papers.paper("zero-bubble")


def test_table_of_record() -> None:
    rows = papers.recompute("zero-bubble")
    assert len(rows) == 6
    for row in rows:
        here = {column: round(rate, 4) for column, rate in row["here"].items()}
        assert here.pop("zb-auto 2p") <= row["published"]["zb-auto 2p"]
        assert here == {column: rate for column, rate in row["published"].items() if column != "zb-auto 2p"}


@pytest.mark.parametrize("row", PAPER["rows"][:2], ids=lambda row: f"{row['model']}-{row['microbatches']}")
@pytest.mark.parametrize("share", [0.5, 1, 1.5, 2])
def test_automatic_schedule_keeps_to_its_memory(row: dict[str, Any], share: float) -> None:
    memory, costs = share * row["ranks"], papers.costs_of(row, PAPER["models"][row["model"]])
    timeline = simulate(zb_auto(row["ranks"], row["microbatches"], memory, costs, "span"), costs)
    assert max(timeline.peak_memory) <= memory + 1e-9
