"""Coupled sends: the messages between two computations move in one call, which holds both of their ends."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import Block, batch, gradients, mse, serial, worst
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.pipeline import couple_sends
from pipeloom.schedule.channels import traffic
from processes import run_ranks

S = pl.schedules
OPTIONS = {"transport": "individual", "overlap_p2p": False}
SCHEDULES = [S.one_f_one_b(3, 5), S.zb_h1(3, 5), S.gpipe(3, 5)]


def coupled_step(rank: int, schedule: pl.Schedule) -> tuple[float, dict[str, Any], list[list[Any]], int]:
    """Loss, gradients, the messages of each call of a second step, and how many calls of torch it made."""
    pipeline = Pipeline(
        [Layer(f"blocks.{i}", partial(Block, i)) for i in range(schedule.stages)],
        schedule,
        loss=mse,
        options=RuntimeOptions(seed=0, **OPTIONS),
    )
    moved: list[list[Any]] = []
    couple_sends(pipeline, lambda times: moved.append(sorted(times)))
    calls = 0
    together = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        nonlocal calls
        calls += 1
        return together(operations)

    dist.batch_isend_irecv = counted
    pipeline.step(*batch(5))  # shapes travel with this one's messages
    for parameter in pipeline.parameters():
        parameter.grad = None
    moved.clear()
    calls = 0
    loss = pipeline.step(*batch(5))
    found = {name: gradient.numpy() for name, gradient in gradients(pipeline).items()}
    pipeline.close()
    return float(loss), found, moved, calls


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_each_gap_between_computations_is_one_call(schedule: pl.Schedule) -> None:
    layers = [Layer(f"blocks.{i}", partial(Block, i)) for i in range(schedule.stages)]
    want_loss, want = serial(layers, *batch(5), [1] * 5)
    programs, all_found = traffic(schedule), dict[str, Any]()
    for rank, (loss, found, moved, calls) in enumerate(run_ranks(coupled_step, 3, schedule)):
        assert loss == pytest.approx(float(want_loss))
        all_found |= found
        gaps = zip((None, *programs[rank]), (*programs[rank], None), strict=True)
        both = [[*(last.sends if last else ()), *(following.receives if following else ())] for last, following in gaps]
        assert moved == [sorted(messages) for messages in both if messages]
        assert calls == len(moved)
    assert worst({name: torch.from_numpy(gradient) for name, gradient in all_found.items()}, want) <= 1e-5


class Marking(nn.Module):
    """Leaves a file as each of its forwards ends, or notes which files are there as each begins."""

    def __init__(self, folder: Path, marks: bool) -> None:
        super().__init__()
        self.folder, self.marks, self.count = folder, marks, 0
        self.there: list[list[str]] = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.there.append(sorted(path.name for path in self.folder.iterdir()))
        if self.marks:
            time.sleep(0.1)
            (self.folder / str(self.count)).touch()
            self.count += 1
        return x * self.scale


def files_at_forwards(rank: int, folder: Path) -> list[list[str]]:
    layers = [Marking(folder, marks=at == 1) for at in range(2)]
    options = RuntimeOptions(**OPTIONS)
    pipeline = Pipeline([lambda at=at: layers[at] for at in range(2)], S.gpipe(2, 4), loss=mse, options=options)
    couple_sends(pipeline, lambda times: None)
    pipeline.step(torch.randn(8, 3), torch.randn(8, 3))
    pipeline.close()
    return layers[rank].there


def test_a_sender_is_held_where_its_partner_arrives_late(tmp_path: Path) -> None:
    """Rank 0 begins F2 once rank 1 has reached the call that receives F1, behind its own F0; and so on."""
    there = run_ranks(files_at_forwards, 2, tmp_path)[0]
    assert [set(names) >= {str(each) for each in range(at - 1)} for at, names in enumerate(there)] == [True] * 4
