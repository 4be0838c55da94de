"""A rank that cannot write its part of a checkpoint: all ranks raise the same error, through no file, and can save later."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from models import batch, blocks, mse
from pipeloom import checkpoint
from pipeloom.errors import CheckpointError, UsageError
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.train.checkpoint import save as saving
from pipeloom.train.checkpoint.reader import verified
from processes import run_ranks

SLOW_SECONDS = 2.0


def pipeline_of(rank: int, world: int, **options: Any) -> Pipeline:
    mesh = PipelineMesh(tuple(range(world)), rank, dist.group.WORLD)
    options_of_rank = RuntimeOptions(**options)
    return Pipeline(blocks(4), pl.schedules.one_f_one_b(world, 4), loss=mse, mesh=mesh, options=options_of_rank)


def saves(rank: int, world: int, folder: Path, asynchronous: bool, failures: list[Exception]) -> list[str]:
    """What each save says on this rank: in each but the last, rank 1's file system raises one of `failures` at every write."""
    pipeline = pipeline_of(rank, world)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    saver = checkpoint.Saver(folder, pipeline, optimizer, asynchronous=asynchronous)
    plain = os.write, Path.write_text, saving.write_tensors
    said = []
    for step, failure in enumerate([*failures, None], 1):
        pipeline.step(*batch(8))
        optimizer.step()

        def fail(*_: Any, failure: Exception | None = failure, **__: Any) -> Any:
            assert failure is not None
            raise failure

        def slowly(*arguments: Any) -> Any:
            time.sleep(SLOW_SECONDS)
            return plain[2](*arguments)

        if rank == 1 and failure is not None:
            os.write = Path.write_text = fail  # type: ignore[assignment, method-assign]
        elif rank == 1:
            saving.write_tensors = slowly
        try:
            saver.save(step)
            saver.wait()
            said.append("saved")
        except CheckpointError as error:
            said.append(str(error))
        finally:
            os.write, Path.write_text, saving.write_tensors = plain  # type: ignore[method-assign]
    pipeline.close()
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_raise_what_one_cannot_write(world: int, asynchronous: bool, tmp_path: Path) -> None:
    """The rank reported its failure in a file of the full disk, for which the first rank polled for 15 minutes."""
    failures: list[Exception] = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO)]
    reasons = ["No space left on device", "Input/output error"]
    if asynchronous:  # elsewhere it ends the process, which the other ranks see
        failures.append(MemoryError("no room for a buffer"))
        reasons.append("MemoryError: no room for a buffer")
    results = run_ranks(saves, world, world, tmp_path, asynchronous, failures)
    parts = [tmp_path / f".step-{step:06d}.partial/rank-00001.safetensors" for step in range(1, len(reasons) + 1)]
    words = [
        f"the checkpoint was not written: {part}: cannot be written: {reason}"
        for part, reason in zip(parts, reasons, strict=True)
    ]
    assert results == [[*words, "saved"]] * world  # the last one by a slow rank
    (path,) = tmp_path.iterdir()
    assert path.name == f"step-{len(failures) + 1:06d}"
    assert verified(path, None)[1] == ""
    assert len(list(path.glob("rank-*"))) == world


def refused_without_watchdogs(rank: int, folder: Path) -> str:
    pipeline = pipeline_of(rank, 2, monitor=False)
    with pytest.raises(UsageError) as error:
        checkpoint.Saver(folder, pipeline, asynchronous=True)
    checkpoint.save(folder, 1, pipeline)
    pipeline.close()
    return str(error.value)


def test_threads_need_the_watchdogs_to_report(tmp_path: Path) -> None:
    words = "asynchronous is True; without RuntimeOptions(monitor=True) it must be False"
    assert run_ranks(refused_without_watchdogs, 2, tmp_path) == [words, words]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
