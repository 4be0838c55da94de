"""`pipeloom search`: the drawing, the other forms, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.schedule import check, simulate
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.json_form import from_json

Run = Callable[[str], Any]
SMALL = "search --ranks 4 --microbatches 8 --memory 3 --iterations 800"


def test_it_draws_and_says_how_good_it_is(pipeloom: Run) -> None:
    ended = pipeloom(SMALL)
    assert (ended.code, ended.err) == (0, "")
    assert "makespan 31, largest span" in ended.out
    assert "lower bound 28, gap 10.7 %" in ended.out
    assert ended.out.count("lower bound") == 1  # the search's alone, which counts the memory
    assert "4 ranks, 8 micro-batches" in ended.out


def test_json_is_a_schedule_and_its_search(pipeloom: Run) -> None:
    ended = pipeloom(f"{SMALL} --seed 3 --json")
    found = json.loads(ended.out)
    schedule = from_json(ended.out)
    check(schedule)
    assert simulate(schedule).makespan == found["makespan"] == found["search"]["value"]
    assert found["search"]["memory"] == 3
    assert found["search"]["seed"] == 3
    assert found["lower_bound"] == found["search"]["lower_bound"] == 28
    assert max(found["peak_memory"]) <= 3


def test_csv_and_svg(pipeloom: Run, tmp_path: Path) -> None:
    ended = pipeloom(f"{SMALL} --placement vee --chunks 2 --memory 8 --csv --svg {tmp_path / 'a.svg'}")
    schedule = from_csv(ended.out)
    check(schedule)
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_costs_by_stage_and_held_memory(pipeloom: Run) -> None:
    line = (
        "search --ranks 2 --microbatches 5 --memory 2.5 --held-until-weight-grad 0.5 --forward 1,2 --weight-grad 0.5,2"
    )
    found = json.loads(pipeloom(f"{line} --objective span --iterations 500 --json").out)
    assert found["costs"]["forward"] == [1, 2]
    assert max(found["peak_memory"]) <= 2.5
    assert found["search"]["objective"] == "span"
    assert max(found["spans"]) == found["search"]["value"]


def test_it_says_what_is_copied_to_the_host(pipeloom: Run) -> None:
    ended = pipeloom("search --ranks 2 --microbatches 3 --memory 1.5 --host-bandwidth 1 --iterations 0")
    assert "\noffloaded: stages 0: micro-batches 0-2\n" in ended.out


def test_costs_by_microbatch(pipeloom: Run) -> None:
    line = "--ranks 2 --microbatches 4 --microbatch-costs 1,3,1,2"
    found = json.loads(pipeloom(f"search {line} --memory 5 --iterations 200 --json").out)
    assert found["costs"]["microbatch"] == [1, 3, 1, 2]
    assert max(found["peak_memory"]) <= 5
    assert found["lower_bound"] <= found["makespan"]
    one = json.loads(pipeloom(f"schedule 1f1b {line} --json").out)
    assert one["busy"] == [21, 21]
    assert found["makespan"] <= one["makespan"]
    assert "micro-batches times 1..3" in pipeloom(f"schedule 1f1b {line}").out
    compared = json.loads(pipeloom(f"compare 1f1b gpipe {line} --json").out)
    assert compared["schedules"][0]["makespan"] == one["makespan"]


def test_messages_that_are_waited_for(pipeloom: Run) -> None:
    line = "--ranks 4 --microbatches 8 --p2p 0.5"
    values = {}
    for flag in ("", " --no-overlap-p2p"):
        one = json.loads(pipeloom(f"schedule 1f1b {line}{flag} --json").out)
        compared = json.loads(pipeloom(f"compare 1f1b {line}{flag} --json").out)
        found = json.loads(pipeloom(f"search {line}{flag} --iterations 50 --json").out)
        assert compared["schedules"][0]["makespan"] == one["makespan"] >= found["makespan"] == found["search"]["value"]
        values[flag] = one["makespan"], one["period"], found["makespan"]
    assert all(slow > fast for fast, slow in zip(values[""], values[" --no-overlap-p2p"], strict=True))


@pytest.fixture
def ortools() -> None:
    """Import it, which takes seconds, outside a test's call."""
    pytest.importorskip("ortools.sat.python.cp_model")


@pytest.mark.usefixtures("ortools")
def test_a_proof_is_printed(pipeloom: Run) -> None:
    ended = pipeloom("search --ranks 4 --microbatches 8 --memory 2 --iterations 500 --prove")
    assert "lower bound 41, proved optimal" in ended.out


def test_an_interrupt_prints_the_best_and_ends_with_130(pipeloom: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeloom.solver.tabu.TabuSearch.walk", interrupted)
    ended = pipeloom(f"{SMALL} --json")
    assert ended.code == 130
    assert json.loads(ended.out)["search"]["interrupted"]


def test_a_limit_in_bytes_needs_costs_in_bytes(pipeloom: Run) -> None:
    ended = pipeloom("search --ranks 4 --microbatches 8 --memory 80GiB")
    assert ended.code == 2
    assert "--memory 80GiB: a limit in bytes needs the bytes of what a stage saves: give --costs FILE" in ended.err
