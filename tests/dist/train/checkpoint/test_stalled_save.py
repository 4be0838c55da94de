"""A rank that does not get on with its part of a checkpoint: the ranks that wait for it say so, and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from dying import run_until_dead
from models import batch, blocks, mse
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.train.checkpoint import save as saving
from pipeloom.train.checkpoint.folder import step_path


def save_with_a_looping_rank(rank: int, folder: Path, timeout: float, asynchronous: bool) -> None:
    mesh = PipelineMesh((0, 1), rank, dist.group.WORLD)
    pipeline = Pipeline(
        blocks(4), pl.schedules.one_f_one_b(2, 4), loss=mse, mesh=mesh, options=RuntimeOptions(timeout=timeout)
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(*batch(8))
    if rank == 1:
        saving.write_tensors = _loop
    saver = saving.Saver(folder, pipeline, optimizer, asynchronous=asynchronous)
    saver.save(1)
    saver.wait()


def _loop(*_: Any) -> Any:
    while True:
        pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_loops_while_it_writes_is_named(asynchronous: bool, tmp_path: Path) -> None:
    """The first rank polled for 15 minutes for the note that the other one leaves, and its watchdog saw no wait."""
    folder = tmp_path / "checkpoints"
    ends = run_until_dead(save_with_a_looping_rank, 2, tmp_path, folder, 6.0, asynchronous)
    assert [end.code for end in ends] == [6, 6]
    assert "rank 1 (process " in ends[0].words
    assert "is busy: " in ends[0].words
    assert "the other ranks to write their parts of a checkpoint" in ends[0].words
    assert not (step_path(folder, 1)).exists()
