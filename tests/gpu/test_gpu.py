"""The parts of `make gpu`: on a GPU as they are, elsewhere their logic with tiny sizes; and the command around them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import gpu_setup
import pytest
import torch

import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = [
    *("split", "pairs", "main-gradients", "targets", "races", "engine", "actions", "split-cost", "overlap"),
    *("offload", "fusion"),
]


def rows_of(name: str) -> list[dict[str, object]]:
    if DEVICE == "cpu" and gpu.PARTS[name].needs_gpu:
        pytest.skip("not run on a GPU")
    return gpu.run_part(name, DEVICE)


@pytest.mark.parametrize("name", QUICK)
def test_a_part(name: str) -> None:
    """Every row with a target holds it, and there is one."""
    try:
        rows = rows_of(name)
    finally:
        torch.use_deterministic_algorithms(False)
    assert rows
    assert [row for row in rows if row["passed"] is False] == []


@pytest.mark.parametrize(
    "name", [name for name in gpu.PARTS if name not in QUICK and DEVICE == "cuda"] or ["processes"]
)
def test_a_longer_part(name: str) -> None:
    rows = gpu.start_part(name, DEVICE, 120)
    assert rows
    assert [row for row in rows if row["passed"] is False] == []


def test_every_part_exists() -> None:
    for part in gpu.PARTS.values():
        assert callable(getattr(__import__(part.module), part.function))


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so_lists_the_parts_and_ends_well() -> None:
    ended = subprocess.run([sys.executable, gpu.__file__], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    first, *rest = ended.stdout.splitlines()
    assert first.startswith("no CUDA device here: nothing is run")
    assert [line.split()[0] for line in rest] == list(gpu.PARTS)


def test_a_part_that_fails_hangs_or_lacks_a_package_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    monkeypatch.setattr(gpu, "__file__", str(script))
    for code, seconds, words, passed in (
        ("raise RuntimeError('streams')", 20.0, "ended with 1: RuntimeError: streams", False),
        ("import time; time.sleep(60)", 0.5, "no end within 0 s", False),
        ("import not_there_at_all", 20.0, "not run: No module named 'not_there_at_all'", None),
    ):
        script.write_text(code)
        (row,) = gpu.start_part("split", "cpu", seconds)
        assert (row["measured"], row["passed"]) == (words, passed)
    assert gpu.verdict(row) == "not run"


def test_the_table_names_what_was_not_run(tmp_path: Path) -> None:
    rows = [
        gpu_setup.at_most("error", 0.5, 0.1),
        gpu_setup.at_least("speed", 2, 1),
        gpu_setup.Row("waits", "", "a GPU"),
    ]
    results = {"part": [asdict(row) for row in rows]}
    assert [line.rsplit("| ", 1)[1] for line in gpu.table(results).splitlines()[2:]] == [
        "FAILED |",
        "passed |",
        "not run |",
    ]
    gpu.write_results(results, {"torch": "2.13"}, tmp_path / "RESULTS")
    assert "torch 2.13" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "RESULTS.json").read_text().startswith("{")
