"""The page in a browser: offline and silent, what the pointer and the keys do, edits, files, hostile names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from browser import Opened, browser
from paths import ROOT
from pipeloom.draw import figures, html, svg
from pipeloom.draw.boxes import boxes
from pipeloom.draw.figures import full_rank, number
from pipeloom.draw.segments import segment_lanes
from pipeloom.schedule.files import load
from pipeloom.schedule.json_form import from_json
from pipeloom.schedule.segments import LayerSegments
from pipeloom.schedule.timeline import Exposed
from pipeloom.schedule.transforms import transformed


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as one:
        yield one


def _interleaved(p2p: float = 0.3) -> pl.Timeline:
    return pl.simulate(pl.schedules.interleaved(ranks=4, microbatches=8), pl.Costs(forward=1.1, p2p=p2p))


@pytest.fixture
def opened(running: Any, tmp_path: Path) -> Iterator[Opened]:
    page = Opened(running, tmp_path, [_interleaved(), pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8))])
    yield page
    assert page.said == []
    assert page.requests == [page.file.as_uri()]
    page.close()


@pytest.mark.core
def test_the_card_says_what_a_box_is_and_what_it_waited_for(opened: Opened) -> None:
    timeline = _interleaved()
    rank, at = 1, 0
    opened.page.mouse.move(*opened.place(rank, at))
    text = opened.page.inner_text("#card")
    assert text.startswith("F of stage 1, micro-batch 0")
    assert f"waited {timeline.starts[1][0]:g} for rank 0's F of stage 0 (dependency 1.1, message 0.3)" in text
    x, y = opened.place(1, 0)
    left = opened.run("() => pipeloom.panes[0].stage.getBoundingClientRect().left + 62")
    opened.page.mouse.move((left + x) / 2 - 10, y)
    assert opened.page.inner_text("#card").startswith("rank 1 is idle")
    opened.page.mouse.move(5, 5)
    assert opened.page.is_hidden("#card")


def test_the_facts_say_how_many_messages_of_what_size(running: Any, tmp_path: Path) -> None:
    timelines = [pl.simulate(pl.schedules.one_f_one_b(2, 4), pl.Costs(message=size)) for size in (0, 2**20)]
    page = Opened(running, tmp_path, timelines, viewport={"width": 420, "height": 800})
    assert page.run("() => document.documentElement.scrollWidth") == 420  # wide tables scroll by themselves
    plain, sized = page.page.locator(".facts").all_text_contents()
    assert "8 messages between ranks ·" in plain
    assert "8 messages between ranks, 8 MiB ·" in sized
    page.close()


def test_the_table_has_the_communications_that_a_step_stood_still_for(running: Any, tmp_path: Path) -> None:
    """Of the step that was measured; an edited one is simulated and has none."""
    schedule = pl.schedules.one_f_one_b(ranks=2, microbatches=2)
    exposed = (Exposed({"tp": 0.25}), Exposed({"tp": 0.5, "all-to-all": 0.125}))
    measured = replace(pl.simulate(schedule), source="measured", exposed=exposed)
    page = Opened(running, tmp_path, measured)
    rows = page.run("() => pipeloom.tableOf(pipeloom.panes[0].schedule, {factor: 1, name: ''}).rows")
    assert rows[0][3:7] == ["busy", "busy: all-to-all", "busy: tp", "idle"]
    assert [row[4:6] for row in rows[1:]] == [["0", "0.25"], ["0.125", "0.5"]]
    page.run("() => pipeloom.move(pipeloom.panes[0], 0, 1, 2)")
    heads = page.run("() => pipeloom.tableOf(pipeloom.panes[0].schedule, {factor: 1, name: ''}).rows[0]")
    assert heads[3:5] == ["busy", "idle"]
    page.close()


def test_four_tiles_and_a_comparison_that_sorts_and_leads_to_the_panes(opened: Opened) -> None:
    """Beside the gap of each timeline; a schedule that is edited has its new figures there."""
    timelines = [_interleaved(), pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8))]
    tiles = opened.page.locator(".tiles").all_inner_texts()
    for text, timeline in zip(tiles, timelines, strict=True):
        found = figures(timeline)
        bound = f"{100 * found['gap']:.1f} %\nabove the lower bound {number(found['lower_bound'])}"
        full = full_rank(timeline.schedule)  # the unit of both, whose stages are of two sizes
        rate = f"{found['bubble_rate']:.4f}\nbubble rate, idle / (p · makespan)"
        words = [number(found["makespan"]), rate, number(full * max(found["peak_memory"])), bound]
        assert [words[at] in text for at in range(4)] == [True] * 4
    names = (
        "() => [...document.querySelectorAll('#compare tbody tr')].map((row) => row.cells[0].textContent.split(',')[0])"
    )
    assert opened.run(names) == ["interleaved", "zb-h1"]
    opened.page.click("#compare button >> text=makespan")
    assert opened.run(names) == ["zb-h1", "interleaved"]
    opened.page.click("#compare button >> text=makespan")
    assert opened.run(names) == ["interleaved", "zb-h1"]
    opened.page.click("#compare tbody tr >> nth=1")
    assert opened.run("() => document.activeElement === pipeloom.panes[1].stage")
    before = opened.page.inner_text("#compare tbody")
    opened.run("() => pipeloom.move(pipeloom.panes[0], 3, 20, 18)")
    assert opened.page.inner_text("#compare tbody") != before


def test_a_search_shows_its_bound_and_its_limit(running: Any, tmp_path: Path) -> None:
    timeline = pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8))
    page = Opened(running, tmp_path, timeline, bound=24.0, limit=3.0)
    assert "4 of 3" in page.page.inner_text(".tiles .bad")
    assert "above the lower bound 24" in page.page.inner_text(".tiles")
    assert "dashed: the limit 3" in page.page.inner_text("#legend")
    page.run("() => { pipeloom.state.memory = false; }")
    page.close()


def test_memory_of_all_panes_has_one_scale(running: Any, tmp_path: Path) -> None:
    timelines = [pl.simulate(pl.schedules.one_f_one_b(2, 8)), pl.simulate(pl.schedules.gpipe(2, 8))]
    page = Opened(running, tmp_path, timelines)
    assert page.run("() => pipeloom.panes.map((pane) => pane.options({}).most)") == [8, 8]
    assert "memory, 0 to 8 micro-batches of 1/p of the model in all rows" in page.page.inner_text("#legend")
    page.close()
    in_bytes = pl.simulate(pl.schedules.one_f_one_b(2, 8), pl.Costs(bytes={"saved": 512.0}))  # as a run's prediction
    page = Opened(running, tmp_path, [*timelines, in_bytes])
    assert page.run("() => pipeloom.panes.map((pane) => pane.options({}).most)") == [8, 8, 1024]
    assert "0 to 8 micro-batches of 1/p of the model or 1 KiB in device in all rows" in page.page.inner_text("#legend")
    page.close()


def test_rows_grow_to_the_window_and_no_number_vanishes_for_its_length(running: Any, tmp_path: Path) -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=40))
    rows = []
    for viewport in ({"width": 1280, "height": 800}, {"width": 1280, "height": 1440}):
        page = Opened(running, tmp_path, timeline, viewport=viewport)
        rows.append(page.run("() => pipeloom.panes[0].layout.row"))
        assert page.run("() => document.documentElement.scrollHeight") <= viewport["height"]
        texts = re.findall(r">(\d+)</text>", page.run("() => pipeloom.exportSvg()"))
        page.close()
    assert rows[1] > rows[0] > 44
    # of each rank's forwards 3, 13, 23 and 30 to 39, digits under one another; its wider backward 3; a peak of memory
    assert texts.count("3") == 4 * (3 + 11 + 1) + 1


@pytest.mark.parametrize(("ranks", "width", "height"), [(4, 2560, 1440), (16, 2560, 1440), (4, 1280, 800)])
def test_rows_fill_the_window(running: Any, tmp_path: Path, ranks: int, width: int, height: int) -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks, 2 * ranks))
    page = Opened(running, tmp_path, timeline, viewport={"width": width, "height": height})
    assert page.run("() => document.documentElement.scrollHeight") == height
    bottom = page.run("() => pipeloom.panes[0].stage.getBoundingClientRect().bottom")
    assert 0.88 * height < bottom < height
    page.close()


def test_what_is_below_the_timelines_has_room_in_a_high_window(running: Any, tmp_path: Path) -> None:
    below = segment_lanes((LayerSegments(dispatch=1.5, combine=1.5),), 900)
    rows = {}
    for height in (700, 1440):
        page = Opened(running, tmp_path, _interleaved(), below=below, viewport={"width": 1280, "height": height})
        rows[height] = page.run("() => pipeloom.panes[0].layout.row")
        fits = page.run("() => document.querySelector('figure').getBoundingClientRect().bottom") <= height
        assert fits == (height == 1440)
        page.close()
    assert rows[700] > 50  # it is scrolled to: rows do not become low for it


def test_sixteen_ranks_have_numbers_and_memory_to_read(running: Any, tmp_path: Path) -> None:
    page = Opened(running, tmp_path, pl.simulate(pl.schedules.one_f_one_b(16, 32)))
    text = page.run("() => pipeloom.exportSvg()")
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"[^>]*text-anchor="middle"[^>]*>\d+</text>', text)]
    assert len(sizes) > 2 * 16 * 32  # every box has its number
    assert min(sizes) >= 9
    assert page.run("() => pipeloom.panes[0].layout.band") >= 10
    page.close()
    overlapped = pl.simulate(pl.schedules.dualpipev(16, 32), pl.Costs(all_to_all=0.3))
    page = Opened(running, tmp_path, overlapped, viewport={"width": 2560, "height": 500})
    text = page.run("() => pipeloom.exportSvg()")
    assert len(re.findall(r">\d+</text>", text)) > 0.9 * 16 * 32 * 4  # F and B of both stages
    page.close()


def test_one_unit_of_memory_for_all_schedules(running: Any, tmp_path: Path) -> None:
    """Schedules with other numbers of chunks count shares of the model; bytes stand alone in their column."""
    timelines = [pl.simulate(pl.schedules.build(name, 8, 16)) for name in ("v-half", "1f1b")]
    assert [max(timeline.peak_activations) for timeline in timelines] == [10, 8]
    cells = "() => [...document.querySelectorAll('#compare tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    page = Opened(running, tmp_path, timelines)
    head, *rows = page.run(cells)
    assert "peak memory" not in head  # it is that of the activations
    assert [row[head.index("peak activations")] for row in rows] == ["5", "8"]
    assert page.page.inner_text("#compare caption") == "peaks in micro-batches of 1/p of the model"
    tiles = page.page.locator(".tiles").all_inner_texts()
    assert ["5\npeak memory, micro-batches of 1/p" in tiles[0], "8\npeak memory, micro-batches of 1/p" in tiles[1]] == [
        True
    ] * 2
    table = page.run("() => pipeloom.tableOf(pipeloom.panes[0].schedule, {factor: 1, name: ''}).rows")
    assert table[1][table[0].index("peak activations")] == "5"
    assert page.run("() => pipeloom.panes.map((pane) => pane.options({}).most)") == [8, 8]
    page.close()
    whole = pl.schedules.one_f_one_b(4, 6)
    page = Opened(
        running, tmp_path, [pl.simulate(each) for each in (whole, transformed(whole, ["slices=3"], pl.Costs()))]
    )
    head, *rows = page.run(cells)
    assert [row[head.index("peak activations")] for row in rows] == ["4", "4"]
    assert page.run("() => pipeloom.panes.map((pane) => pane.schedule.most)") == pytest.approx([4, 4])
    page.close()
    in_bytes = pl.simulate(pl.schedules.one_f_one_b(8, 16), pl.Costs(bytes={"saved": 512.0}))
    page = Opened(running, tmp_path, timelines[1:], rows=[in_bytes])
    head, *rows = page.run(cells)
    assert [row[head.index("peak memory")] for row in rows] == ["–", "4 KiB"]
    assert len(page.run("() => pipeloom.panes")) == 1  # the other is a row alone
    page.close()
    given = [pl.simulate(t.schedule, pl.Costs(activation=size)) for t, size in zip(timelines, (1.0, 2.0), strict=True)]
    page = Opened(running, tmp_path, given)
    head, *rows = page.run(cells)
    assert [row[head.index("peak memory")] for row in rows] == ["10", "16"]  # a unit of one's own stays
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_is_below_the_timelines_has_the_theme_of_the_page(running: Any, tmp_path: Path, dark: bool) -> None:
    below = segment_lanes((LayerSegments(dispatch=1.5, combine=1.5),), 900)
    page = Opened(running, tmp_path, _interleaved(), below=below, color_scheme="dark" if dark else "light")
    paper, ink, lane, on_box = page.run(
        """() => ["rect", "text.h", ".r + rect", "text.m.k"].map((name) =>
            getComputedStyle(document.querySelector(`figure ${name}`)).fill)"""
    )
    assert [paper, ink, lane] == (
        ["rgb(20, 23, 29)", "rgb(230, 233, 239)", "rgb(38, 43, 52)"]
        if dark
        else ["rgb(255, 255, 255)", "rgb(31, 36, 48)", "rgb(238, 240, 244)"]
    )
    assert on_box == "rgb(0, 0, 0)"
    page.close()


def test_phases_are_bracketed(opened: Opened) -> None:
    timeline = pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8))
    for rank in range(4):
        found = opened.run("(rank) => pipeloom.phasesOf(pipeloom.panes[1].schedule, rank)", rank)
        row = boxes(timeline)[rank]
        phases = [(box.phase, box.start, box.end) for box in row]
        names = list(dict.fromkeys(phase for phase, _, _ in phases))
        assert [name for *_, name in found] == names
        for start, end, name in found:
            same = [(a, b) for phase, a, b in phases if phase == name]
            assert (start, end) == pytest.approx((same[0][0], same[-1][1]))
    assert "warm-up of rank 0" in opened.run("() => pipeloom.exportSvg()")


def test_the_ruler_measures_and_a_number_finds_its_micro_batch(opened: Opened) -> None:
    opened.page.keyboard.press("r")
    (x, y), (other, _) = opened.place(1, 0), opened.place(1, 9)
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(other, y, steps=3)
    opened.page.mouse.up()
    starts, ends = _interleaved().starts[1], _interleaved().ends[1]
    measure = opened.run("() => pipeloom.state.measure")
    assert measure["to"] - measure["from"] == pytest.approx((starts[9] + ends[9] - starts[0] - ends[0]) / 2, abs=0.1)
    opened.page.keyboard.press("r")
    assert opened.run("() => pipeloom.state.measure") is None
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("5")
    assert opened.run("() => pipeloom.state.follow") == 5
    assert opened.page.inner_text("#details").startswith("F of stage 0, micro-batch 5")
    for text in ("99", "2.5", "-1"):
        opened.page.fill("#find", text)
        assert opened.page.inner_text("#status") == f"there is no micro-batch {text}: interleaved has 0 to 7"
    opened.page.fill("#find", "7")
    assert opened.page.is_hidden("#status")
    assert opened.run("() => pipeloom.state.follow") == 7


def test_a_number_finds_the_first_slice_of_its_micro_batch(running: Any, tmp_path: Path) -> None:
    page = Opened(running, tmp_path, pl.simulate(transformed(pl.schedules.one_f_one_b(2, 4), ["slices=3"], pl.Costs())))
    page.page.fill("#find", "2")
    assert page.page.inner_text("#details").startswith("F of stage 0, micro-batch 2.0")
    page.page.fill("#find", "4")
    assert page.page.inner_text("#status") == "there is no micro-batch 4: 1f1b has 0 to 3"
    page.close()


def test_the_ruler_holds_on_to_the_edges_of_actions(opened: Opened) -> None:
    """Of the row under the pointer within a few pixels; of any row beside the rows."""
    starts, ends = _interleaved().starts, _interleaved().ends
    edge = """([rank, time, off]) => { const { layout } = pipeloom.panes[0], x = layout.x(time, pipeloom.view) + off;
        return pipeloom.panes[0].edgeAt(x, rank < 0 ? 5 : layout.top(rank) + 3) - time; }"""
    scale = opened.run("() => pipeloom.panes[0].layout.scale(pipeloom.view)")
    for off in (-7, 6):
        assert opened.run(edge, [2, starts[2][3], off]) == pytest.approx(0)
        assert opened.run(edge, [2, ends[2][-1], off]) == pytest.approx(0)
    assert opened.run(edge, [3, starts[1][0], 3]) == pytest.approx(3 / scale)  # no edge of that row is near
    assert opened.run(edge, [-1, starts[1][0], 3]) == pytest.approx(0)
    x, y = opened.place(1, 0)
    opened.page.keyboard.press("r")
    opened.page.mouse.move(x + (starts[1][0] - ends[1][0]) * scale / 2 + 3, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x + (ends[1][0] - starts[1][0]) * scale / 2 - 4, y, steps=3)
    opened.page.mouse.up()
    measure = opened.run("() => pipeloom.state.measure")
    assert (measure["from"], measure["to"]) == (starts[1][0], ends[1][0])


def test_a_measured_step_has_its_deviation_and_the_worst_is_named(running: Any, tmp_path: Path) -> None:
    simulated = pl.simulate(pl.schedules.one_f_one_b(ranks=2, microbatches=3))
    at = [str(cell) for cell in simulated.schedule.programs[0]].index("0B2")
    ends = ((*simulated.ends[0][:at], simulated.ends[0][at] + 1), simulated.ends[1])
    page = Opened(running, tmp_path, [replace(simulated, source="measured", ends=ends), simulated])
    assert "+50 %\nover the simulation: B of stage 0, micro-batch 2 on rank 0" in page.page.inner_text(
        ".tiles >> nth=0"
    )
    assert page.run("(at) => pipeloom.panes[0].deviates(0, at)", at) == pytest.approx(0.5)
    page.page.keyboard.press("v")
    assert page.run("() => pipeloom.state.deviation")
    assert "longer (red)" in page.page.inner_text("#legend")
    page.close()


def test_the_wheel_zooms_under_the_cursor_and_panes_are_linked(opened: Opened) -> None:
    x, y = map(round, opened.place(2, 7))
    opened.page.mouse.move(x, y)
    read = "() => ({time: pipeloom.state.pointer, span: pipeloom.view.end - pipeloom.view.start})"
    before = opened.run(read)
    opened.page.mouse.wheel(0, -300)
    opened.page.wait_for_timeout(50)
    opened.page.mouse.move(x, y + 1)
    after = opened.run(read)
    assert after["span"] < 0.7 * before["span"]
    assert after["time"] == pytest.approx(before["time"], rel=1e-6)
    opened.page.keyboard.press("d")
    shown = opened.run("() => pipeloom.panes.map((pane) => pane.layout.time(500, pipeloom.view))")
    assert shown[0] == shown[1]
    opened.page.keyboard.press("0")
    assert opened.run("() => pipeloom.view.start") == 0


def test_a_click_follows_a_micro_batch_and_says_why_it_is_late(opened: Opened) -> None:
    timeline = _interleaved()
    rank, at = timeline.critical_path[-1]
    opened.page.mouse.click(*opened.place(rank, at))
    words = opened.page.inner_text("#details")
    assert "On the critical path" in words
    assert "Why is it late?" in words
    cell = timeline.schedule.programs[rank][at]
    assert opened.run("() => pipeloom.state.follow") == cell.microbatch
    assert opened.run("([rank, at]) => pipeloom.panes[0].schedule.chain(rank, at)", [rank, at]) == [
        list(place) for place in timeline.critical_path
    ]
    count = opened.run("(mb) => pipeloom.panes[0].schedule.cellsOf(mb).length", cell.microbatch)
    assert count == 16  # F and B of 8 stages
    opened.page.keyboard.press("Escape")
    assert opened.page.is_hidden("#details")


def _programs(opened: Opened) -> list[list[str]]:
    return opened.run("() => JSON.parse(pipeloom.panes[0].schedule.json()).programs")


def test_a_drag_moves_an_action_and_can_be_undone(opened: Opened, tmp_path: Path) -> None:
    before = _programs(opened)
    length = len(before[3])
    opened.page.keyboard.press("e")
    opened.page.mouse.move(*opened.place(3, length - 1))
    opened.page.mouse.down()
    opened.page.mouse.move(*opened.place(3, length - 3), steps=4)
    opened.page.mouse.up()
    moved = _programs(opened)
    assert sorted(moved[3]) == sorted(before[3])
    assert moved[3] != before[3]
    assert moved[:3] == before[:3]
    assert opened.page.inner_text("#status").startswith("valid · makespan ")
    assert "bubble rate" in opened.page.inner_text("#status")
    opened.page.keyboard.press("Control+z")
    assert _programs(opened) == before
    assert opened.page.is_hidden("#status")
    opened.page.keyboard.press("Control+Shift+Z")
    assert _programs(opened) == moved


@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_a_drag_into_a_deadlock_tells_the_cycle_and_moves_nothing(running: Any, tmp_path: Path, source: Any) -> None:
    timeline = _interleaved()
    if source == "measured":  # times that a simulation does not give
        slower = {
            name: tuple(tuple(2 * time for time in row) for row in getattr(timeline, name))
            for name in ("starts", "ends")
        }
        timeline = replace(timeline, source=source, **slower)
    opened = Opened(running, tmp_path, timeline)
    state = """() => [JSON.parse(pipeloom.panes[0].schedule.json()).programs, pipeloom.panes[0].schedule.figures,
        document.querySelector(".tiles").innerText, pipeloom.panes[0].stage.getBoundingClientRect().top]"""
    before = opened.run(state)
    opened.page.keyboard.press("e")
    last = len(before[0][3]) - 1
    opened.page.mouse.move(*opened.place(3, last))
    assert opened.page.is_visible("#card")
    opened.page.mouse.down()
    opened.page.mouse.move(*opened.place(3, 0), steps=8)
    for _ in range(2):  # while it is held, and when it is dropped
        words = opened.page.inner_text("#status")
        assert words.startswith("the action stays where it is. Moved, the schedule deadlocks; the shortest cycle:")
        assert opened.run("() => document.getElementById('status').className") == "bad"
        assert opened.run(state) == before
        opened.page.mouse.up()
    assert opened.page.is_disabled("#undo")
    opened.page.click("#fit")
    opened.page.mouse.click(*opened.place(0, 0))
    assert opened.page.is_hidden("#status")
    assert opened.said == []
    opened.close()


def test_the_keyboard_does_it_all(opened: Opened) -> None:
    opened.page.locator(".stage").first.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowDown")
    assert opened.run("() => pipeloom.state.selected.rank") == 1
    assert "of stage" in opened.page.text_content("#spoken")
    opened.page.keyboard.press("e")
    before = _programs(opened)
    opened.page.keyboard.press("Alt+ArrowRight")
    assert _programs(opened)[1] != before[1]
    opened.page.keyboard.press("Control+z")
    for key, flag in (("c", "critical"), ("m", "memory")):
        was = opened.run(f"() => pipeloom.state.{flag}")
        opened.page.keyboard.press(key)
        assert opened.run(f"() => pipeloom.state.{flag}") is not was
    theme = opened.run("() => pipeloom.state.theme")
    opened.page.keyboard.press("t")
    assert opened.run("() => pipeloom.state.theme") != theme
    span = "() => pipeloom.view.end - pipeloom.view.start"
    wide = opened.run(span)
    opened.page.keyboard.press("w")
    assert opened.run(span) < wide
    opened.page.keyboard.press("?")
    assert opened.page.is_visible("#keys")
    opened.page.keyboard.press("Escape")
    assert opened.page.is_hidden("#keys")


def test_a_print_has_the_legend_and_its_colours(opened: Opened) -> None:
    opened.page.emulate_media(media="print")
    assert opened.page.is_visible("#legend")
    assert opened.page.is_hidden(".tools")
    colours = "() => getComputedStyle(document.querySelector('#legend i')).printColorAdjust"
    assert opened.run(colours) == "exact"


def _saved(opened: Opened, button: str, folder: Path) -> Path:
    with opened.page.expect_download() as download:
        opened.page.click(button)
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_files_that_are_saved(opened: Opened, tmp_path: Path) -> None:
    opened.run("() => pipeloom.move(pipeloom.panes[0], 0, 1, 2)")
    opened.run("() => { pipeloom.state.active = 0; }")
    edited = load(_saved(opened, "#json", tmp_path))
    pl.check(edited)
    assert edited.name == "interleaved, edited"
    program = list(_interleaved().schedule.programs[0])
    program.insert(2, program.pop(1))
    assert edited.programs[0] == tuple(program)
    from_csv = load(_saved(opened, "#csv", tmp_path))
    assert from_csv.programs == edited.programs
    assert pl.simulate(edited, pl.Costs(forward=1.1, p2p=0.3)).makespan == pytest.approx(
        opened.run("() => pipeloom.panes[0].schedule.figures.makespan")
    )
    drawing = _saved(opened, "#svg", tmp_path).read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert "costs of a stage: F 1.1, I 1, W 1; p2p 0.3" in drawing
    assert _saved(opened, "#png", tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [
        (pl.schedules.dualpipe(ranks=4, microbatches=8), "which micro-batch takes which route"),
        (
            pl.schedules.zb_h1(ranks=3, microbatches=4).with_tensors([("skip", 0, [2])]),
            "which tensors stages pass by name",
        ),
    ],
    ids=["two routes", "named tensors"],
)
def test_what_csv_cannot_say_is_saved_as_json(
    schedule: pl.Schedule, missing: str, running: Any, tmp_path: Path
) -> None:
    page = Opened(running, tmp_path, pl.simulate(schedule))
    assert page.page.is_disabled("#csv")
    assert page.page.get_attribute("#csv", "title") == f"The CSV form cannot say {missing}; save JSON"
    assert load(_saved(page, "#json", tmp_path)) == schedule
    page.close()


HOSTILE = ["</script><script>document.title='owned'</script>", "\"'`${1}\\u2028&lt;", "שלום עולם <b>", "{{data}}"]


def test_hostile_names_are_text(running: Any, tmp_path: Path) -> None:
    schedules = [pl.Schedule.of([["0F0", "0B0"]], placement=[0], microbatches=1, name=name) for name in HOSTILE]
    timelines = [pl.simulate(schedule) for schedule in schedules]
    page = Opened(running, tmp_path, timelines, title=HOSTILE[0])
    assert page.page.title() == HOSTILE[0]
    assert page.page.inner_text("h1") == HOSTILE[0]
    headings = page.page.locator("h2").all_inner_texts()
    assert headings[:4] == [f"{name}, 1 rank, 1 micro-batch" for name in HOSTILE]
    text = page.run("() => pipeloom.exportSvg()")
    page.run(
        "(text) => { new DOMParser().parseFromString(text, 'image/svg+xml').querySelector('parsererror') && boom(); }",
        text,
    )
    assert page.run("() => document.scripts.length") == 2
    assert page.said == []
    assert page.requests == [page.file.as_uri()]
    page.close()


def test_the_policy_stops_other_scripts_and_requests(running: Any, tmp_path: Path) -> None:
    page = Opened(running, tmp_path, _interleaved())
    page.run(
        """() => { const script = document.createElement("script"); script.textContent = "window.owned = 1";
        document.body.append(script); const image = new Image(); image.src = "https://example.org/x.png"; }"""
    )
    page.page.wait_for_timeout(50)
    assert page.run("() => window.owned") is None
    assert len([words for words in page.said if "Content Security Policy" in words]) >= 2
    assert page.failures == ["https://example.org/x.png: csp"]
    page.close()


def test_a_page_of_nothing_and_of_one_action(running: Any, tmp_path: Path) -> None:
    page = Opened(running, tmp_path, [])
    assert "nothing to draw" in page.page.inner_text("#panes")
    assert page.said == []
    page.close()
    bare = pl.Schedule.of([[]], placement=[0], microbatches=1, name="bare")
    lone = pl.Schedule.of([["0F0"]], placement=[0], microbatches=1, name="lone")
    page = Opened(
        running,
        tmp_path,
        [pl.Timeline(bare, pl.Costs(), ((),), ((),)), pl.Timeline(lone, pl.Costs(), ((0.0,),), ((1.0,),))],
    )
    for key in ("ArrowRight", "c", "m", "w", "Escape"):
        page.page.keyboard.press(key)
    page.run("() => pipeloom.exportSvg()")
    assert page.said == []
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_both_themes(running: Any, tmp_path: Path, dark: bool) -> None:
    """Ink on paper has a contrast of at least 4.5 (WCAG 2 AA)."""
    page = Opened(running, tmp_path, _interleaved(), color_scheme="dark" if dark else "light")
    assert page.run("() => pipeloom.state.theme") == ("dark" if dark else "light")
    ratio = page.run(
        """() => {
            const light = (text) => { const [r, g, b] = text.match(/\\d+/g).map(Number).map((p) => {
                p /= 255; return p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4; });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const paper = light(getComputedStyle(document.body).backgroundColor);
            return ["h1", ".facts", "#legend span", "td"].map((name) => {
                const ink = light(getComputedStyle(document.querySelector(name)).color);
                return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); });
        }"""
    )
    assert min(ratio) >= 4.5
    page.close()


def test_65_thousand_actions_are_drawn_by_column(running: Any, tmp_path: Path) -> None:
    page = Opened(
        running,
        tmp_path,
        pl.simulate(pl.schedules.one_f_one_b(ranks=32, microbatches=1024)),
        viewport={"width": 2560, "height": 1440},
    )
    drawn = page.run("() => pipeloom.panes[0].drawn")
    assert drawn == {"dense": True, "boxes": 65536}
    page.run("() => { pipeloom.setView(500, 530); pipeloom.drawNow(); }")
    assert page.run("() => pipeloom.panes[0].drawn.dense") is False
    assert page.said == []
    page.close()


def _inside(running: Any, text: str) -> list[str]:
    """The texts of an SVG that reach out of it, or over another text of their line."""
    context = running.new_context(offline=True)
    page = context.new_page()
    page.set_content(f'<!doctype html><body style="visibility: hidden">{text}')  # it is laid out, and not painted
    outside = page.evaluate(
        """() => { const svg = document.querySelector("svg"), view = svg.viewBox.baseVal, out = [];
        const frame = svg.getBoundingClientRect();
        const boxes = [...svg.querySelectorAll("text")].map((text) => { const box = text.getBoundingClientRect();
            return [text.textContent, {x: box.x - frame.x, y: box.y - frame.y, width: box.width, height: box.height}]; });
        for (const [words, box] of boxes)
            if (box.x < 0 || box.y < 0 || box.x + box.width > view.width || box.y + box.height > view.height) out.push(words);
        const wide = boxes.filter(([words]) => words.length > 3);
        for (const [a, one] of wide) for (const [b, two] of wide)
            if (one !== two && Math.abs(one.y - two.y) < 4 && one.x < two.x && one.x + one.width > two.x + 0.5)
                out.push(`${a} / ${b}`);
        return out; }"""
    )
    context.close()
    return list(outside)


@pytest.mark.parametrize("width", [420, 960, 2400])
def test_no_text_of_an_svg_is_clipped(running: Any, width: int) -> None:
    timelines = [
        pl.simulate(pl.schedules.zb_auto(ranks=4, microbatches=12), pl.Costs(1.234, 1.567, 1.8901, 0.123)),
        pl.simulate(pl.schedules.dualpipev(ranks=4, microbatches=10), pl.Costs(all_to_all=0.345)),
        pl.simulate(pl.schedules.interleaved(ranks=2, microbatches=4, chunks=12)),
        pl.simulate(
            pl.Schedule.of([["0F0", "0B0"]], placement=[0], microbatches=1, name="W" * 150 + " שלום 漢字" * 20)
        ),
        pl.simulate(pl.schedules.gpipe(ranks=1100, microbatches=1)),
    ]
    for chosen in (timelines[:1], timelines[:3], timelines[3:4], timelines[4:]):
        assert _inside(running, svg(chosen, width)) == []


def test_no_text_of_the_documentation_is_clipped(running: Any) -> None:
    for path in sorted((ROOT / "docs" / "img").glob("*.svg")):
        assert _inside(running, path.read_text(encoding="utf-8")) == [], path.name


def test_the_saved_svg_clips_nothing(running: Any, tmp_path: Path) -> None:
    page = Opened(
        running,
        tmp_path,
        [_interleaved(), pl.simulate(pl.schedules.dualpipev(ranks=4, microbatches=10), pl.Costs(all_to_all=0.3))],
    )
    text = page.run("() => pipeloom.exportSvg()")
    page.close()
    assert _inside(running, text) == []


def test_the_page_is_one_file_with_a_strict_policy() -> None:
    text = html(_interleaved())
    assert "default-src 'none'; script-src 'sha256-" in text
    for word in ("src=", "href=", "http://", "@import", "url("):
        assert word not in text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace('href="${canvas', "").replace(
            "url(#idle", ""
        )
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["format"] == "pipeloom.page/1"
    assert list(csv.reader([data["panes"][0]["heading"]]))


def test_queues_and_pools_are_drawn_as_simulated_and_cannot_be_edited(running: Any, tmp_path: Path) -> None:
    gib = 2.0**30
    costs = pl.Costs(p2p=0.5, bytes={"saved": 2 * gib, "kept": gib, "params": 4 * gib}, host_bandwidth=gib)
    schedule = transformed(pl.schedules.one_f_one_b(2, 4), ["offload"], costs)
    timeline = pl.simulate(schedule, costs)
    page = Opened(running, tmp_path, timeline, limit=20 * gib)
    rows, starts, peaks, figures_of_page, path = page.run(
        """() => {
            const { schedule } = pipeloom.panes[0];
            const at = ([row, place]) => [schedule.rows[row].rank, schedule.still.positions[row][place]];
            return [schedule.rows, schedule.programs.map(({ start }) => [...start]),
                Object.fromEntries(schedule.pools.map(({ pool, ranks }) => [pool, ranks.map(({ peak }) => peak)])),
                schedule.figures, schedule.criticalPath.map(at)];
        }"""
    )
    assert [(row["rank"], row["queue"]) for row in rows] == [
        (0, "compute"), (1, "compute"), (0, "in"), (0, "out"), (1, "in"), (1, "out")
    ]  # fmt: skip
    queues = [schedule.queues[row["rank"]].get(row["queue"], ()) for row in rows]
    assert starts == [[timeline.starts[row["rank"]][at] for at in q] for row, q in zip(rows, queues, strict=True)]
    assert {pool: tuple(peak) for pool, peak in peaks.items()} == timeline.peak_bytes
    for name in ("makespan", "bubble_ratio", "busy", "idle", "peak_activations"):
        assert figures_of_page[name] == pytest.approx(figures(timeline)[name])
    assert tuple(map(tuple, path)) == timeline.critical_path
    backward = next(
        at for at, place in enumerate(schedule.queues[0]["compute"]) if str(schedule.programs[0][place]) == "0B0"
    )
    page.page.mouse.move(*page.place(0, backward))
    card = page.page.inner_text("#card")
    assert "saved of stage 0 (rank 0, made by 0L0, 2 GiB in device)" in card
    assert "input gradient of stage 1 (rank 1, made by 1B0)" in card
    assert "frees saved, 2 GiB in device; kept, 1 GiB in device" in card
    assert "of 20 GiB" in page.page.inner_text(".tiles")
    page.page.keyboard.press("e")
    assert page.page.is_disabled("#edit")
    assert not page.run("() => pipeloom.state.edit")
    page.page.mouse.move(*page.place(2, 0))
    assert page.page.inner_text("#card").split("\n")[1].startswith("rank 0, queue in; ")
    assert from_json(page.run("() => pipeloom.panes[0].schedule.json()")) == schedule
    assert page.said == []
    page.close()


@pytest.mark.parametrize("transform", ["shard=1", "recompute=norms", "recompute"])
def test_the_page_writes_cells_of_every_form(running: Any, tmp_path: Path, transform: str) -> None:
    schedule = transformed(pl.schedules.one_f_one_b(2, 3), [transform], pl.Costs())
    page = Opened(running, tmp_path, pl.simulate(schedule))
    assert from_json(page.run("() => pipeloom.panes[0].schedule.json()")).programs == schedule.programs
    assert page.said == []
    page.close()
