"""Running a command inside the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from pipeloom.cli import main


class Ended(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def pipeloom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ended]:
    """Runs `pipeloom` with the words of one line, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return run
