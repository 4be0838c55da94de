"""Runs that begin and end: in one process, without workers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from checkpoint_runs import run_here, runs, steps_of
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.folder import newest_checkpoint


@pytest.mark.parametrize("steps", [2, 1])
def test_a_run_whose_steps_are_done_evaluates(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And draws no weights before it loads its own."""
    run_here(tmp_path, "a", {"train.steps": 2, "checkpoint.resume": "auto"})
    said, (folder,) = capsys.readouterr().out, runs(tmp_path / "a")
    auto, log = 'checkpoint.resume = "auto":', f"log: {folder / 'log.jsonl'}"
    begins = f"{auto} no checkpoint of this model and data in {tmp_path / 'a'}, so a new run begins; {log}"
    assert begins in " ".join(said.split())
    (first,) = [line for line in said.splitlines() if line.startswith("held-out loss: ")]
    monkeypatch.setattr(import_module("pipeloom.models.layers"), "draw", None)
    run_here(tmp_path, "a", {"train.steps": steps, "checkpoint.resume": "auto"})
    said = capsys.readouterr().out
    assert f"all {steps} steps are done (train.steps): the checkpoint is of step 2" in " ".join(said.split())
    assert f"{auto} continuing {folder} from step-000002; {log}" in " ".join(said.split())
    assert first in said
    assert "timeline.svg" not in said  # no step was measured
    assert runs(tmp_path / "a") == [folder]
    assert len(steps_of(folder)) == 2


def test_a_run_names_the_folder_of_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export`, `generate` and `checkpoint.resume` take a run's folder, wherever the run saved."""
    elsewhere = tmp_path / "elsewhere"
    sample = {"sample.prompt": "the loom", "sample.tokens": 5}
    run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.dir": str(elsewhere), **sample})
    assert "\nsample:\n  | the loom" in capsys.readouterr().out
    (folder,) = runs(tmp_path / "a")
    assert newest_checkpoint(folder) == elsewhere / "step-000001"
    assert newest_checkpoint(tmp_path / "a") == elsewhere / "step-000001"  # of the newest run
    run_here(tmp_path, "b", {"train.steps": 1, "checkpoint.resume": str(folder), "sample.tokens": 0})
    said = capsys.readouterr().out
    assert f"resumed after step 1 from {elsewhere / 'step-000001'}" in " ".join(said.split())
    assert "sample:" not in said
    (elsewhere / "step-000001").rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=f"holds no complete checkpoint, nor does {elsewhere}, the checkpoint.dir"
    ):
        newest_checkpoint(folder)


def test_what_an_interrupted_save_left_goes_when_the_run_is_claimed(tmp_path: Path) -> None:
    """Also where its last save was the one that was interrupted, and no other follows."""
    run_here(tmp_path, "a", {"train.steps": 1})
    (folder,) = runs(tmp_path / "a")
    (folder / ".step-000002.partial").mkdir()
    run_here(tmp_path, "a", {"train.steps": 1, "checkpoint.resume": "auto"})
    assert not list(folder.glob(".*"))
