"""The README's Python examples run as they are printed, its table is true, and no file holds half of a merge."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError
from pipeloom.schedule.families import FAMILIES, build

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_schedule_needs_no_torch(tmp_path: Path) -> None:
    code = f"{EXAMPLES[0]}\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "63.0 0.16666666666666666 (12, 10, 8, 6)\n"


@pytest.mark.dist
def test_the_training_loop_learns(tmp_path: Path) -> None:
    (tmp_path / "train_mlp.py").write_text(EXAMPLES[1], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_mlp.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_micro_batches(name: str) -> None:
    for p in (2, 3, 4, 6):
        for m in (1, 2, 5, 2 * p - 1, 2 * p, 2 * p + 1, 2 * p + 2):
            allowed = {
                "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
                "dualpipev": m >= 2 * p,
                "chimera": p % 2 == 0,
            }.get(name, True)
            try:
                pl.check(build(name, ranks=p, microbatches=m))
            except PipeloomError:
                assert not allowed, (name, p, m)
            else:
                assert allowed, (name, p, m)


def test_no_file_has_the_marks_of_a_merge() -> None:
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples", "configs")]
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    marks = re.compile(rb"^(<{7} |>{7} )", re.MULTILINE)
    marked = [path.name for path in files if path.is_file() and marks.search(path.read_bytes())]
    assert marked == []
