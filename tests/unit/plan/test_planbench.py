"""PlanBench: what its rows may be used for, and the table of docs/planning.md."""

from __future__ import annotations

import json
from collections import Counter
from statistics import median

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


@pytest.fixture
def slow_links(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import slow_links

    return slow_links


def within(rows, method, middle, worst):
    errors = [abs(row["error"]) for row in rows if row["method"] == method]
    return median(errors) <= middle and max(errors) <= worst


def test_steps_with_slow_links_are_predicted(slow_links):
    """The orders of ZB and ZB-CPU are not published: a family stands for each."""
    content = slow_links.content()
    measured = [row for row in content["rows"] if "ReSchedule" not in row["run"]]
    found = slow_links.predicted(content | {"rows": measured})
    assert len(found) == 42
    assert within(found, "1F1B", 0.03, 0.04)
    assert within(found, "ZB", 0.05, 0.36)
    assert within(found, "ZB-CPU", 0.08, 0.18)


def test_the_injector_takes_peers_for_numbers(slow_links):
    """Link 2_3 delays rank 2's sends to rank 1 too, and link 1_2 leaves them as they are."""
    links = ("1_2", "2_3", "3_4")
    delayed = [{"run": f"x/14B/1F1B/{link}/0.03", "ms": 1.0, "gbs": ["24"]} for link in links]
    less, more, usual = (row["here"] for row in slow_links.predicted(slow_links.content() | {"rows": delayed}))
    assert less < usual < more


@pytest.mark.slow
def test_steps_that_the_authors_planned_anew_beside_our_search(slow_links, monkeypatch, capsys):
    content = slow_links.content()
    content |= {"rows": [row for row in content["rows"] if "ReSchedule" in row["run"]]}
    found = slow_links.predicted(content)
    assert len(found) == 14
    assert within(found, "ZB-CPU-ReSchedule", 0.08, 0.15)
    monkeypatch.setattr(slow_links, "predicted", lambda given: found)
    slow_links.main()
    assert "\nZB-CPU-ReSchedule: error in the median" in capsys.readouterr().out
