"""`register_kind`: a kind of a user's own, from `check` to spawned workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT, SUPPORT


def test_a_registered_kind_works_everywhere() -> None:
    path = [*map(str, (SUPPORT, SUPPORT.parent)), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "register_kind_cases.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "a registered kind works everywhere" in done.stdout


def test_the_example_of_a_kind_on_a_queue_of_its_own(tmp_path: Path) -> None:
    """60 lines: checked, simulated, drawn, and run in one process and in two, whose chained hashes are the same."""
    example = ROOT / "examples/hashed_gradients.py"
    assert len(example.read_text().splitlines()) <= 60
    alone, two = [
        subprocess.run(
            [sys.executable, *words, str(example)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout
        for words in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    ]
    assert alone == two
    hashes = re.findall(r"step \d: ([0-9a-f]{64})", alone)
    assert len({*hashes}) == 2
    assert "hashing  ····" in alone
