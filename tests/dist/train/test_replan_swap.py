"""A schedule swapped in mid-run: the same losses, on every rank alike, and after a resumption."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from checkpoint_runs import run_here, runs
from pipeloom.schedule.json_form import from_json, to_dict
from pipeloom.schedule.transforms import split_cooldown
from pipeloom.solver.replan import request
from pipeloom.train import replan
from pipeloom.train.replan import BackgroundSearch
from processes import run_ranks, wait_for

STEPS = 9
KEYS = {
    **{"parallel.pp": 2, "schedule.name": "1f1b", "schedule.microbatches": 4, "train.steps": STEPS, "sample.tokens": 0},
    **{"checkpoint.every": 4, "train.seq_len": 16, "log.every": 1, "train.eval_batches": 1},
}
OTHER = split_cooldown(pl.schedules.build("1f1b", 2, 4))


class Immediate:
    """A search whose answer is OTHER, at once."""

    def __init__(self, text: str) -> None:
        pass

    def answer(self) -> dict[str, Any]:
        return to_dict(OTHER)

    def close(self) -> None:
        pass


def swapped(rank: int, folder: Path) -> None:
    """A run without, one that swaps after step 5 (measured: 1 to 3; drifted: 4), and one resumed from its checkpoint."""
    run_here(folder, "without", KEYS, rank)
    replan.BackgroundSearch = Immediate  # type: ignore[assignment,misc]  # of this process only
    replan.drift = lambda before, now, stages: (1.0, "all has changed")  # type: ignore[assignment]
    with_it = KEYS | {"schedule.replan": 1, "schedule.replan_threshold": 0.9}
    run_here(folder, "with", with_it, rank)
    replan.drift = lambda before, now, stages: (0.0, "nothing has changed")  # type: ignore[assignment]
    (run,) = runs(folder / "with")
    run_here(folder, "resumed", with_it | {"checkpoint.resume": str(run / "step-000008")}, rank)


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    (run,) = runs(log)
    return [
        each for line in (run / "log.jsonl").read_text().splitlines() if (each := json.loads(line))["event"] == kind
    ]


def test_losses_are_those_of_a_run_without(tmp_path: Path) -> None:
    run_ranks(swapped, 2, tmp_path)
    plain, swaps, resumed = (
        {each["step"]: each["loss"] for each in events(tmp_path / log, "step")}
        for log in ("without", "with", "resumed")
    )
    assert events(tmp_path / "with", "replan")[0]["swapped"] is True
    assert events(tmp_path / "with", "replan")[0]["step"] == 5
    assert swaps == pytest.approx(plain, rel=1e-6)
    assert resumed == pytest.approx({9: plain[9]}, rel=1e-6)
    schedules = []
    for log, step in (("with", 4), ("with", 8), ("resumed", 9)):
        extra = next(run for run in runs(tmp_path / log)) / f"step-{step:06}" / "extra.json"
        schedules.append(from_json(json.dumps(json.loads(extra.read_text())["schedule"])).codes)
    assert schedules == [pl.schedules.build("1f1b", 2, 4).codes, OTHER.codes, OTHER.codes]


def answer_of(text: str) -> dict[str, Any]:
    search = BackgroundSearch(text)
    try:
        while (answer := search.answer()) is None:
            time.sleep(0.01)
        return answer
    finally:
        search.close()


def test_a_search_in_a_process_of_its_own_answers() -> None:
    schedule = pl.schedules.build("1f1b", 2, 3)
    answer = answer_of(request(schedule, {}, pl.simulate(schedule).peak_memory, "makespan", 3.0))
    assert pl.simulate(from_json(json.dumps(answer))).makespan < pl.simulate(schedule).makespan


_ASKS = """
import sys, time
from pipeloom.train.replan import BackgroundSearch
search = BackgroundSearch(sys.argv[1])
print("asked", flush=True)
time.sleep(600)
"""


def test_a_search_ends_with_the_trainer_however_that_ends() -> None:
    """A search of ten minutes, whose trainer is killed."""
    schedule = pl.schedules.build("1f1b", 8, 64)
    text = request(
        schedule, {"forward": [1, 2, 1, 3, 1, 2, 1, 1.5]}, pl.simulate(schedule).peak_memory, "makespan", 600.0
    )
    trainer = subprocess.Popen([sys.executable, "-c", _ASKS, text], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "asked\n"
    (search,) = [number for number, row in processes().items() if row[1] == str(trainer.pid)]
    trainer.kill()
    trainer.wait()
    assert wait_for(lambda: processes().get(search, "Z")[0] == "Z")


def processes() -> dict[str, list[str]]:
    """Number of each process -> its state, its parent, and what else /proc says of it."""
    rows: dict[str, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            rows[path.parent.name] = path.read_text().rpartition(")")[2].split()
    return rows


def test_a_search_that_fails_says_why() -> None:
    schedule = pl.schedules.build("1f1b", 2, 3)
    assert (
        "forward has 3 values"
        in answer_of(request(schedule, {"forward": [1, 1, 1]}, [2, 1], "makespan", 3.0))["failed"]
    )
