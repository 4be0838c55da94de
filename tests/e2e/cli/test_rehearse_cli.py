"""`pipeloom rehearse`: real processes whose computation is emulated, and refusals before any of them starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipeloom as pl
from commands import pipeloom
from pipeloom.schedule.segments import segment_costs
from pipeloom.traces.segment_times import read_segments

SIZES = "--ranks 2 --microbatches 4"


def test_coupled_sends_with_a_slow_link() -> None:
    words = f"rehearse 1f1b {SIZES} --sends coupled --p2p 2 --unit 0.01 --steps 2 --json"
    done = pipeloom(*words.split())
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)["rehearsal"]
    coupled = pl.simulate(pl.schedules.one_f_one_b(2, 4), pl.Costs(p2p=2, sends="coupled")).makespan
    assert about["simulated"] == pytest.approx(coupled * 0.01)
    assert about["rehearsed"] >= 0.98 * about["simulated"]


def test_segments_in_chunks_are_rehearsed_as_they_are_simulated(tmp_path: Path) -> None:
    """A stage of two layers: its forward is that of `schedule --segments`, whose chunks hide a part of the all-to-all."""
    layer = {"layers": 2, "attention": [1, 1, 1], "experts": [2, 2, 2], "dispatch": 2, "combine": 2, "inside": 0.5}
    simulated = []
    for chunks in (1, 4):
        file = tmp_path / "segments.json"
        file.write_text(json.dumps(layer | {"chunks": chunks}))
        words = f"rehearse 1f1b {SIZES} --segments {file} --unit 0.005 --steps 2 --json"
        done = pipeloom(*words.split())
        assert done.returncode == 0, done.stderr
        about = json.loads(done.stdout)["rehearsal"]
        simulated.append(about["simulated"])
        assert about["rehearsed"] >= 0.98 * about["simulated"]
        costs = segment_costs([read_segments(str(file))["segments"]])
        assert about["simulated"] == pytest.approx(0.005 * pl.simulate(pl.schedules.one_f_one_b(2, 4), costs).makespan)
    assert simulated[1] < 0.8 * simulated[0]


def test_a_slow_stage_is_measured_named_and_drawn(tmp_path: Path) -> None:
    """Three processes, the second of them three times as slow as its costs say."""
    page = tmp_path / "page.html"
    words = f"rehearse 1f1b --ranks 3 --microbatches 4 --unit 0.02 --steps 3 --slow 1=3 --json --html {page}"
    done = pipeloom(*words.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 3
    about = found["rehearsal"]
    assert about["unit"] == 0.02
    assert about["message"] == 65536
    assert about["simulated"] == pytest.approx(18 * 0.02)
    times = (1, 3, 1)
    slowed = pl.simulate(pl.schedules.one_f_one_b(3, 4), pl.Costs(times, times, times)).makespan
    assert about["rehearsed"] >= 0.98 * slowed * 0.02
    assert about["error"] == pytest.approx(about["rehearsed"] / about["simulated"] - 1)
    assert [slow["stage"] for slow in found["slow_stages"]] == [1]
    panes = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])["panes"]
    assert [pane["source"] for pane in panes] == ["measured", "simulated"]
    assert f"wrote {page}" in done.stderr
