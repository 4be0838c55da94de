"""The trace: Chrome's format, a process a rank, times and args of every action."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.draw import trace
from pipeloom.schedule.files import load

GOLDEN = Path(__file__).parents[1] / "data" / "torch"


def test_slices_are_the_actions() -> None:
    timeline = pl.simulate(pl.schedules.interleaved(ranks=4, microbatches=9))
    found = json.loads(json.dumps(trace(timeline)))
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == timeline.schedule.actions
    for rank in range(4):
        mine = [event for event in slices if event["pid"] == rank]
        assert [event["name"] for event in mine] == [str(cell) for cell in timeline.schedule.programs[rank]]
        assert [event["ts"] for event in mine] == [1000 * start for start in timeline.starts[rank]]
        assert sum(event["dur"] for event in mine) == 1000 * timeline.busy[rank]
    assert slices[0]["args"] == {"stage": 0, "chunk": 0, "micro-batch": 0, "phase": "warm-up"}
    assert slices[0]["cat"] == "forward"
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"rank {rank} (stages {rank}, {rank + 4})" for rank in range(4)]


def test_phases() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=3, microbatches=5))
    slices = [event for event in trace(timeline)["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    phases = [event["args"]["phase"] for event in slices]
    assert phases == ["warm-up"] * 3 + ["steady"] * 4 + ["cool-down"] * 3


def test_the_memory_counter_peaks_where_the_timeline_does() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=8), pl.Costs(activation=3.0))
    for rank in range(4):
        levels = [
            e["args"]["activations"] for e in trace(timeline)["traceEvents"] if e["ph"] == "C" and e["pid"] == rank
        ]
        assert max(levels) == timeline.peak_memory[rank]
        assert levels[-1] == 0


def test_pairs_name_both_parts() -> None:
    timeline = pl.simulate(load(GOLDEN / "dualpipev.csv"))
    pair = next(event for event in trace(timeline)["traceEvents"] if event.get("cat") == "pair")
    assert pair["name"] == "0F7|7B3"
    assert pair["args"]["stage"] == 0
    assert pair["args"]["backward_stage"] == 7
    assert pair["args"]["backward_micro-batch"] == 3


@pytest.mark.parametrize(("source", "unit"), [("simulated", 1e3), ("measured", 1e6)])
def test_the_unit_follows_the_source(source: str, unit: float) -> None:
    timeline = replace(pl.simulate(pl.schedules.gpipe(ranks=1, microbatches=1)), source=source)
    last = [event for event in trace(timeline)["traceEvents"] if event["ph"] == "X"][-1]
    assert last["ts"] == unit
    assert [e for e in trace(timeline, 5)["traceEvents"] if e["ph"] == "X"][-1]["dur"] == 10
