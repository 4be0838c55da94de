"""Four schedules on one page, opened from disk."""

from __future__ import annotations

from browser import browser
from uses import Use

NAMES = ["1f1b", "interleaved", "zb-h1", "zbv"]


def test_four_schedules_stand_on_one_page_and_in_one_table(use: Use) -> None:
    table = use.run("page.md", "pipeloom compare 1f1b interleaved zb-h1 zbv")
    makespans = [float(row.split()[1]) for row in table.splitlines() if row.split()[:1] and row.split()[0] in NAMES][:4]
    with browser() as running:
        page = running.new_context(offline=True).new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((use.folder / "four.html").as_uri())
        drawn = page.evaluate(
            "() => pipeloom.panes.map((p) => [p.schedule.document.name, p.schedule.figures.makespan])"
        )
        assert page.locator("canvas").count() >= 4
        assert said == []
    assert drawn == [[name, makespan] for name, makespan in zip(NAMES, makespans, strict=True)]
    assert use.pages == ["page.md"]
