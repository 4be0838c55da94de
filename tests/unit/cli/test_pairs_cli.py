"""Pairs that gain, from the command line: `--all-to-all` in `compare`, `--pairs` in `search`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.json_form import from_json

Run = Callable[[str], Any]


def test_compare_with_all_to_all(pipeloom: Run) -> None:
    """Known figures at an all-to-all share of 0.3; schedules without pairs do not gain."""
    expected = {"dualpipe": 77.7, "dualpipev": 78.25, "interleaved-overlap": 79.35, "1f1b-overlap": 86.7, "1f1b": 105.3}
    flags = "--ranks 8 --microbatches 32 --weight-grad 0.7 --all-to-all 0.3 --json"
    rows = json.loads(pipeloom(f"compare {' '.join(expected)} {flags}").out)["schedules"]
    assert {row["label"]: row["makespan"] for row in rows} == pytest.approx(expected)


def test_search_over_pairs(pipeloom: Run) -> None:
    line = "search --ranks 4 --microbatches 8 --chunks 2 --memory 10 --weight-grad 0.6 --all-to-all 0.4 --iterations 30"
    costs = Costs(weight_grad=0.6, all_to_all=0.4)
    without, found = (json.loads(pipeloom(f"{line} {flag} --json").out) for flag in ("", "--pairs"))
    assert found["makespan"] < without["makespan"]
    assert found["lower_bound"] <= found["makespan"]
    assert max(found["peak_memory"]) <= 10
    schedule = from_json(json.dumps(found))
    check(schedule)
    assert schedule.has_pairs
    assert simulate(schedule, costs).makespan == pytest.approx(found["makespan"])
    text = pipeloom(f"{line} --pairs --csv").out
    assert "OVERLAP_F_B" in text
    assert from_csv(text).codes == schedule.codes
