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


def test_published_layouts_are_simulated_as_their_formulas_say() -> None:
    """Idle (p/2 - 1)(F&B + B - 3W) against (p - 1)(F + B)/v, with F&B = B = 2 and F = W = 1: equal at v = 6(p - 1)/(p - 2)."""
    rows = papers.recompute("moe")
    assert len({row["model"] for row in rows}) == 8
    for row in rows:
        assert row["here"] == pytest.approx(row["formula"]), row
        assert row["parameters"] == (2 if row["schedule"] == "dualpipe" else 1)
    idle = {(row["model"], row["schedule"]): row["here"]["idle"] for row in rows}
    assert (idle["GPT-175B", "dualpipe"], idle["GPT-175B", "interleaved-overlap"]) == (3.0, 2.625)
    assert idle["Llama-3-70B", "dualpipe"] < idle["Llama-3-70B", "interleaved-overlap"]  # v = 5, below 9
    assert {row["ranks"]: row["crossover"] for row in rows} == pytest.approx({4: 9, 8: 7, 9: 48 / 7})
    peaks = {(row["model"], row["schedule"]): row["here"]["activations"] for row in rows}
    assert (peaks["GPT-175B", "dualpipe"], peaks["GPT-175B", "interleaved-overlap"]) == (9, 8.875)
    shares = {(row["model"], row["schedule"]): row["share"] for row in rows}
    assert shares["GPT-175B", "interleaved-overlap"] == 2.625 / 3
    assert shares["Llama-3-405B", "interleaved-overlap"] is None
    text = "\n".join(papers.table("moe", rows))
    assert "so p is even: none for p = 9" in text
    assert "v = 9 for p = 4, v = 7 for p = 8, v = 6.429 for p = 16" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "46 of 46 simulated figures are those of the formulas" in text


@pytest.mark.parametrize("row", PAPER["rows"][:2], ids=lambda row: f"{row['model']}-{row['microbatches']}")
@pytest.mark.parametrize("share", [0.5, 1, 1.5, 2])
def test_automatic_schedule_keeps_to_its_memory(row: dict[str, Any], share: float) -> None:
    memory, costs = share * row["ranks"], papers.costs_of(row, PAPER["models"][row["model"]])
    timeline = simulate(zb_auto(row["ranks"], row["microbatches"], memory, costs, "span"), costs)
    assert max(timeline.peak_memory) <= memory + 1e-9
