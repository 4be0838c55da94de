"""From a trace to a better schedule: the change is named, written as CSV, and can run."""

from __future__ import annotations

import re

import pipeloom as pl
from uses import Use


def test_a_trace_becomes_a_better_schedule(use: Use) -> None:
    use.run("planning.md", "pipeloom schedule 1f1b --ranks 4 --microbatches 8 --trace trace.json")
    said = use.run("planning.md", "pipeloom improve trace.json --split")
    saved = re.search(r"^change: (.+), which saves ([\d.]+) % of the step$", said, re.MULTILINE)
    assert saved is not None
    assert "better.csv: ok" in use.run("planning.md", "pipeloom check better.csv")
    before, after = pl.simulate(pl.schedules.one_f_one_b(4, 8)), pl.simulate(pl.load(use.folder / "better.csv"))
    assert f"{100 * (1 - after.makespan / before.makespan):.1f}" == saved[2]
    assert use.pages == ["planning.md"]
