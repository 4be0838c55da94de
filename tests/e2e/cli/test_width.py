"""Everything that the command prints for people fits a terminal of 80 columns, also where it is piped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.errors import folded

LINES = (
    "schedule",
    "schedule interleaved --ranks 4 --microbatches 9",
    "schedule zbv --help",
    "compare all --ranks 8 --microbatches 32 --message 4MiB",
    "compare 1f1b interleaved:rounds=tail,chunks=4,cooldown=split --ranks 8 --sweep microbatches=8..24:8",
    "compare --volume tiny --ranks 4",
    "search --ranks 4 --microbatches 8 --memory 6 --iterations 10",
    "plan --model llama3-8b --devices 8 --device h100 --global-batch 32",
    "train tiny --dry-run --device h100",
    "train --help",
    "plan --help",
    "plan --model nonsense --devices 8",
    "schedule interleved --ranks 4 --microbatches 8",
    "search --ranks 4 --microbatches 8 --memory 80GiB",
    "train tiny --model.num_attention_heads 3 --parallel.tp 7",
    "train tiny --parallel.pp 3 --schedule.name dualpipe",
)
SCRIPT = """
import sys
from pipeloom.cli import main
for number, line in enumerate(sys.stdin.read().splitlines()):
    for stream in (sys.stdout, sys.stderr):
        print(f"$ {number}", file=stream, flush=True)
    try:
        main(line.split())
    except SystemExit:
        pass
"""


@pytest.mark.core
def test_no_line_is_wider_than_80_columns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(LINES),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        timeout=600,
    )
    for text in (done.stdout, done.stderr):
        lines = text.splitlines()
        assert sum(line.startswith("$ ") for line in lines) == len(LINES)
        wide = [at for at, line in enumerate(lines) if len(line) > 80]
        numbers = {at: [line for line in lines[:at] if line.startswith("$ ")][-1] for at in wide}
        assert [f"{LINES[int(numbers[at][2:])]}: {lines[at]}" for at in wide] == []
    assert done.stderr.count("\npipeloom: ") == 5
    assert "\n    not 3; nearest: 2 or 4\n" in done.stderr


def test_a_word_is_kept_whole_and_colours_as_they_are() -> None:
    path = f"/{'x' * 90}"
    assert folded(f"  saved to {path} and read") == f"  saved to\n      {path}\n      and read"
    assert folded(f"log:  {path}") == f"log:  {path}"
    assert folded("b " + "a" * 77 + " b") == "b " + "a" * 77 + "\n    b"
    assert folded("b " + "a" * 76 + " b\n\n  c ") == "b " + "a" * 76 + " b\n\n  c "
    coloured = f"\x1b[1m{'word ' * 20}\x1b[0m"
    assert folded(coloured) == coloured
