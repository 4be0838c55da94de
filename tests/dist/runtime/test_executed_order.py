"""What is drawn is what runs: layers note every forward, input gradient and weight gradient, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import mse
from pipeloom.errors import PipeloomError
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.runtime import Layer, LocalPipeline
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.model import parts

Notes = list[tuple[str, int, int]]
TRANSFORMS = ("split-cooldown", "defer-last-stage-weights", "defer-last-stage-weights=2", "half-split=1")
CASES = [(2, 6, ""), (3, 7, ""), (4, 8, ""), *((2, 6, transform) for transform in TRANSFORMS)]


class Noted(torch.autograd.Function):
    """Notes F, and B or I and W, of one position and micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, notes: Notes, queue: WeightGradQueue | None, place: Any) -> Tensor:
        ctx.notes, ctx.queue, ctx.place = notes, queue, place
        notes.append(("F", *place))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        notes, place = ctx.notes, ctx.place
        if ctx.queue is None:
            notes.append(("B", *place))
        else:
            notes.append(("I", *place))
            ctx.queue.put(lambda: notes.append(("W", *place)))
        return gradients[0], torch.zeros(1), None, None, None


class NotingLayer(nn.Module):
    """The only layer of its position; it can put off its weight gradient, as linear layers do."""

    def __init__(self, position: int, notes: Notes) -> None:
        super().__init__()
        self.position, self.notes = position, notes
        self.weight = nn.Parameter(torch.ones(1))

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def forward(self, x: Tensor, microbatch: MicrobatchContext) -> Tensor:
        grad_context = getattr(self, "grad_context", None)
        queue = None if grad_context is None else grad_context.queue
        return Noted.apply(x, self.weight, self.notes, queue, (self.position, microbatch.index))  # type: ignore[no-any-return, no-untyped-call]


def layers(schedule: Schedule, notes: Notes) -> list[Layer]:
    return [Layer(str(at), lambda at=at: NotingLayer(at, notes)) for at in range(schedule.positions)]


def executed(schedule: Schedule, notes: Notes, rank: int) -> Notes:
    """The notes of this rank's stages, as (kind, stage, micro-batch)."""
    found = [(kind, schedule.routes[schedule.route_of[mb]][position], mb) for kind, position, mb in notes]
    return [note for note in found if schedule.placement[note[1]] == rank]


def drawn(schedule: Schedule, rank: int) -> Notes:
    return [action[:3] for cell in schedule.programs[rank] for action in parts(cell)]  # type: ignore[misc]


def built(name: str, ranks: int, microbatches: int, transform: str) -> Schedule:
    try:
        schedule = pl.schedules.build(name, ranks, microbatches)
    except PipeloomError as refused:
        pytest.skip(str(refused))
    return pl.schedules.transformed(schedule, [transform] if transform else [])


def data(microbatches: int) -> tuple[Tensor, Tensor]:
    return torch.randn(microbatches, 2), torch.randn(microbatches, 2)


@pytest.mark.parametrize(("ranks", "microbatches", "transform"), CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_as_it_is_drawn(name: str, ranks: int, microbatches: int, transform: str) -> None:
    schedule = built(name, ranks, microbatches, transform)
    notes: Notes = []
    pipeline = LocalPipeline(layers(schedule, notes), schedule, loss=mse)
    for _ in range(2):  # nothing is left over from a step
        notes.clear()
        pipeline.step(*data(microbatches))
        assert pipeline.schedule == pl.schedules.unpair(schedule)  # no layer has segments, so no pair overlaps
        for rank in range(ranks):
            assert executed(schedule, notes, rank) == drawn(pipeline.schedule, rank)
    notes.clear()
    pipeline.evaluate(*data(microbatches))
    for rank in range(ranks):
        assert executed(schedule, notes, rank) == [note for note in drawn(schedule, rank) if note[0] == "F"]
