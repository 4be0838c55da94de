"""How values show themselves in a notebook, and schedules to and from files."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from browser import browser
from pipeloom.errors import UsageError
from pipeloom.solver.in_bytes import search_in_bytes
from pipeloom.traces import timelines


def _values() -> list[Any]:
    schedule = pl.schedules.interleaved(ranks=2, microbatches=3)
    return [schedule, pl.simulate(schedule), pl.search(2, 3, iterations=0)]


@pytest.mark.parametrize("value", _values(), ids=lambda value: type(value).__name__)
def test_a_value_shows_itself(value: Any) -> None:
    assert value._repr_svg_().startswith("<svg")
    frame = value._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts')
    assert "pipeloom.page/1" in unescape(frame)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_search_shows_its_bound_its_gap_and_its_limit(objective: Any) -> None:
    result = pl.search(4, 8, memory=3, objective=objective, iterations=0)
    data = json.loads(unescape(result._repr_html_() or "").split('id="data">')[1].split("</script>")[0])
    (pane,) = data["panes"]
    of_makespan = pl.draw.figures(result.timeline)["lower_bound"]  # without the limit
    assert pane["lower_bound"] == {"makespan": 28, "span": of_makespan}[objective]
    assert result.lower_bound != of_makespan
    assert data["limit"] == result.limit == 3


def test_a_search_in_bytes_shows_its_limit() -> None:
    result = search_in_bytes(2, 3, pl.Costs(bytes={"saved": 512.0}), 2048.0, iterations=0)
    assert result.beside == {"bound": result.lower_bound, "limit": 2048.0}
    assert pl.search(2, 3, memory=[1, 2], iterations=0).limit is None  # no one line is the limit of both


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


@pytest.mark.parametrize("ending", ["svg", "html", "json"])
def test_a_timeline_is_saved_as_its_ending_says(ending: str, tmp_path: Path) -> None:
    timeline = pl.simulate(pl.schedules.zb_h1(ranks=3, microbatches=5), label="mine")
    path = tmp_path / f"step.{ending}"
    timeline.save(path)
    text = path.read_text("utf-8")
    if ending == "json":
        assert timelines.load(path)[0].ends == timeline.ends
    else:
        assert text == {"svg": pl.draw.svg, "html": pl.draw.html}[ending](timeline)
        assert "mine, 3 ranks" in text
    with pytest.raises(UsageError, match=r"has the extension '\.png'; nearest: step\.svg or step\.html or step\.json"):
        timeline.save(tmp_path / "step.png")


def test_timelines_stand_side_by_side_with_their_labels() -> None:
    schedules = [pl.schedules.one_f_one_b(2, 3), pl.schedules.one_f_one_b(2, 4)]
    shown = pl.draw.SideBySide([pl.simulate(each, label=f"m = {each.microbatches}") for each in schedules])
    with browser() as running:
        page = running.new_page(viewport={"width": 1280, "height": 800})
        page.set_content(f"<!doctype html><body>{shown._repr_html_()}")
        boxes = [image.bounding_box() for image in page.locator("img").all()]
        drawn = page.evaluate("() => [...document.images].map((image) => image.naturalWidth > 0 && image.alt)")
    assert drawn == ["m = 3, 2 ranks, 3 micro-batches", "m = 4, 2 ranks, 4 micro-batches"]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_a_label_names_a_timeline_in_tables_and_drawings() -> None:
    labelled = pl.simulate(pl.schedules.zb_h1(2, 4), label="mine")
    assert [row["schedule"] for row in pl.compare([labelled, pl.schedules.zb_h1(2, 4)])] == ["mine", "zb-h1"]
    assert "mine, 2 ranks" in pl.draw.terminal(labelled)
    assert "<title>mine · zb-h1</title>" in pl.draw.html([labelled, pl.simulate(pl.schedules.zb_h1(2, 4))])
