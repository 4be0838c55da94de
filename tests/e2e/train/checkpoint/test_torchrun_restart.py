"""A run under torchrun has the bits of the command's; a worker that is killed after a checkpoint costs it its last steps only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from checkpoint_runs import command, environment, runs, steps_of, wait_for, words
from checkpoint_states import contents
from pipeloom.train.checkpoint.folder import complete

STEPS = 20
FLAGS = ("--train.steps", str(STEPS), "--checkpoint.every", "2", "--checkpoint.resume", "auto")


def children(parent: int) -> list[int]:
    """The processes whose parent is `parent`, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


def test_torchrun_goes_on_from_the_newest_checkpoint_after_a_worker_was_killed(tmp_path: Path) -> None:
    undisturbed = command(tmp_path, "b", *FLAGS)
    assert undisturbed.returncode == 0, undisturbed.stderr
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    line = [sys.executable, *launcher, "-m", "pipeloom", *words(tmp_path, "a", *FLAGS)]
    run = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for(lambda: any(complete(folder) for folder in runs(tmp_path / "a")), run)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    try:
        out, errors = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    (folder,), (reference,) = runs(tmp_path / "a"), runs(tmp_path / "b")
    assert "resumed after step" in out
    assert [step for step, _ in steps_of(folder)] == list(range(1, STEPS + 1))
    assert steps_of(folder) == steps_of(reference)
    assert "held-out loss before training: " in (folder / "rank_0.log").read_text()
    assert (folder / "rank_1.log").read_text().startswith("--- rank 1, process ")
    wanted, found = (contents(complete(each)[0][1]) for each in (reference, folder))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
