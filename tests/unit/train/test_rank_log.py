"""The copy of a worker's output in the run's folder: whole lines, whatever terminal shows them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipeloom.train.workers.failures import RankLog


def test_lines_go_to_the_terminal_at_once_and_to_the_file_when_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout
    with RankLog(3) as log:
        print("early")
        print("half", end="")
        assert capsys.readouterr().out == "early\nhalf"
        log.open(tmp_path / "run")
        file = tmp_path / "run" / "rank_3.log"
        head, *lines = file.read_text().splitlines()
        assert head.startswith(f"--- rank 3, process {os.getpid()} on ")
        assert lines == ["early"]
        print(" and half")
        print("\x1b[31mred\x1b[0m", file=sys.stderr)
        sys.stdout.write("\r\x1b[2Ktraining 1/4\r\x1b[2Ktraining 2/4\r\x1b[2Kstep 2\n")
        assert file.read_text().splitlines()[2:] == ["half and half", "red", "step 2"]
        assert sys.stdout.isatty() is before.isatty()
        print("no end", end="")
    assert sys.stdout is before
    assert file.read_text().splitlines()[-1] == "no end"
    assert file.stat().st_mode & 0o777 == 0o600
    with RankLog(3) as log:  # a run that goes on adds to the file
        log.open(tmp_path / "run")
    assert sum(line.startswith("--- ") for line in file.read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_does_not_disturb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with RankLog(0) as log:
        log.open(tmp_path / "file" / "run")
        print("shown")
    assert capsys.readouterr().out == "shown\n"
