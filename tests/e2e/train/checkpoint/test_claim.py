"""The folder of checkpoints belongs to one run: a second one is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint_runs import held, run_here, runs, steps_of
from pipeloom.errors import ConfigError
from pipeloom.train.checkpoint import folder as lock
from pipeloom.train.checkpoint.folder import LOCK_FILE, RunClaim
from pipeloom.train.loop import Trainer


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.0)


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_second_run_is_refused_before_it_trains(resume: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with held(folder / LOCK_FILE), pytest.raises(ConfigError, match=r"checkpoint.dir = .* a run that is still active"):
        run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.dir": str(folder), "checkpoint.resume": resume})
    assert runs(tmp_path / "a") == []


def test_the_folder_is_locked_while_the_run_trains_and_not_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = tmp_path / "shared", Trainer.step

    def step(trainer: Trainer, *arguments: Any) -> Any:
        with pytest.raises(ConfigError, match="still active"):
            RunClaim().lock(folder, "checkpoint.dir")
        return plain(trainer, *arguments)

    monkeypatch.setattr(Trainer, "step", step)
    run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.dir": str(folder)})
    RunClaim().lock(folder, "checkpoint.dir")


@pytest.mark.parametrize("log", ["a", "b"])
def test_a_copy_of_the_checkpoints_continues_in_a_new_log_folder(log: str, tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.dir": str(original)})
    shutil.copytree(original, copy)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    run_here(tmp_path, log, {"train.steps": 2, "checkpoint.dir": str(copy), "checkpoint.resume": "auto"})
    assert {path: path.read_bytes() for path in before} == before
    assert [number for number, _ in steps_of(runs(tmp_path / log)[-1])] == [2]


def test_another_log_folder_is_used_for_the_same_checkpoints(tmp_path: Path) -> None:
    flags = {"checkpoint.dir": str(tmp_path / "original"), "checkpoint.resume": "auto"}
    run_here(tmp_path, "a", {"train.steps": 1, **flags})
    run_here(tmp_path, "a", {"train.steps": 2, **flags})
    assert len(runs(tmp_path / "a")) == 1
    run_here(tmp_path, "b", {"train.steps": 3, **flags})
    assert [number for number, _ in steps_of(runs(tmp_path / "b")[0])] == [3]
