"""Schedules with pairs whose backward is split, and data for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeloom.schedule.actions import Pair
from pipeloom.schedule.model import Schedule, parts
from segmented import WIDTH


def rebuilt(schedule: Schedule, programs: list[list[Any]]) -> Schedule:
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        routes=schedule.routes,
        route_of=schedule.route_of,
    )


def split(schedule: Schedule) -> Schedule:
    """The schedule with every B as I and, right behind it or behind its pair, W."""

    def cells(cell: Any) -> list[Any]:
        last = parts(cell)[-1]
        if last.kind != "B":
            return [cell]
        gradient = last._replace(kind="I")
        return [Pair(cell.forward, gradient) if isinstance(cell, Pair) else gradient, last._replace(kind="W")]

    return rebuilt(schedule, [[new for cell in program for new in cells(cell)] for program in schedule.programs])


def data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, WIDTH, generator=generator), torch.randn(rows, 3, WIDTH, generator=generator)
