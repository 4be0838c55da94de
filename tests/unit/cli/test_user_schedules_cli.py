"""A schedule function of the user's that fails: the user's error, with file and line, in every command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.schedule.functions import user_object

Run = Callable[[str], Any]
MODULE = """\
import pipeloom as pl


def helper(table, key):
    return table[key]


def key_error(ranks, microbatches):
    return helper({}, "oops")


def inside_library(ranks, microbatches):
    return pl.Schedule.of([["0F0", None]], placement=[0], microbatches=1, name="x")


def exits_with(ranks, microbatches):
    raise pl.ScheduleError("my own refusal")


def incomplete(ranks, microbatches):
    rows = [[f"{stage}F{mb}" for mb in range(microbatches)] for stage in range(ranks)]
    rows[0] += ["0B0"]
    return pl.Schedule.of(rows, placement=range(ranks), microbatches=microbatches, name="x")


def no_schedule(ranks, microbatches):
    return 7


def too_few(ranks):
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "loom_user_schedules"
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "loom_syntax.py").write_text("def make(:\n")
    (tmp_path / "loom_fails.py").write_text("x = 1\ny = x / 0\n")
    return name


@pytest.mark.parametrize(
    ("function", "code", "where"),
    [
        ("{m}.py:key_error", 2, "{m}.py:5: schedule '{m}.py:key_error' raised KeyError: 'oops'"),
        ("{m}:key_error", 2, "{m}.py:5: schedule '{m}:key_error' raised KeyError: 'oops'"),
        ("{m}:inside_library", 2, "{m}.py:13: schedule '{m}:inside_library' raised "),
        ("{m}:exits_with", 3, "{m}.py:17: my own refusal"),
        ("{m}:incomplete", 3, "has no backward"),
        ("{m}:no_schedule", 2, "{m}:no_schedule returned int, not a Schedule"),
        ("{m}:absent", 2, "has no attribute 'absent'"),
        ("{m}.py:eror", 2, "module '{m}.py' has no attribute 'eror'; did you mean 'key_error'"),
        ("nowhere.py:f", 2, "schedule 'nowhere.py:f': there is no file "),
        ("loom_nowhere:f", 2, "No module named 'loom_nowhere'"),
        ("loom_syntax:make", 2, "loom_syntax.py:1: schedule 'loom_syntax:make' raised SyntaxError: "),
        (
            "loom_fails:make",
            2,
            "loom_fails.py:2: schedule 'loom_fails:make' raised ZeroDivisionError: division by zero",
        ),
    ],
)
@pytest.mark.parametrize("command", ["schedule {} --ranks 4 --microbatches 4", "train tiny --schedule.name {}"])
def test_a_failing_function_is_the_users_error(
    pipeloom: Run, module: str, command: str, function: str, code: int, where: str
) -> None:
    ended = pipeloom(command.format(function.format(m=module)))
    assert ended.code == code, ended.err
    assert where.format(m=module) in ended.err
    assert "internal error" not in ended.err
    assert "Traceback" not in ended.err


def test_a_file_runs_once(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(
        "calls = []\ndef first():\n    calls.append(1)\n    return len(calls)\nsecond = first\n"
    )
    results = [user_object(f"counts.py:{name}", tmp_path, "schedule")() for name in ("first", "second")]
    assert results == [1, 2]
