"""The folder of checkpoints belongs to one run: a second one is refused, and later attempts of the same run are not."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint_runs import held, run_here, runs, steps_of
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.train.checkpoint import folder as lock
from pipeloom.train.checkpoint.folder import RUN_ID, RunClaim, complete
from pipeloom.train.loop import Trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.0)


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_second_run_is_refused_before_it_trains(resume: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with held(folder / RUN_ID), pytest.raises(ConfigError, match=r"checkpoint.dir = .* a run that is still active"):
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


def test_a_run_that_continues_keeps_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.dir": str(folder)})
    name, attempt = (folder / RUN_ID).read_text().split()
    run_here(tmp_path, "a", {"train.steps": 2, "checkpoint.dir": str(folder), "checkpoint.resume": "auto"})
    assert attempt == "1"
    assert (folder / RUN_ID).read_text().split() == [name, "2"]
    run_here(tmp_path, "b", {"train.steps": 1})
    (other,) = runs(tmp_path / "b")
    assert (other / RUN_ID).read_text().split()[0] != name


def test_without_locks_the_run_that_began_first_ends_at_its_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plain = tmp_path / "shared", Trainer.step

    def no_locks(*_: object) -> None:
        raise OSError("not supported")

    def step(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.steps_done == 1:
            other = RunClaim()
            other.lock(folder, "checkpoint.dir")
            other.begin(continues=True)
        return plain(trainer, *arguments)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(CheckpointError, match="another run saves there now, or another attempt of this one"):
        run_here(tmp_path, "a", {"train.steps": 4, "checkpoint.every": 1, "checkpoint.dir": str(folder)})
    assert [number for number, _ in complete(folder)] == [1]
    assert len(steps_of(runs(tmp_path / "a")[0])) == 2  # it does not train on in vain
    assert "the file system has no locks" in capsys.readouterr().out


def test_a_folder_that_someone_deleted_is_claimed_again(tmp_path: Path) -> None:
    claim = RunClaim()
    claim.lock(tmp_path, "checkpoint.dir")
    claim.begin(continues=False)
    (tmp_path / RUN_ID).unlink()
    assert claim.problem() == ""
    other = RunClaim()
    other.lock(tmp_path, "checkpoint.dir")  # the file is another one than that which is locked
    other.begin(continues=False)
    assert "another run saves there now" in claim.problem()
    assert other.problem() == ""


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
