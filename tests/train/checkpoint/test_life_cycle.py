"""Runs that begin and end: in one process, without workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_runs import run_here, runs, steps_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("steps", [2, 1])
def test_a_run_whose_steps_are_done_evaluates(steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "a", {"train.steps": 2})
    (first,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out loss: ")]
    run_here(tmp_path, "a", {"train.steps": steps, "checkpoint.resume": "auto"})
    said = capsys.readouterr().out
    assert f"all {steps} steps are done (train.steps): the checkpoint is of step 2" in said
    assert first in said
    assert "timeline.svg" not in said  # no step was measured
    (folder,) = runs(tmp_path / "a")
    assert len(steps_of(folder)) == 2
