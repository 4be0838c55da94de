"""Two runs in one folder: the second one is refused, and harms nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import pipeloom as pl
from checkpoint_runs import held
from pipeloom import checkpoint
from pipeloom.config import load
from pipeloom.errors import CheckpointError
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint import folder as lock
from pipeloom.train.report.report import Report
from pipeloom.train.workers.failures import EXIT_FILE


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.0)


def test_a_folder_in_which_another_run_saves_is_refused_and_left_alone(tmp_path: Path) -> None:
    pipeline = Pipeline([nn.Linear(2, 2)], pl.schedules.gpipe(1, 1), loss=nn.functional.mse_loss)
    saver = checkpoint.Saver(tmp_path, pipeline)
    saver.save(1)
    theirs = tmp_path / ".step-000007.partial"
    theirs.mkdir()
    with held(tmp_path):
        for step in (2, 7):
            with pytest.raises(CheckpointError, match="another run is saving there; give each run its own folder"):
                saver.save(step)
    assert theirs.is_dir()
    saver.save(2)
    assert not theirs.exists(), "what an interrupted save has left goes with the next one"
    checkpoint.save(tmp_path, 3, pipeline)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000003"]


def test_a_run_that_continues_removes_the_record_of_its_last_end(tmp_path: Path) -> None:
    config = load("tiny", {"log.dir": str(tmp_path)})
    with Report(config) as first:
        root = first.folder.root
    (root / EXIT_FILE).write_text("{}")
    with Report(config, root):
        assert not (root / EXIT_FILE).exists()
