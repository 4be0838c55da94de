"""A rank on whose host a checkpoint cannot be written, for a while and at the end of the run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpoint_runs import command, runs
from pipeloom.train.checkpoint import save as saving
from pipeloom.train.checkpoint.folder import complete


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_training_continues_and_a_final_checkpoint_that_fails_ends_the_run(
    asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 can write nothing in steps 2 and 5, no report of that either."""
    reasons = {".step-000002.partial": errno.ENOSPC, ".step-000005.partial": errno.EIO}
    plain, plain_text = saving.write_tensors, Path.write_text

    def require_room(path: Path) -> None:
        if os.environ.get("RANK") == "1" and (number := reasons.get(path.parent.name)):
            raise OSError(number, os.strerror(number))

    def write(path: Path, *arguments: Any) -> Any:
        require_room(path)
        return plain(path, *arguments)

    def write_text(path: Path, *arguments: Any, **keywords: Any) -> int:
        require_room(path)
        return plain_text(path, *arguments, **keywords)

    monkeypatch.setattr(saving, "write_tensors", write)
    monkeypatch.setattr(Path, "write_text", write_text)
    flags = ("--train.steps", "5", "--checkpoint.every", "2", "--checkpoint.asynchronous", asynchronous)
    done = command(tmp_path, "a", *flags)
    assert done.returncode == 5, done.stderr
    (folder,) = runs(tmp_path / "a")
    part = "rank-00001.safetensors: cannot be written"
    unfolded = done.stdout.replace("\n    ", " ").splitlines()
    lines = [line for line in unfolded if "checkpoint" in line and "step-" in line]
    assert lines == [
        f"the checkpoint was not written: {folder}/.step-000002.partial/{part}: No space left on device; training continues, "
        "and the newest checkpoint is none",
        f"checkpoint of step 4: {folder / 'step-000004'}",
    ]
    last = f"the checkpoint was not written: {folder}/.step-000005.partial/{part}: Input/output error"
    assert last in " ".join(done.stderr.split())
    assert complete(folder) == [(4, folder / "step-000004")]
    assert not list(folder.glob(".step-*"))
    end = json.loads((folder / "exit.json").read_text())
    assert (end["exit_code"], end["reason"]) == (5, last)
