"""Operators that torch.profiler records lie inside our own actions, rank by rank, in one file."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch
from test_loop import train

from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train.report.profile import OperatorProfile
from pipeloom.train.report.verify import make_batch


def test_the_longest_operators_stay_and_the_profiler_does_not(tmp_path: Path) -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "gpipe"})
    pipeline, batch = build_pipeline(layout, torch.device("cpu")), make_batch(layout)
    profile = OperatorProfile(pipeline, 2, 3, tmp_path, most=5)
    gc.collect()
    lines = []
    gc.disable()  # only an explicit collection takes a reference cycle away
    try:
        for step in (1, 2, 3, 4):
            profile.before_step(step)
            pipeline.step(batch.tokens, batch.targets)
            lines += profile.after_step(step)
        left = [item for item in gc.get_objects() if type(item) is torch.profiler.profile]
    finally:
        gc.enable()
    assert not left
    assert lines[0].startswith(f"profile: {profile.path}")
    assert len(lines) == 2
    assert lines[1].startswith("profile: the shortest ")
    slices = [event for event in json.loads(profile.path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in slices if event["tid"] == 0} == {2, 3}
    assert len([event for event in slices if event["tid"] > 1]) == 5


def test_operators_lie_inside_the_actions_that_ran_them(tmp_path: Path) -> None:
    done = train(tmp_path, "--train.steps", "4", "--train.profile_from", "2", "--train.profile_steps", "2")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "runs").glob("*/profile.json")
    assert f"profile: {file}" in " ".join(done.stdout.split())
    assert "USDT" not in done.stdout + done.stderr
    assert list(file.parent.glob("profile.*")) == [file]
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    actions = [event for event in slices if event["tid"] == 0]
    assert {event["args"]["step"] for event in actions} == {2, 3}
    for rank in (0, 1):
        spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in actions if e["pid"] == rank]
        products = [e for e in slices if e["pid"] == rank and e["name"] in ("aten::addmm", "aten::mm")]
        assert products
        for event in products:
            middle = event["ts"] + event["dur"] / 2
            assert any(start <= middle <= end for start, end, _ in spans), event
        for start, end, name in spans:  # and no action is without
            assert any(start <= e["ts"] and e["ts"] + e["dur"] <= end for e in products), (start, name)
    numbers = [event["id"] for event in events if event["ph"] == "s"]
    assert len(numbers) == len(set(numbers)) > 0
