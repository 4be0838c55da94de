"""How values show themselves in a notebook, and schedules to and from files."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from browser import browser


def _values() -> list[Any]:
    schedule = pl.schedules.interleaved(ranks=2, microbatches=3)
    return [schedule, pl.simulate(schedule), pl.search(2, 3, iterations=0)]


@pytest.mark.parametrize("value", _values(), ids=lambda value: type(value).__name__)
def test_a_value_shows_itself(value: Any) -> None:
    assert value._repr_svg_().startswith("<svg")
    frame = value._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts')
    assert "pipeloom.page/1" in unescape(frame)


def test_a_schedule_that_cannot_run_shows_the_reason() -> None:
    stuck = pl.Schedule.of([["0B0", "0F0"]], placement=[0], microbatches=1, name="<stuck>")
    assert stuck._repr_svg_() is None
    assert "deadlocks" in stuck._repr_html_()
    assert "&lt;stuck" in stuck._repr_html_()


def test_a_large_one_shows_its_words_alone() -> None:
    large = pl.simulate(pl.schedules.gpipe(ranks=4, microbatches=15_000))
    assert large._repr_svg_() is None
    assert large._repr_html_() is None


def test_the_frame_works_in_a_document_of_others() -> None:
    with browser() as running:
        page = running.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_content(f"<!doctype html><body>{_values()[1]._repr_html_()}")
        frame = page.frames[1]
        frame.wait_for_selector("canvas")
        assert frame.evaluate("() => pipeloom.panes[0].schedule.figures.makespan") == _values()[1].makespan
        assert said == []


@pytest.mark.parametrize("ending", ["csv", "json", "JSON"])
def test_what_is_saved_is_loaded(ending: str, tmp_path: Path) -> None:
    schedule = pl.schedules.zb_h1(ranks=3, microbatches=5)
    path = tmp_path / f"mine.{ending}"
    schedule.save(path)
    loaded = pl.load(path)
    assert loaded.codes == schedule.codes
    assert loaded.placement == schedule.placement
    if ending != "csv":
        assert loaded == schedule


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    schedule = pl.schedules.dualpipe(ranks=2, microbatches=4)
    with pytest.raises(pl.PipeloomError, match=r"has the extension '.txt'; nearest: mine.json or mine.csv"):
        schedule.save(tmp_path / "mine.txt")
    with pytest.raises(pl.ScheduleError, match="2 routes"):
        schedule.save(tmp_path / "mine.csv")
    with pytest.raises(pl.PipeloomError, match=r"cannot write .*No such file"):
        schedule.save(tmp_path / "none" / "mine.json")
