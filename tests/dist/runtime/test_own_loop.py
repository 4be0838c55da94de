"""The loop of docs/own_model.md: one process, two stages and two replicas train alike, and continue each other's checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from documents import blocks, run_python
from paths import ROOT
from processes import run_ranks

pytestmark = pytest.mark.core

(PROGRAM,) = [block.text for block in blocks(ROOT / "docs/own_model.md") if "DistributedSampler" in block.text]


def epochs(world: int, replicas: int, folder: Path) -> list[list[float]]:
    """Loss, norm and loss of the held-out rows of each epoch that a run prints, to four digits."""
    program = PROGRAM.replace("FOLDER = 1,", f"FOLDER = {replicas},").replace("runs/loop", str(folder))
    first, *others = run_ranks(run_python, world, program, dict)
    assert not any(others)
    return [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in first.splitlines()]


def test_the_loop_is_that_of_one_process(tmp_path: Path) -> None:
    whole = epochs(1, 1, tmp_path / "one")
    assert len(whole) == 3
    assert whole[-1][0] < 0.7 * whole[0][0]
    for name, replicas in (("stages", 1), ("replicas", 2)):
        for got, want in zip(epochs(2, replicas, tmp_path / name), whole, strict=True):
            assert got == pytest.approx(want, abs=2e-4)
    for newer in ("step-000016", "step-000024"):
        shutil.rmtree(tmp_path / "replicas" / newer)
    for got, want in zip(epochs(2, 1, tmp_path / "replicas"), whole[1:], strict=True):
        assert got == pytest.approx(want, abs=2e-4)
