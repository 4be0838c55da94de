"""The fuzzer's command line: every part is found and has the function that it needs; another name is refused."""

from __future__ import annotations

import os
import subprocess
import sys

from paths import ROOT


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments], cwd=ROOT, env=environment, text=True, capture_output=True
    )


def test_an_unknown_part_is_refused() -> None:
    refused = fuzz("prices")
    assert refused.returncode == 2
    assert "no part 'prices'; there are " in refused.stderr


def test_a_case_runs_alone() -> None:
    assert fuzz("--case", "{}").returncode == 2
    equal = fuzz("gradients", "--case", '{"layers": ["linear", "conv"], "ranks": 2}')
    assert (equal.returncode, equal.stdout) == (0, "equal\n"), equal.stderr
