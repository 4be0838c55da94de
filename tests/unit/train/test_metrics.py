"""The log line, the run's folder, and what is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from pipeloom import Costs, schedules, simulate
from pipeloom.config import load, load_layout
from pipeloom.errors import ConfigError
from pipeloom.traces import timelines as timeline_files
from pipeloom.train.hub.generate import printable
from pipeloom.train.report.metrics import (
    StepMetrics,
    memory_history,
    model_flops_utilization,
    shared_cores,
    simulated,
)
from pipeloom.train.report.report import Report, typical

FIGURES = StepMetrics(
    step=10,
    loss=2.34567,
    grad_norm=0.5,
    lr=1e-3,
    step_time=0.5,
    tps=8192.0,
    memory=2**29,
    mfu=None,
    bubble_rate=0.4,
    bubble_rate_simulated=0.25,
)
CPU = torch.device("cpu")


def test_a_step_is_a_row_of_a_narrow_table() -> None:
    """Rows of different steps have the same columns; the bubble is one figure, by its name."""
    head, row = FIGURES.lines(20000)
    assert head.split("  ")[-1] == "bubble rate"
    assert row.split() == ["10/20000", "2.3457", "0.5", "1.00e-03", "0.50", "GiB", "8,192", "40%"]
    later = dataclasses.replace(FIGURES, step=20000, tps=123456.0, memory=71.3 * 2**30, grad_norm=12.3456, mfu=0.415)
    assert [len(line) for line in (head, row, *later.lines(20000))] == [72, 72, 79, 79]
    assert later.lines(20000)[1].endswith(" 41.5%")
    experts = dataclasses.replace(FIGURES, expert_load=1.254, expert_drops=0.031)
    assert experts.lines(20000)[2] == "  experts: the busiest has 1.25x the mean, 3.1% are dropped"
    waits = dataclasses.replace(experts, all_to_all=0.0124).lines(20000)
    assert waits[2] == f"{experts.lines(20000)[2]}; all-to-all: 0.012 s exposed"


def test_the_head_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, row = FIGURES.lines(4)
    with Report(load("tiny", {"log.dir": str(tmp_path)})) as report:
        for _ in range(22):
            report.step(FIGURES)
    assert capsys.readouterr().out.splitlines() == [head, *[row] * 20, head, *[row] * 2]


def test_a_measured_step_is_simulated_with_its_own_costs() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    timeline = simulate(schedule, Costs(forward=(1.0, 2.0)))
    assert simulated(timeline).makespan == timeline.makespan


def test_the_typical_trace_is_the_median_of_all_but_the_first() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    traces = [simulate(schedule, Costs(forward=cost)) for cost in (50, 3, 1, 2)]
    assert typical(traces) is traces[3]
    assert typical(traces[:1]) is traces[0]


def test_utilization_is_known_where_the_peak_is() -> None:
    assert model_flops_utilization(load("tiny"), 1.0, CPU, 2) is None


def test_shared_cores_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert shared_cores(4, CPU) == "4 ranks on 2 cores"
    assert shared_cores(2, CPU) == ""
    assert shared_cores(4, torch.device("cuda", 0)) == ""


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = load("tiny", {"log.dir": str(tmp_path / "runs"), "schedule.name": "examples.mine:make"})
    folders = []
    for _ in range(3):
        with Report(config) as report:
            folders.append(report.folder.root)
    assert len(set(folders)) == 3
    assert folders[0].name.endswith("examples.mine-make")
    assert load(folders[0] / "config.toml") == config


def test_a_folder_that_cannot_be_made_is_refused_by_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log\.dir"):
        Report(load("tiny", {"log.dir": str(tmp_path / "file" / "runs")}))


def test_the_log_keeps_every_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = simulate(schedules.interleaved(ranks=2, chunks=2, microbatches=5))
    measured = dataclasses.replace(timeline, source="measured")
    loss = torch.tensor(2.0).sqrt().item()
    with Report(load("tiny", {"log.dir": str(tmp_path)})) as report:
        report.record("step", step=1, loss=loss)
        report.advance()
        report.step(FIGURES)
        report.draw(measured, [measured])
    first, second = map(json.loads, report.folder.log.read_text().splitlines())
    assert first == {"event": "step", "step": 1, "loss": loss}
    assert second == {"event": "figures", **dataclasses.asdict(FIGURES)}
    events = json.loads(report.folder.trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == timeline.schedule.actions
    svg = ElementTree.fromstring(report.folder.svg.read_text())
    assert svg.tag.endswith("svg")
    assert "measured" in report.folder.svg.read_text()
    assert timeline_files.load(report.folder.timelines) == (measured,)
    assert "pipeloom.page/1" in report.folder.page.read_text()


def test_the_page_of_a_run_has_its_losses_and_a_row_for_what_was_predicted(tmp_path: Path) -> None:
    measured = dataclasses.replace(simulate(schedules.gpipe(ranks=2, microbatches=2)), source="measured")
    predicted = dataclasses.replace(measured, source="predicted")
    with Report(load("tiny", {"log.dir": str(tmp_path)})) as report:
        for step in (1, 2):
            report.record("step", step=step, loss=5.0 / step)
        report.draw(measured, [measured], [predicted])
    page = report.folder.page.read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [pane["source"] for pane in data["panes"]] == ["measured", "simulated"]
    assert [row["heading"].split(":")[0] for row in data["rows"]] == ["predicted"]
    assert "<title>of each step: 2.5 at 2</title>" in page


def test_the_page_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    measured = dataclasses.replace(simulate(schedules.gpipe(ranks=2, microbatches=2)), source="measured")
    with Report(load("tiny", {"log.dir": str(tmp_path), "log.html": str(tmp_path / "page.html")})) as report:
        report.draw(measured, [measured])
    assert (tmp_path / "page.html").is_file()
    assert not report.folder.page.exists()
    with pytest.raises(ConfigError, match=r"log\.html = .*no folder"):
        load_layout("tiny", {"log.html": str(tmp_path / "none" / "page.html")})


def test_a_sample_without_spaces_is_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(load("tiny", {"log.dir": str(tmp_path)})) as report:
        report.conclude((), (1.0, 1.0, 1), "byte", "x" * 200 + "\n\n  y", "")
    written = capsys.readouterr().out.partition("sample:\n")[2].splitlines()
    assert [len(line) for line in written[:3]] == [80, 80, 52]
    assert written[3:5] == ["  | ", "  |   y"]


def test_a_sample_cannot_steer_the_terminal() -> None:
    assert printable("def f():\n\treturn '\x1b[2J\r\x00ä'") == "def f():\n\treturn '\ufffd[2J\ufffd\ufffdä'"


@pytest.mark.parametrize("fails", [True, False])
def test_a_memory_snapshot_is_written_also_if_memory_runs_out(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **keys: calls.append(keys))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: calls.append(path))
    file = tmp_path / "run" / "memory_0.pickle"
    with contextlib.suppress(torch.OutOfMemoryError), memory_history(file):
        assert len(calls) == 1
        if fails:
            raise torch.OutOfMemoryError
    assert calls[1:] == [str(file), {"enabled": None}]
    with memory_history(None):
        pass
    assert len(calls) == 3
