"""The example of a policy gradient over answers of different lengths, in one process and in two."""

from __future__ import annotations

import contextlib
import io
import re
import runpy

import pytest

from documents import run_python
from paths import ROOT
from processes import run_ranks

EXAMPLE = ROOT / "examples/rl_loop.py"


@pytest.mark.core
def test_the_policy_learns_the_same_in_one_process_and_in_two() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    one = output.getvalue().splitlines()
    two = run_ranks(run_python, 2, EXAMPLE.read_text("utf-8"), lambda: {"__name__": "__main__"})[0].splitlines()
    assert one == two
    counts = [int(count) for line in one for count in re.findall(r"(\d+) micro-batches", line)]
    assert len(counts) == 12
    assert len(set(counts)) > 3
    assert float(one[-1].split()[-1]) > 0.58  # of 0.5 at the start: the reward is the share of even words
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 120
