"""Weight gradients that gain nothing by waiting: I and W of a micro-batch become one B, where that makes nothing longer.

A B is cheaper than I and W apart (`Costs.backward`), and frees its memory earlier; but the stage before gets its gradient later.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.actions import Action
from pipeloom.schedule.model import parts
from pipeloom.solver.engine import value_of
from pipeloom.solver.problem import EPS, Objective

WORK = 2_000_000  # actions simulated; beyond that what is left stays as it is
Backward = tuple[int, int, int]  # rank, stage, micro-batch


def fuse(schedule: Schedule, costs: Costs, objective: Objective = "makespan") -> Schedule:
    """`schedule` with as many of its split backwards written as one B, at the I's place, as make the objective no longer.

    Groups are tried whole, then halved, in the order of the programs. Pairs are taken apart.
    """
    schedule = with_whole(schedule, ())
    split = [
        (rank, action.stage, action.microbatch)
        for rank, program in enumerate(schedule.programs)
        for cell in program
        for action in parts(cell)
        if action.kind == "I"
    ]
    best, value = schedule, value_of(simulate(schedule, costs), objective)
    budget = WORK // max(1, schedule.actions)
    groups = [split] if split else []
    while groups and budget > 0:
        group = groups.pop()
        tried = with_whole(best, group)
        budget -= 1
        found = value_of(simulate(tried, costs), objective)
        if found <= value + EPS:
            best, value = tried, found
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return best


def with_whole(schedule: Schedule, backwards: Sequence[Backward]) -> Schedule:
    """`schedule` with these backwards as one B at the place of their I, and its pairs taken apart."""
    chosen = set(backwards)

    def cell_of(rank: int, action: Action) -> str | None:
        if action.kind not in "IW" or (rank, action.stage, action.microbatch) not in chosen:
            return str(action)
        return f"{action.stage}B{action.microbatch}" if action.kind == "I" else None

    programs = [
        [text for cell in program for action in parts(cell) if (text := cell_of(rank, action)) is not None]
        for rank, program in enumerate(schedule.programs)
    ]
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        name=schedule.name,
        options=dict(schedule.options),
        routes=schedule.routes,
        route_of=schedule.route_of,
    )
