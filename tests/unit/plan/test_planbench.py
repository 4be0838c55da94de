"""PlanBench: what its rows may be used for, and the table of docs/planning.md."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from paths import ROOT

FOLDER = ROOT / "benchmarks" / "planbench"


def rows(name):
    return json.loads((FOLDER / name).read_text())["rows"]


def test_every_row_is_marked_once_for_good():
    """Moving a row from `check` to `fit` after its prediction was seen would make its error meaningless."""
    fitted = {row["id"] for row in rows("published.json") if row["set"] == "fit"}
    assert fitted == {"V2-175B-full", "V2-175B-none", "V4-7.1B", "V4-70B", "V4-314B"}
    sets = {name: Counter(row["set"] for row in rows(f"{name}.json")) for name in ("fit", "published", "recommended")}
    assert sets == {"fit": {"fit": 7}, "published": {"fit": 5, "check": 47}, "recommended": {"check": 8}}


@pytest.mark.slow
def test_the_table_of_the_documentation_is_the_one_that_is_printed(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import releases

    found = releases.results([])
    text = (ROOT / "docs" / "planning.md").read_text()
    assert "\n".join(releases.table(found)) in text
    missing, count = releases.fitting(found)
    assert (missing, count) == (["V13-l405b-gb200-128"], 20)
    assert "**Of 20 recipes of Megatron-Bridge that run** 19 are found to fit." in text


def test_errors_of_fitted_rows_have_a_column_of_their_own(monkeypatch):
    """Ratios compare rows of one release, fp8 has ratios alone, and both columns of single rows are of their own set."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import releases

    def result(kind, theirs, ours, **published):
        return releases.Result({"set": kind, "published": published}, (theirs, ours), None, 0.0)

    check = [result("check", 1.0, 1.1), result("check", 2.0, 2.0), result("check", 1.0, 3.0, release="old")]
    fit = [result("fit", 1.0, 0.5)]
    *_, line = releases.table({"V4": check + fit})
    words = "Megatron-Core's table on H100, 48 replicas (3, 1 fitted)"
    assert line == f"| {words} | 10 %, 200 %, +70 % | 9.1 %, 9.1 % | 1 of 1 | 50 %, 50 %, -50 % |"
    *_, line = releases.table({"V7": [result("check", 1.0, 1.5, fp8=True), result("check", 2.0, 2.0, fp8=True)]})
    assert line == "| Megatron-Bridge, Llama-3 70B, fp8 (2, 0 fitted) |  | 33 %, 33 % | 1 of 1 |  |"
