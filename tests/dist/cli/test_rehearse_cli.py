"""`pipeloom rehearse`: real processes whose computation is emulated, and refusals before any of them starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl

pytestmark = pytest.mark.core

SIZES = "--ranks 2 --microbatches 4"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("1f1c " + SIZES, 2, "did you mean '1f1b'"),
        ("1f1b --ranks 2", 2, "needs --microbatches"),
        (f"1f1b {SIZES} --unit 0", 2, "--unit is 0; give seconds above 0"),
        (f"1f1b {SIZES} --unit 1e6", 2, "nearest: --unit"),
        (f"1f1b {SIZES} --message 4XB", 2, "--message is '4XB'; give bytes, such as 65536, 64KiB or 4MiB"),
        (f"1f1b {SIZES} --message 0", 2, "it must be from 1 byte to 16GiB"),
        (f"1f1b {SIZES} --slow 2=1.1", 2, "--slow 2=1.1: the stages are 0 to 1"),
        (f"1f1b {SIZES} --slow 1", 2, "give STAGE=FACTOR, such as 2=1.1"),
        (f"1f1b {SIZES} --slow 1=0", 2, "the factor must be above 0"),
        (
            f"1f1b {SIZES} --forward 0 --input-grad 0 --weight-grad 0",
            2,
            "all costs are 0, so there is nothing to rehearse",
        ),
        (f"1f1b {SIZES} --forward=-1", 2, "--forward is -1"),
        (f"1f1b {SIZES} --all-to-all 0.5 --device cuda", 2, "--device cuda does not emulate --all-to-all"),
        ("1f1b --ranks 1500 --microbatches 4", 4, "1,500 workers (--ranks)"),
        (f"1f1b {SIZES} --message 16GiB --unit 1e-9", 4, "the micro-batches in flight take"),
        ("dualpipe --ranks 1 --microbatches 2", 2, "rank"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_a_process_starts(
    pipeloom: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, line: str, code: int, words: str
) -> None:
    monkeypatch.setattr("pipeloom.cli.workers.start_workers", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr("pipeloom.train.workers.preflight.memory_of_machine", lambda: 64 * 2**30)
    ended = pipeloom(f"rehearse {line}")
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err


def test_a_slow_stage_is_measured_named_and_drawn(tmp_path: Path) -> None:
    """Three processes, the second of them three times as slow as its costs say."""
    page = tmp_path / "page.html"
    words = f"rehearse 1f1b --ranks 3 --microbatches 4 --unit 0.02 --steps 3 --slow 1=3 --json --html {page}"
    done = subprocess.run(
        [sys.executable, "-m", "pipeloom", *words.split()], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 3
    about = found["rehearsal"]
    assert about["unit"] == 0.02
    assert about["message"] == 65536
    assert about["simulated"] == pytest.approx(18 * 0.02)
    times = (1, 3, 1)
    slowed = pl.simulate(pl.schedules.one_f_one_b(3, 4), pl.Costs(times, times, times)).makespan
    assert about["rehearsed"] >= 0.98 * slowed * 0.02
    assert about["error"] == pytest.approx(about["rehearsed"] / about["simulated"] - 1)
    assert [slow["stage"] for slow in found["slow_stages"]] == [1]
    panes = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])["panes"]
    assert [pane["source"] for pane in panes] == ["measured", "simulated"]
    assert f"wrote {page}" in done.stderr
