"""Traces of torch's own schedules, whose profiler names no action: stages and micro-batches from sends and receives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile

import pipeloom as pl
from pipeloom.errors import UsageError
from pipeloom.traces import chrome
from processes import run_ranks

RANKS, MICROBATCHES = 3, 5


def traced(rank: int, name: str, folder: Path) -> None:
    """Write the trace of two steps of a schedule of torch."""
    layer = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    chunks = 2 if name == "ScheduleInterleaved1F1B" else 1
    stages = [
        pipelining.PipelineStage(layer, rank + at * RANKS, RANKS * chunks, torch.device("cpu")) for at in range(chunks)
    ]
    count = MICROBATCHES + 1 if chunks > 1 else MICROBATCHES  # a multiple of the ranks
    schedule: Any = getattr(pipelining, name)(
        stages if chunks > 1 else stages[0], n_microbatches=count, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    x, y = torch.randn(2, 16 * count, 64)

    def step() -> None:
        optimizer.zero_grad()
        arguments = {"target": y, "losses": []} if rank == RANKS - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **arguments)
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(3):
            step()
    profiled.export_chrome_trace(str(folder / f"rank{rank}.json"))


def test_the_schedule_of_torch_s_1f1b_is_found(tmp_path: Path) -> None:
    run_ranks(traced, RANKS, "Schedule1F1B", tmp_path)
    found = chrome.read(tmp_path)
    assert found.timelines  # under load a step at an end of the profile may lack an event
    for timeline in found.timelines:
        assert timeline.schedule.programs == pl.schedules.one_f_one_b(RANKS, MICROBATCHES).programs
        assert 0 < timeline.makespan < 600  # seconds
        assert all(0 < busy < timeline.makespan for busy in timeline.busy)
    assert "inferred from sends, receives" in found.notes[0]
    (tmp_path / "rank0.json").unlink()
    for path, count in ((tmp_path / "rank1.json", 1), (tmp_path, 2)):
        with pytest.raises(UsageError, match=f"{path} holds the traces of {count} of 3 processes; give a folder"):
            chrome.read(path)


def test_a_schedule_with_several_stages_per_rank_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    run_ranks(traced, RANKS, "ScheduleInterleaved1F1B", tmp_path)
    for file in tmp_path.iterdir():  # torch names these actions
        trace = json.loads(file.read_text())
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") != "user_annotation"]
        file.write_text(json.dumps(trace))
    with pytest.raises(UsageError, match=r"sends, which are not those of one stage per rank.*record_function\(f\"PP:"):
        chrome.read(tmp_path)


def test_a_trace_of_a_gpu_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    """The host's operators do not tell when a GPU ran them, without the launches of its kernels."""
    for rank in range(2):
        events = [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 1.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0},
        ]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(UsageError, match=r"ran on a GPU.*record_function"):
        chrome.read(tmp_path)
