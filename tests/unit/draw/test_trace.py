"""The trace: Chrome's format, a process a rank, times and args of every action."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import pipeloom as pl
from paths import DATA
from pipeloom.draw import trace
from pipeloom.schedule.files import load

GOLDEN = DATA / "torch"


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
    assert slices[0]["args"] == {"stage": 0, "chunk": 0, "micro-batch": 0, "phase": "warm-up", "entry": 0}
    assert slices[0]["cat"] == "forward"
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"rank {rank} (stages {rank}, {rank + 4})" for rank in range(4)]


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


def test_an_arrow_for_each_message_joins_the_slices_that_make_and_need_it() -> None:
    timeline = pl.simulate(pl.schedules.interleaved(ranks=2, microbatches=3), pl.Costs(p2p=0.5))
    events = trace(timeline, 1.0)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) == len(ends) == 2 * 3 * 3  # three boundaries between ranks, there and back, three micro-batches
    slices = [event for event in events if event["ph"] == "X"]

    def at(event: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            one for one in slices if one["pid"] == event["pid"] and one["ts"] < event["ts"] < one["ts"] + one["dur"]
        ]
        return found

    for number, begin in begins.items():
        made, needed = at(begin), at(ends[number])
        assert made["args"]["micro-batch"] == needed["args"]["micro-batch"]
        step = 1 if begin["name"] == "activation" else -1
        assert needed["args"]["stage"] == made["args"]["stage"] + step
        assert made["ts"] + made["dur"] + 0.5 <= needed["ts"] + 1e-9


def test_all_to_all_has_a_thread_of_its_own() -> None:
    timeline = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=2), pl.Costs(all_to_all=0.25))
    events = [event for event in trace(timeline, 1.0)["traceEvents"] if event.get("tid") == 1]
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event["pid"] == 0][:2] == [
        ("all-to-all of 0F0", 0.0, 0.25),
        ("all-to-all of 0F1", 1.0, 0.25),
    ]
    assert len(events) == 8


def test_bytes_are_a_counter_for_each_pool() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(1, 1), pl.Costs(bytes={"saved": 4.0, "params": 2.0}))
    counters = [event for event in trace(timeline)["traceEvents"] if event["name"] == "bytes in device"]
    assert [(event["ts"], event["args"]["bytes"]) for event in counters] == [(0, 2), (0, 6), (3000, 2)]
