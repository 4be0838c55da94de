"""`pipeloom show`: measured steps from a run's folder, traces of other programs, refusals that name the nearest one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule.timeline import Exposed
from pipeloom.traces import timelines as timeline_files
from primus_dump import converted, dump


def _steps(count: int = 6) -> list[pl.Timeline]:
    """Steps of one schedule in seconds, each a little longer than the one before."""
    schedule = pl.schedules.one_f_one_b(ranks=4, microbatches=8)
    steps = []
    for step in range(count):
        costs = pl.Costs(forward=1.0, input_grad=1.1, weight_grad=0.9).scaled(1e-3 * (1 + 0.01 * step))
        steps.append(dataclasses.replace(pl.simulate(schedule, costs), source="measured"))
    return steps


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, ["show", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "timelines.json").write_text(json.dumps(timeline_files.to_dict(_steps())))
    return run


def test_uses_of_time_that_do_not_fit_a_line_stand_below_the_others(tmp_path: Path) -> None:
    exposed = (Exposed({"tp": 1.2345e-4, "cp": 2.3456e-4, "all-to-all": 3.4567e-4}, {"dp": 4.5678e-4}, 0.1),) * 4
    steps = [dataclasses.replace(step, exposed=exposed) for step in _steps(3)]
    (tmp_path / "timelines.json").write_text(json.dumps(timeline_files.to_dict(steps)))
    table = _run(str(tmp_path / "timelines.json")).partition("where the time went")[2].splitlines()
    assert [line.split()[0] for line in table if line.startswith("rank")] == ["rank", "rank"]
    assert max(map(len, table)) <= 80


def test_a_run_is_drawn_with_its_unit_and_its_prediction(folder: Path, tmp_path: Path) -> None:
    text = _run(str(folder), "--html", str(tmp_path / "x.html"), "--svg", str(tmp_path / "x.svg"), "--width", "90")
    assert "measured, times in ms" in text
    # the settled steps 1 to 5 have 1.01 to 1.05 of the costs: the median of 1.01 and 1.02 predicts that of 1.03 to 1.05
    assert f"error {100 * (1.015 / 1.04 - 1):+.1f} %" in text
    assert "actions ran 2 % slower in them; with costs at that speed: error +0.0 %" in text
    assert "steps became 4 % longer" in text
    assert "dependency: another rank has not yet" in text
    assert "time, ms" in (tmp_path / "x.svg").read_text()
    assert '"unit":{"factor":1000.0,"name":"ms"}' in (tmp_path / "x.html").read_text()
    assert "of each step: " not in (tmp_path / "x.html").read_text()
    (folder / "log.jsonl").write_text(
        '{"event": "step", "step": 1, "loss": 2}\n{"event": "step", "step": 2, "loss": 1}\n'
    )
    _run(str(folder), "--html", str(tmp_path / "x.html"))
    assert "<title>of each step: 1 at 2</title>" in (tmp_path / "x.html").read_text()


def test_of_a_folder_of_runs_the_newest_is_shown(folder: Path) -> None:
    for name, seconds in (("zero", 1000), ("one", 2000)):
        file = folder.parent / name / "config.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        os.utime(file, (seconds, seconds))
    assert json.loads(_run(str(folder.parent), "--json"))["run"] == str(folder)


def test_the_json_has_the_figures_in_seconds(folder: Path) -> None:
    found = json.loads(_run(str(folder), "--json"))
    assert found["unit"] == "s"
    assert found["steps"] == 6
    assert found["makespan"] == pytest.approx(33e-3 * 1.03)
    assert found["prediction"]["error"] == pytest.approx(1.015 / 1.04 - 1)
    assert found["prediction"]["speed"] == pytest.approx(1.04 / 1.015)
    assert found["prediction"]["error_at_speed"] == pytest.approx(0)
    assert found["prediction"]["by_kind"] == pytest.approx({"F": 1.04 / 1.015 - 1, "B": 1.04 / 1.015 - 1})
    assert found["drift"] == pytest.approx(0.04 / 1.03, rel=1e-3)
    assert found["slow_stages"] == []
    for row, busy in zip(found["time_spent"], found["busy"], strict=True):
        assert row["computation"] == pytest.approx(busy)


def test_costs_of_one_run_predict_another(folder: Path, tmp_path: Path) -> None:
    """The zero-bubble order of the same four stages, and two chunks of half as much, measured at 1.2 times the costs."""
    costs = pl.Costs(forward=1.0, input_grad=1.1, weight_grad=0.9).scaled(1.2e-3)
    other, looped = tmp_path / "zb.json", tmp_path / "looped.json"
    for path, schedule in ((other, pl.schedules.zb_h1(4, 8)), (looped, pl.schedules.interleaved(4, 8))):
        timeline = dataclasses.replace(pl.simulate(schedule, costs), source="measured")
        path.write_text(json.dumps(timeline_files.to_dict([timeline])))
    (found,) = json.loads(_run(str(folder), "--predict", str(other), "--json"))["others"]
    want = pl.simulate(pl.schedules.zb_h1(4, 8), pl.Costs(1.0, 1.1, 0.9).scaled(1.015e-3)).makespan
    assert found["simulated"] == pytest.approx(want)
    assert found["error"] == pytest.approx(found["simulated"] / found["measured"] - 1)
    assert f"error {100 * found['error']:+.1f} %" in _run(str(folder), "--predict", str(other))
    (halves,) = json.loads(_run(str(folder), "--predict", str(looped), "--json"))["others"]
    want = pl.simulate(pl.schedules.interleaved(4, 8), pl.Costs(1.0, 1.1, 0.9).scaled(1.015e-3 / 2)).makespan
    assert halves["simulated"] == pytest.approx(want)
    assert "the same costs, with the 4 stages cut evenly into 8, predict" in _run(str(folder), "--predict", str(looped))


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nearest: .*runs/one"):
        _run(str(folder.parent))
    with pytest.raises(UsageError, match="did you mean 'one'"):
        _run(str(folder.parent / "onee"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda form: form.update(format="x"), "format is 'x'"),
        (lambda form: form.update(timelines=[]), "contains no steps"),
        (lambda form: form["timelines"][0].pop("costs"), "not as a run writes it: KeyError"),
        (lambda form: form["timelines"][0]["starts"][1].pop(), "starts do not give each action"),
        (lambda form: form["timelines"][0].update(source="dreamt"), "source is 'dreamt'"),
        (lambda form: form["schedules"][0].update(ranks=9), "ranks is 9"),
        (lambda form: form["timelines"][0].update(schedule=7), "IndexError"),
        (lambda form: form["timelines"][0]["costs"].update(forward=-1), "forward is -1"),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, change: object, words: str) -> None:
    form = json.loads((folder / "timelines.json").read_text())
    change(form)  # type: ignore[operator]
    (folder / "timelines.json").write_text(json.dumps(form))
    with pytest.raises(PipeloomError, match=words):
        _run(str(folder))


def test_timelines_round_trip() -> None:
    timelines = (
        *_steps(2),
        pl.simulate(
            pl.schedules.dualpipe(ranks=2, microbatches=4),
            pl.Costs(pair=((1.5,) * 4,) * 4, p2p=((0, 1), (1, 0)), microbatch=(1, 2, 1, 1), bandwidth=3.0),
            overlap_p2p=False,
        ),
    )
    form = json.dumps(timeline_files.to_dict(timelines))
    assert timeline_files.from_json(form) == timelines
    assert len(json.loads(form)["schedules"]) == 2


def test_a_dump_of_another_program_is_shown_and_searched(tmp_path: Path) -> None:
    """Zero bubble's order with each W behind its I, at 10 GB and 2.5 GB for each micro-batch: a search does what ZB-H1 does."""
    timeline = pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8), pl.Costs().scaled(1e-2))
    slow = pl.simulate(_with_late_weights(timeline.schedule), timeline.costs)
    trace = converted(dump(tmp_path / "dump", slow, labels=True))
    text = _run(str(trace), "--search", "1")
    assert "actions by the names of the events" in text
    assert "assumed:\n  the same placement (linear), I and W as measured (half of B each" in text
    found = json.loads(_run(str(trace), "--search", "1", "--json"))
    assert found["memory"] == pytest.approx([20, 17.5, 15, 12.5])
    assert found["search"]["best"]["makespan"] <= timeline.makespan + 1e-9 < slow.makespan
    improved = json.loads(CliRunner().invoke(app, ["improve", str(trace), "--json", "--time-limit", "1"]).stdout)
    assert improved["now"] == found["search"]["now"]
    assert improved["best"]["makespan"] == pytest.approx(found["search"]["best"]["makespan"], rel=1e-3)


def test_a_trace_of_one_step_predicts_nothing(tmp_path: Path) -> None:
    step = pl.simulate(pl.schedules.one_f_one_b(ranks=2, microbatches=4), pl.Costs().scaled(1e-2))
    path = tmp_path / "timelines.json"
    path.write_text(json.dumps(timeline_files.to_dict([dataclasses.replace(step, source="measured")])))
    assert "one step, of 150 ms: there is no other one to predict from its costs" in _run(str(path))
    prediction = json.loads(_run(str(path), "--json"))["prediction"]
    assert [prediction[name] for name in ("fitted_steps", "tested_steps", "error", "speed")] == [1, 0, None, None]


def _with_late_weights(schedule: pl.Schedule) -> pl.Schedule:
    """The same with each W directly behind its I, so that nothing fills the bubbles."""
    programs = []
    for program in schedule.programs:
        kept = [cell for cell in program if cell.kind != "W"]
        programs.append(
            [part for cell in kept for part in ((cell, cell._replace(kind="W")) if cell.kind == "I" else (cell,))]
        )
    return pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches, name="plain")
