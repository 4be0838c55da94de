"""`pipeloom check`: 0 with one line, 3 with the reason, 2 for what is no readable file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from paths import DATA
from pipeloom.schedule.json_form import to_json

pytestmark = pytest.mark.core

Run = Callable[[str], Any]
GOLDEN = DATA / "torch"


def test_a_good_file_is_one_sentence(pipeloom: Run) -> None:
    path = GOLDEN / "interleaved.csv"
    ended = pipeloom(f"check {path}")
    words = "ranks 4, stages 8, micro-batches 8, actions 128; stage-micro-batches alive per rank, whatever the times: at most"
    assert (ended.code, " ".join(ended.out.split()), ended.err) == (0, f"{path}: ok; {words} 11 9 7 5", "")
    found = json.loads(pipeloom(f"check {path} --json").out)
    sizes = {"ranks": 4, "stages": 8, "microbatches": 8, "actions": 128}
    assert found == {"ok": True, "name": "interleaved", **sizes, "worst_peaks": [11, 9, 7, 5]}


def test_the_receive_depth_reaches_the_proof(pipeloom: Run, tmp_path: Path) -> None:
    """Rank 1 uses micro-batch 1 before 0, so that two receives must be open at once."""
    path = tmp_path / "swapped.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n")
    assert pipeloom(f"check {path}").code == 0
    ended = pipeloom(f"check {path} --receive-depth 1")
    assert ended.code == 3
    assert "receive depth 1 deadlocks" in ended.err
    assert pipeloom(f"check {path} --receive-depth 2").code == 0


def test_a_transport_makes_no_difference_and_the_option_says_that_it_goes(pipeloom: Run) -> None:
    path = GOLDEN / "interleaved.csv"
    plain, ended = pipeloom(f"check {path}"), pipeloom(f"check {path} --transport batched")
    assert (ended.code, ended.out) == (0, plain.out)
    assert ended.err == "--transport has no effect and goes in 0.4; a file that passes runs with every transport\n"


def test_paper_rounds_are_refused_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    path.write_text(to_json(pl.schedules.interleaved(ranks=4, microbatches=5, chunks=3, rounds="paper")))
    ended = subprocess.run(
        [sys.executable, "-m", "pipeloom", "check", path], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 3
    assert "deadlocks" in ended.stderr
