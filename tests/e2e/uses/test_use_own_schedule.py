"""A schedule of one's own: written, drawn, checked, beside published ones, trained with, and shown as it was measured."""

from __future__ import annotations

import re

import pipeloom as pl
from uses import Use


def test_a_schedule_is_written_compared_and_trained_with(use: Use) -> None:
    (use.folder / "my_schedule.py").write_text(use.code("tutorial.md", "# my_schedule.py"))
    use.run("tutorial.md", "pipeloom schedule my_schedule:eager")
    assert "eager.csv: ok" in use.run("tutorial.md", "pipeloom check eager.csv")
    assert pl.load(use.folder / "eager.csv").microbatches == 8

    table = use.run("tutorial.md", "pipeloom compare 1f1b my_schedule:eager")
    rows = re.findall(r"^(1f1b|my_schedule:eager\S*)\s+(\d+) ", table, re.MULTILINE)
    assert rows[:3] == [("1f1b", "49"), ("my_schedule:eager", "47"), ("my_schedule:eager:extra=2", "45")]

    use.run("tutorial.md", "pipeloom train tiny --schedule.name my_schedule:eager", "--sample.tokens 2")
    shown = use.run("tutorial.md", "pipeloom show runs/*-my_schedule-eager --html step.html")
    assert "prediction: costs of" in shown
    assert "pipeloom.page/1" in (use.folder / "step.html").read_text()
    assert use.pages == ["tutorial.md"]
