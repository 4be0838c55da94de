"""`pipeloom train` in a folder of a test, and what it left there."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from commands import Command, pipeloom
from pipeloom.config import load_layout
from pipeloom.train.loop import run
from pipeloom.train.workers.context import WorkerContext

BRIEF = ("--train.eval_batches", "1", "--sample.tokens", "0")  # what comes before and after the steps
TEXT = "".join(f"line {n}: the loom weaves thread {n * 7919 % 10007} over thread {n * 31 % 997}\n" for n in range(3000))


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def text_in(folder: Path) -> str:
    """The path of a small text."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    return str(text)


def run_here(folder: Path, log: str, settings: dict[str, Any], rank: int = 0) -> None:
    """A run on a small text with this process as a worker: the only one, or one of a process group."""
    base: dict[str, Any] = {"data.source": text_in(folder), "log.dir": str(folder / log), "train.device": "cpu"}
    base |= {"train.eval_batches": 1, "sample.tokens": 0}
    layout = load_layout("tiny", {**base, "parallel.pp": 1, "schedule.name": "1f1b", **settings})
    run(layout, WorkerContext(rank, layout.world_size, rank, torch.device("cpu"), None))  # type: ignore[arg-type]


def words(folder: Path, log: str, *flags: str) -> list[str]:
    """The words of a run on a small text, its folder below `folder/log`."""
    base = ["tiny", "--data.source", text_in(folder), "--log.dir", str(folder / log), "--train.device", "cpu", *BRIEF]
    return ["train", *base, *flags]


def command(folder: Path, log: str, *flags: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    return pipeloom(*words(folder, log, *flags), timeout=timeout)


def runs(log: Path) -> list[Path]:
    """The folders of the runs below `log`, oldest first."""
    return sorted(path for path in log.iterdir()) if log.is_dir() else []


def steps_of(folder: Path) -> list[tuple[int, str]]:
    """(step, loss as it was written) of each step in a run's log."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    events = [json.loads(line, parse_float=str) for line in lines if line.endswith("}")]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[str] | Command, seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()[1]
        if time.monotonic() > until:
            run.kill()  # its workers end with it
            raise AssertionError(f"it takes too long: {run.communicate()[1]}")
        time.sleep(0.02)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A lock of a folder or file as another process would hold it: of an opening of its own. A file is created."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
