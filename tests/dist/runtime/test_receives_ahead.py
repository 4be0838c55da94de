"""Receives that are posted before the present action computes: in the program, and on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from models import Block, batch, mse
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.program import lower
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules


def ahead(schedule: pl.Schedule, rank: int, **options: Any) -> int:
    """How many receives of the rank's program are posted before an action earlier than the one that waits for them."""
    count, posted = 0, set()
    for step in lower(schedule, rank, RuntimeOptions(**options)).instructions:
        posted |= set(step.post_receives)
        waited = set(step.receives)
        assert waited <= posted  # each is posted in time
        count += len(posted - waited)
        posted -= waited
    return count


@pytest.mark.parametrize(
    "schedule", [S.one_f_one_b(3, 6), S.zb_h1(3, 6), S.interleaved(3, 6, 2), S.zbv(3, 6)], ids=repr
)
def test_programs_post_receives_ahead_unless_told_not_to(schedule: pl.Schedule) -> None:
    for rank in range(schedule.ranks):
        assert ahead(schedule, rank, transport="individual") > 0
        assert ahead(schedule, rank, transport="individual", overlap_p2p=True) > 0
        assert ahead(schedule, rank, transport="auto") > 0
        assert ahead(schedule, rank, transport="individual", overlap_p2p=False) == 0


def order_on_the_wire(rank: int, overlap_p2p: bool | None) -> list[str]:
    """What the rank does in its second step: receives it posts, and forwards of its first layer."""
    events: list[str] = []

    class Notes(Block):
        def forward(self, x: Tensor) -> Tensor:
            events.append("forward")
            return super().forward(x)

    receive = dist.ProcessGroup.recv

    def noted(group: dist.ProcessGroup, tensors: list[Tensor], source: int, tag: int) -> Any:
        events.append("receive")
        return receive(group, tensors, source, tag)

    dist.ProcessGroup.recv = noted  # type: ignore[assignment,method-assign]
    options = RuntimeOptions(transport="individual", overlap_p2p=overlap_p2p, monitor=False)
    layers = [Layer("first", lambda: Block(0)), Layer("notes", lambda: Notes(1))]
    pipeline = Pipeline(layers, S.gpipe(2, 4), loss=mse, options=options)
    pipeline.step(*batch(8))
    events.clear()
    pipeline.step(*batch(8))
    pipeline.close()
    return events


@pytest.mark.parametrize("overlap_p2p", [None, True, False])
def test_receives_on_the_wire(overlap_p2p: bool | None) -> None:
    """Shapes are known in the second step, so that the next receive can be open while a forward computes.

    Rank 1 of GPipe receives its activations, one tensor each, in their order.
    """
    _, events = run_ranks(order_on_the_wire, 2, overlap_p2p)
    first = events.index("forward")
    assert events.count("receive") == 4
    assert events[:first] == ["receive"] * (1 if overlap_p2p is False else 2)
