"""The zero-bubble paper's table comes out to four decimals from its own profile."""

from __future__ import annotations

from statistics import median
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


def within(rows: list[dict[str, Any]], method: str, middle: float, worst: float) -> bool:
    errors = [abs(row["error"]) for row in rows if row["method"] == method]
    return median(errors) <= middle and max(errors) <= worst


def test_steps_with_slow_links_are_predicted() -> None:
    """The orders of ZB and ZB-CPU are not published: a family stands for each."""
    content = papers.paper("pipemorph")
    measured = [row for row in content["rows"] if "ReSchedule" not in row["run"]]
    rows = papers.steps_with_slow_links(content | {"rows": measured})
    assert len(rows) == 42
    assert within(rows, "1F1B", 0.03, 0.04)
    assert within(rows, "ZB", 0.05, 0.36)
    assert within(rows, "ZB-CPU", 0.08, 0.18)


def test_the_injector_takes_peers_for_numbers() -> None:
    """Link 2_3 delays rank 2's sends to rank 1 too, and link 1_2 leaves them as they are."""
    content = papers.paper("pipemorph")
    links = ("1_2", "2_3", "3_4")
    rows = [{"run": f"x/14B/1F1B/{link}/0.03", "ms": 1.0, "gbs": ["24"]} for link in links]
    less, more, usual = (row["here"] for row in papers.steps_with_slow_links(content | {"rows": rows}))
    assert less < usual < more


@pytest.mark.slow
def test_steps_that_the_authors_planned_anew_beside_our_search() -> None:
    content = papers.paper("pipemorph")
    rows = papers.steps_with_slow_links(
        content | {"rows": [row for row in content["rows"] if "ReSchedule" in row["run"]]}
    )
    assert len(rows) == 14
    assert within(rows, "ZB-CPU-ReSchedule", 0.08, 0.15)
    words = papers.table("pipemorph", rows)
    assert any(line.startswith("ZB-CPU-ReSchedule: error in the median") for line in words)
