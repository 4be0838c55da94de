"""`pipeloom train` in a folder of a test, and what it left there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TEXT = "".join(f"line {n}: the loom weaves thread {n * 7919 % 10007} over thread {n * 31 % 997}\n" for n in range(3000))


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def words(folder: Path, log: str, *flags: str) -> list[str]:
    """The command line of a run on a small text, its folder below `folder/log`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    base = ["tiny", "--data.source", str(text), "--log.dir", str(folder / log), "--train.device", "cpu"]
    return [sys.executable, "-m", "pipeloom", "train", *base, *flags]


def command(
    folder: Path, log: str, *flags: str, timeout: float = 250.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(folder, log, *flags), capture_output=True, text=True, timeout=timeout, env=environment(**variables)
    )


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


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[str], seconds: float = 200.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()[1]
        if time.monotonic() > until:
            run.kill()  # its workers end with it
            raise AssertionError(f"it takes too long: {run.communicate()[1]}")
        time.sleep(0.02)
