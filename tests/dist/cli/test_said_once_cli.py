"""What is said of a failure, is said once: one traceback, and a refusal that all workers share."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_runs import BRIEF, text_in
from commands import pipeloom
from pipeloom.train.workers import launch
from pipeloom.train.workers.failures import WorkerFailure

TINY = ("train", "tiny", *BRIEF, "--train.steps", "3", "--parallel.pp", "2", "--schedule.name", "1f1b")


def run(folder: Path, *arguments: str, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    words = [*TINY, "--data.source", text_in(folder), "--log.dir", str(folder), *arguments]
    if not torchrun:
        return pipeloom(*words, folder=folder)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pipeloom"]
    command = [sys.executable, "-m", *launcher, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)


def test_one_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "--debug.fault", "raise:1:1B1")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr
    other = "[rank 0] stopped, because rank 1 failed: step 0, in B of stage 1 micro-batch 1"
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith(other))
    assert "InjectedFault: --debug.fault raised at" in line


def test_one_refusal_of_torchruns_workers(tmp_path: Path) -> None:
    ended = run(tmp_path, "--train.stepz", "3", torchrun=True)
    assert ended.stderr.count("train.stepz = 3: there is no such key; did you mean 'steps'?") == 1, ended.stderr


def worker(rank: int, text: str) -> Any:
    return SimpleNamespace(rank=rank, lines=text.splitlines())


@pytest.mark.core
def test_the_launcher_repeats_no_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 has written its own; what the others wrote besides is shown."""
    failures = {rank: WorkerFailure(rank, time.time(), 2, "refused\nfor two reasons") for rank in range(3)}
    failures[3] = WorkerFailure(3, time.time(), 2, "another reason")
    texts = ["", "a warning\nrefused\nfor two reasons", "refused\nfor two reasons", "another reason"]
    launch.show_output([worker(rank, text) for rank, text in enumerate(texts)], 0, failures)
    assert capsys.readouterr().err == "[rank 1] a warning\n[rank 3] another reason\n"
