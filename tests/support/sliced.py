"""Schedules whose sequences are cut into slices, for the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pipeloom as pl
from pipeloom.schedule.actions import Cell, Pair
from pipeloom.schedule.model import Schedule


def sliced(schedule: pl.Schedule, slices: int) -> pl.Schedule:
    """The schedule with every forward as `slices` forwards, and every backward as so many in reverse; pairs slice by slice."""

    def cells(cell: Cell) -> Iterator[Cell]:
        for at in range(slices):
            if isinstance(cell, Pair):
                backward = cell.backward._replace(slice=slices - 1 - at)
                yield cell._replace(forward=cell.forward._replace(slice=at), backward=backward)
            else:
                yield cell._replace(slice=at if cell.kind == "F" else slices - 1 - at)

    programs = [[each for cell in program for each in cells(cell)] for program in schedule.programs]
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        name=schedule.name,
        routes=schedule.routes,
        route_of=schedule.route_of,
        slices=slices,
    )
