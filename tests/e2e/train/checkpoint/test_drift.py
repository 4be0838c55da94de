"""Replicas that drift apart: nothing is saved after that, and the run continues from before it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch

from checkpoint_runs import run_here, runs, text_in
from checkpoint_states import contents
from pipeloom.errors import DistributedError
from pipeloom.train.checkpoint.folder import complete
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.workers.failures import write_exit
from processes import run_ranks

SIX_STEPS = {"train.steps": 6, "parallel.dp": 2, "schedule.microbatches": 4, "train.eval_batches": 1}


def drifting(rank: int, folder: Path, log: str, settings: dict[str, Any], noisy_step: int) -> tuple[str, str]:
    """What rank 0 prints, and the error of this rank, when noise is added to rank 1's weights after a step (0: never)."""
    plain, steps = Optimizer.step, 0

    def noisy(self: Optimizer, *arguments: Any) -> Any:
        nonlocal steps
        plain(self, *arguments)
        steps += 1
        if steps == noisy_step and rank == 1:
            for parameter in self._trained:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)

    Optimizer.step = noisy  # type: ignore[method-assign]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            run_here(folder, log, {**SIX_STEPS, **settings}, rank)
        except DistributedError as error:
            if rank == 0:
                write_exit(str(runs(folder / log)[0]), 6, str(error), (1,))  # as the worker's main function does
            return printed.getvalue(), str(error)
    return printed.getvalue(), ""


def test_the_final_state_of_replicas_that_differ_is_not_saved(tmp_path: Path) -> None:
    text_in(tmp_path)
    for _, error in run_ranks(drifting, 2, tmp_path, "a", {}, 3):
        assert error.startswith("after step 6 ")
        assert "more tensors) is not the same on rank 1 (dp 1) as on rank 0 (dp 0)" in error
    (folder,) = runs(tmp_path / "a")
    assert [path.name for path in folder.iterdir() if "step" in path.name] == []


def test_a_run_continues_from_before_the_difference(tmp_path: Path) -> None:
    """The checkpoint of step 4 is due after the noise of step 3, and before the check after step 5."""
    text_in(tmp_path)
    settings = {"checkpoint.every": 2, "train.check_every": 5}
    for _, error in run_ranks(drifting, 2, tmp_path, "a", settings, 3):
        assert re.match(r"after step 4 (model|head)\.[\w.]+ \(and \d+ more tensors\) is not the same on rank 1", error)
    (folder,) = runs(tmp_path / "a")
    assert [step for step, _ in complete(folder)] == [2]
    again = run_ranks(drifting, 2, tmp_path, "a", {**settings, "checkpoint.resume": "auto"}, 0)[0][0]
    again = " ".join(again.split())
    assert re.search(r"continues the run that failed: after step 4 (model|head)\.", again)
    assert "start again from the newest checkpoint, which is from before the difference" in again
    assert f"resumed after step 2 from {folder / 'step-000002'}" in again
    run_ranks(drifting, 2, tmp_path, "b", settings, 0)
    (other,) = runs(tmp_path / "b")
    wanted, resumed = contents(other / "step-000006"), contents(folder / "step-000006")
    assert [key for key, value in wanted.items() if not torch.equal(value, resumed[key])] == []
    assert [read_manifest(path).equal_until for _, path in complete(folder)] == [6, 4, 2]


def test_a_manifest_does_not_claim_what_was_not_compared(tmp_path: Path) -> None:
    run_here(tmp_path, "a", {"train.steps": 1, "train.check_every": 0})
    (folder,) = runs(tmp_path / "a")
    assert read_manifest(folder / "step-000001").equal_until is None
