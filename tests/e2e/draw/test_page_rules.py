"""The page's own simulator and checker agree with `simulate` and `check` on random schedules and edits of them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pipeloom as pl
from browser import Opened, browser
from pipeloom.draw import figures, svg, terminal
from pipeloom.draw.figures import number, time_unit
from pipeloom.draw.html import document
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.json_form import to_dict
from pipeloom.schedule.timeline import CAUSES, plain

CASES = 60

SETTLE = """(text) => JSON.stringify(JSON.parse(text).map(([pane, kinds, edit]) => {
    const schedule = new pipeloom.Schedule(pane, kinds);
    const simulated = () => schedule.settle(schedule.simulate());
    const state = () => ({
        starts: schedule.programs.map((p, rank) => Array.from(p.start.subarray(0, schedule.reached[rank]))),
        ends: schedule.programs.map((p, rank) => Array.from(p.end.subarray(0, schedule.reached[rank]))),
        figures: schedule.figures, causes: schedule.idleByCause, path: schedule.criticalPath,
        memory: schedule.memory.map((curve) => Array.from(curve.times, (time, at) => [time, curve.levels[at]])),
    });
    const given = state();
    simulated();
    const again = state();
    const out = {given, again, json: JSON.parse(schedule.json())};
    if (!schedule.beyondCsv()) out.csv = schedule.csv();
    out.invalid = schedule.move(...edit);
    if (!out.invalid) out.edited = state();
    out.edited_json = JSON.parse(schedule.json());
    schedule.undo();
    out.undone = state();
    return out;
}))"""


def _schedule(rng: random.Random) -> pl.Schedule:
    while True:
        name = rng.choice(sorted(pl.schedules.FAMILIES))
        ranks, microbatches = rng.randint(1, 6), rng.randint(1, 14)
        try:
            schedule = pl.schedules.build(name, ranks, microbatches)
        except pl.PipeloomError:
            continue
        return schedule if rng.random() < 0.6 else schedule.with_tensors(_tensors(rng, schedule.positions))


def _tensors(rng: random.Random, positions: int) -> list[tuple[str, int, list[int]]]:
    """Up to two tensors that stages read by name."""
    producers = [rng.randrange(positions) for _ in range(2)]
    later = [range(producer + 1, positions) for producer in producers]
    return [
        (name, producer, sorted(rng.sample(consumers, rng.randint(1, len(consumers)))))
        for name, producer, consumers in zip(("skip", "states"), producers, later, strict=True)
        if consumers
    ]


def _costs(rng: random.Random, schedule: pl.Schedule) -> pl.Costs:
    stages, ranks = schedule.stages, schedule.ranks

    def some(low: float = 0.0, high: float = 3.0) -> Any:
        if rng.random() < 0.5:
            return rng.choice([1.0, 1.0, round(rng.uniform(low, high), 3)])
        return tuple(round(rng.uniform(low, high), 3) for _ in range(stages))

    costs: dict[str, Any] = {name: some() for name in ("forward", "input_grad", "weight_grad", "activation")}
    costs["held"] = some(high=1.0) if rng.random() < 0.5 else 1.0
    kind = rng.randrange(3)
    if kind == 1:
        costs["p2p"] = rng.choice([0.3, 1.0])
    elif kind == 2:
        costs["p2p"] = tuple(tuple(round(rng.uniform(0, 1), 2) for _ in range(ranks)) for _ in range(ranks))
        costs |= {"message": 2.0, "bandwidth": 3.0, "tensors": {"skip": rng.choice([0.5, 20.0])}}
    if rng.random() < 0.4:
        costs["all_to_all"] = some(high=1.0)
    if rng.random() < 0.3:
        costs["backward"] = some()
    if rng.random() < 0.3:
        costs["pair"] = some(1.0, 4.0)
    if rng.random() < 0.2:
        costs["pair_split"] = tuple(tuple(round(rng.uniform(1, 3), 2) for _ in range(stages)) for _ in range(stages))
    if rng.random() < 0.3:
        costs["microbatch"] = tuple(round(rng.uniform(0.5, 2), 2) for _ in range(schedule.microbatches))
    return pl.Costs(**costs)


def _moved(schedule: pl.Schedule, rank: int, source: int, target: int) -> pl.Schedule:
    program = list(schedule.codes[rank])
    program.insert(target, program.pop(source))
    return replace(schedule, codes=(*schedule.codes[:rank], tuple(program), *schedule.codes[rank + 1 :]))


def _refused(schedule: pl.Schedule) -> str:
    try:
        pl.check(schedule)
    except pl.ScheduleError as error:
        return str(error)
    return ""


def _agrees(state: dict[str, Any], timeline: pl.Timeline) -> None:
    origin = min(starts[0] for starts in timeline.starts if starts)
    for name, times in (("starts", timeline.starts), ("ends", timeline.ends)):
        assert [len(row) for row in state[name]] == [len(row) for row in times]
        for row, expected_row in zip(state[name], times, strict=True):
            assert all(abs(a + origin - b) < 1e-9 for a, b in zip(row, expected_row, strict=True)), name
    figures = state["figures"]
    assert figures["peak_activations"] == list(timeline.peak_activations)
    for name in ("makespan", "busy", "idle", "spans", "bubble_ratio", "bubble_rate", "span_bubble_rate", "peak_memory"):
        expected = getattr(timeline, name)
        assert figures[name] == pytest.approx(list(expected) if isinstance(expected, tuple) else expected, abs=2e-9), (
            name
        )
    for row, causes in zip(state["causes"], timeline.idle_by_cause, strict=True):
        assert row == pytest.approx([causes[cause] for cause in CAUSES], abs=1e-8)
    assert [tuple(place) for place in state["path"]] == list(timeline.critical_path)
    for points, curve in zip(state["memory"], timeline.memory_curve, strict=True):
        assert len(points) == len(curve)
        for (time, level), (at, expected_level) in zip(points, curve, strict=True):
            assert abs(time + origin - at) < 1e-9
            assert abs(level - expected_level) < 1e-6


def test_the_page_simulates_and_checks_as_python_does(tmp_path: Path) -> None:
    rng = random.Random(19)
    cases: list[tuple[pl.Timeline, tuple[int, int, int]]] = []
    for _ in range(CASES):
        schedule = _schedule(rng)
        timeline = pl.simulate(schedule, _costs(rng, schedule), overlap_p2p=rng.random() < 0.8)
        rank = rng.randrange(schedule.ranks)
        length = len(schedule.codes[rank])
        source = rng.randrange(length)
        near = min(length - 1, max(0, source + rng.choice([-2, -1, 1, 2])))
        cases.append((timeline, (rank, source, near if rng.random() < 0.6 else rng.randrange(length))))
    documents = [document([timeline], "") for timeline, _ in cases]
    questions = [[d["panes"][0], d["kinds"], edit] for d, (_, edit) in zip(documents, cases, strict=True)]
    with browser() as running:
        opened = Opened(running, tmp_path, cases[0][0])
        answers = json.loads(opened.run(SETTLE, json.dumps(questions)))
        values = [0.0, 0.5, 2.5, 1234.5, 1235.5, 0.125, 1 / 3, 1e-7, 36.6, 123456.7, 2e-9, -1.25, 999.95]
        values += [rng.uniform(0, 10 ** rng.randint(-3, 6)) for _ in range(200)] + [
            rng.randrange(4000) / 8 for _ in range(200)
        ]
        assert opened.run("(values) => values.map((value) => pipeloom.number(value))", values) == list(
            map(number, values)
        )
        assert not opened.said
    cyclic = 0
    for (timeline, edit), answer in zip(cases, answers, strict=True):
        schedule = timeline.schedule
        _agrees(answer["given"], timeline)
        _agrees(answer["again"], timeline)
        _agrees(answer["undone"], timeline)
        written = json.loads(json.dumps(to_dict(schedule)))
        assert answer["json"] == written
        assert ("csv" in answer) == (len(schedule.routes) == 1 and not schedule.tensors)
        if "csv" in answer:
            assert answer["csv"] == to_csv(schedule)
        changed = _moved(schedule, *edit)
        reason = _refused(changed)
        assert answer["invalid"] == reason
        programs = (schedule if reason else changed).programs  # what deadlocks is not moved
        assert answer["edited_json"]["programs"] == [[str(cell) for cell in program] for program in programs]
        if reason:
            cyclic += 1
        else:
            _agrees(answer["edited"], pl.simulate(changed, timeline.costs, overlap_p2p=timeline.overlap_p2p))
    assert CASES / 6 < cyclic < CASES * 5 / 6


TABLES = """(panes) => JSON.stringify(panes.map((pane) => {
    const document_ = pane[0], schedule = new pipeloom.Schedule(document_.panes[0], document_.kinds);
    return pipeloom.tableOf(schedule, document_.unit);
}))"""


def test_terminal_page_json_and_svg_have_the_same_numbers(tmp_path: Path) -> None:
    """Makespan, idle and peak of 16 random timelines, every third one measured, as each of the four writes them."""
    rng = random.Random(7)
    timelines = []
    for case in range(16):
        schedule = _schedule(rng)
        timeline = pl.simulate(schedule, _costs(rng, schedule))
        timelines.append(replace(timeline, source="measured") if case % 3 == 2 else timeline)
    documents = [[json.loads(json.dumps(document([timeline], "")))] for timeline in timelines]
    with browser() as running:
        opened = Opened(running, tmp_path, timelines[0])
        tables = json.loads(opened.run(TABLES, documents))
        opened.page.click("summary")
        shown = opened.page.locator(".pane table").inner_text().split("\n")
        assert not opened.said
    assert [line.split("\t") for line in shown] == tables[0]["rows"]  # what is asked for is what is on the page
    for timeline, table in zip(timelines, tables, strict=True):
        factor, unit = time_unit([timeline])
        found = figures(timeline)
        ranks = range(timeline.schedule.ranks)
        idle = [number(plain(value * factor)) for value in found["idle"]]
        peak = [str(value) for value in found["peak_activations"]]
        makespan = number(plain(found["makespan"] * factor)) + (f" {unit}" if unit else "")
        head, *rows = table["rows"]
        assert [row[head.index("idle")] for row in rows] == idle
        assert [row[head.index("peak activations")] for row in rows] == peak
        assert [row[head.index("peak memory")] for row in rows] == list(map(number, found["peak_memory"]))
        assert [row[head.index("messages sent")] for row in rows] == list(map(str, found["messages"]["sent"]))
        assert table["makespan"] == makespan
        lines = terminal(timeline, width=200, color=False).splitlines()
        begin = next(at for at, line in enumerate(lines) if line.startswith("rank  "))
        columns = [line.split() for line in lines[begin + 1 : begin + 1 + len(ranks)]]
        assert [column[2] for column in columns] == idle
        assert [column[6] for column in columns] == peak
        assert re.search(rf"^makespan +{re.escape(makespan)}( |$)", "\n".join(lines), re.M)
        texts = ElementTree.fromstring(svg(timeline)).iter("{http://www.w3.org/2000/svg}text")
        drawn = [(text.get("class"), text.text) for text in texts]
        ends = [words for style, words in drawn if style == "e"]
        assert ends == [value for rank in ranks for value in (idle[rank], peak[rank])]
        assert f"makespan {makespan} · " in " ".join(words for style, words in drawn if style == "f")
