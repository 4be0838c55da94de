"""`--sends` and `--runtime`: how long senders wait, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeloom import Costs, schedules, simulate
from pipeloom.cli import app
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule.json_form import to_json

SIZES = ["--ranks", "3", "--microbatches", "4", "--p2p", "0.5"]
COUPLED = simulate(schedules.one_f_one_b(3, 4), Costs(p2p=0.5, sends="coupled")).makespan
FREE = simulate(schedules.one_f_one_b(3, 4), Costs(p2p=0.5)).makespan


def printed(capsys: Any, *words: str) -> dict[str, Any]:
    app([*words, "--json"], standalone_mode=False)
    form: dict[str, Any] = json.loads(capsys.readouterr().out)
    return form


@pytest.mark.parametrize(
    ("words", "makespan"),
    [
        ([], FREE),
        (["--sends", "coupled"], COUPLED),
        (["--runtime", "megatron"], COUPLED),
        (["--runtime", "pipeloom"], FREE),
    ],
)
def test_schedule_and_compare(words: list[str], makespan: float, capsys: Any) -> None:
    assert FREE < COUPLED
    assert printed(capsys, "schedule", "1f1b", *SIZES, *words)["makespan"] == makespan
    (row,) = printed(capsys, "compare", "1f1b", *SIZES, *words)["schedules"]
    assert row["makespan"] == makespan


def test_search(capsys: Any) -> None:
    words = ["search", *SIZES, "--placement", "linear", "--iterations", "30"]
    free, coupled = printed(capsys, *words), printed(capsys, *words, "--sends", "coupled")
    assert free["search"]["value"] < coupled["search"]["value"] <= COUPLED


def test_check(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(to_json(schedules.zb_h2(2, 6)))
    app(["check", str(file)], standalone_mode=False)
    with pytest.raises(ScheduleError, match="deadlocks with coupled sends"):
        app(["check", str(file), "--sends", "coupled"], standalone_mode=False)
    app(["check", str(file), "--runtime", "torchtitan"], standalone_mode=False)
    with pytest.raises(UsageError, match="--sends is free and --runtime megatron; give one of them"):
        app(["check", str(file), "--sends", "free", "--runtime", "megatron"], standalone_mode=False)


def test_all_that_deadlocks_is_skipped_with_its_reason(capsys: Any) -> None:
    form = printed(capsys, "compare", "all", "--ranks", "4", "--microbatches", "8", "--sends", "coupled")
    reasons = {row["name"]: row["reason"] for row in form["refused"]}
    assert "deadlocks with coupled sends" in reasons["dualpipe"]
    assert "1f1b" not in reasons
