"""What a run prints about its ranks at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipeloom.config import Layout, load_layout
from pipeloom.config.layout import STAGE_WORDS
from pipeloom.measure.build import build_pipeline
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report import tables


def lines_of(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The table of a layout whose ranks each hold 1,234,567 parameters and 5 MiB of state."""
    everyone = [[1_234_567.0, 5.0 * 2**20]] * layout.mesh.world
    monkeypatch.setattr(tables, "gather", lambda pipeline, values: everyone)
    nothing: Any = type("Nothing", (), {"named_parameters": lambda self: [], "state_bytes": 0})()
    return tables.what_ranks_hold(layout, nothing, nothing)


def layout_of(axes: Sequence[int], **more: Any) -> Layout:
    pp, dp, tp = axes
    sizes = {
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.tp": tp,
        "schedule.chunks": 2,
        "train.global_batch_size": 32,
    }
    return load_layout("tiny", {"schedule.name": "interleaved", "schedule.microbatches": 4, **sizes, **more})


def test_one_row_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(layout_of((2, 2, 2)), monkeypatch)
    assert lines[0].split() == ["rank", "pp", "dp", "tp", "parameters", "optimizer", "in", "flight", "layers"]
    assert lines[6].split(maxsplit=9) == ["5", "1", "0", "1", "1.23", "M", "5", "MiB", "3", "1 | 3 L"]
    assert len(lines) == 10
    assert len({len(line.rpartition("MiB")[0]) for line in lines[1:9]}) == 1, "columns are aligned"


def test_axes_of_one_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(load_layout("tiny", {"parallel.pp": 1, "schedule.name": "gpipe"}), monkeypatch)
    assert lines[0].split() == ["rank", "parameters", "optimizer", "in", "flight", "layers"]


def test_of_many_ranks_one_pipeline_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(layout_of((2, 8, 2)), monkeypatch)
    assert [line.split()[0] for line in lines[1:3]] == ["0", "16"]
    assert lines[3:] == ["and 30 more ranks, which differ in dp and tp", STAGE_WORDS]


def test_a_real_rank() -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "gpipe"})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    optimizer = Optimizer(list(pipeline.named_parameters()), layout.config.optimizer)
    parameters = sum(parameter.numel() for parameter in pipeline.parameters())
    _, line, _ = tables.what_ranks_hold(layout, pipeline, optimizer)
    state = f"{8 * parameters / 2**10:.0f}"
    assert line.split() == ["0", f"{parameters / 1000:.3g}", "k", state, "KiB", "5", "E", "0-3", "L"]
    pipeline.close()
