"""Our schedules, written as CSV, train through torch's own pipeline runtime to the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import pipeloom as pl
from models import batch, blocks, serial, worst
from processes import run_ranks
from torch_runtime import TorchPipeline

S = pl.schedules
SCHEDULES = [
    S.gpipe(2, 4),
    S.one_f_one_b(2, 4),
    S.interleaved(2, 4, 2),
    S.interleaved(2, 4, 2, group_size=4),
    S.looped_bfs(2, 4, 2),
    *(S.build(name, 2, 4) for name in ("zb-h1", "interleaved-zb", "zbv", "v-half", "dualpipev")),
]


SHARDED = [
    S.transformed(S.interleaved(2, 4, 2), ["shard-for-torch=2", "offload"]),
    S.transformed(S.build("zbv", 2, 4), ["shard-for-torch=2"]),
]


def work(rank: int, folder: Path) -> list[dict[str, Any]]:
    reports = []
    for schedule in SCHEDULES:
        layers = blocks(schedule.stages)
        pipeline = TorchPipeline(rank, layers, schedule, folder)
        x, y = batch(8)
        losses = pipeline.step(x, y)
        want_loss, want = serial(layers, x, y, [2] * 4)
        got = pipeline.gradients()
        own = {f"block{stage}" for stage in schedule.stages_of[rank]}
        reports.append(
            {
                "worst": worst(got, {name: grad for name, grad in want.items() if name.partition(".")[0] in own}),
                "parameters": len(got),
                "loss": (sum(losses) / 4, want_loss.item()) if losses else None,
            }
        )
    return reports


@pytest.mark.torch_behaviour
def test_torch_trains_our_csv_to_serial_gradients(tmp_path: Path) -> None:
    everyone = run_ranks(work, 2, tmp_path)
    for at, schedule in enumerate(SCHEDULES):
        reports = [ranks[at] for ranks in everyone]
        assert sum(report["parameters"] for report in reports) == 4 * schedule.stages
        assert all(report["worst"] <= 1e-6 for report in reports), (schedule, reports)
        (loss,) = [report["loss"] for report in reports if report["loss"]]
        assert loss[0] == pytest.approx(loss[1], rel=1e-6)


def sharded(rank: int, folder: Path) -> list[tuple[float, int]]:
    """The worst error of the gathered gradients against one process, and their number, under each schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mine = slice(8 * mesh["dp"].get_local_rank(), 8 * mesh["dp"].get_local_rank() + 8)
    reports = []
    for schedule in SHARDED:
        layers = blocks(schedule.stages)
        pipeline = TorchPipeline(rank, layers, schedule, folder, mesh=mesh)
        x, y = batch(16)
        pipeline.step(x[mine], y[mine])
        _, want = serial(layers, x, y, [2] * 8)
        got = pipeline.gradients()
        reports.append((worst(got, {name: want[name] for name in got}), len(got)))
    return reports


@pytest.mark.torch_behaviour
def test_torch_trains_our_gathers_and_reductions_with_fsdp2(tmp_path: Path) -> None:
    """2 x 2 processes; each rank has two stages of four parameters. Copies to the host are left out of the file."""
    for reports in run_ranks(sharded, 4, tmp_path):
        assert [count for _, count in reports] == [8, 8]
        assert max(error for error, _ in reports) <= 1e-6
