"""The baseline of a searched schedule: a family made for the placement that fits the memory, else list scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import ArgumentError, UsageError
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.families import BASELINES, build
from pipeloom.schedule.families.greedy import MemoryDeadlock, PriorityRule, programs_of, single_route
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import name_of
from pipeloom.schedule.simulate import simulate


def baseline_memory(placement: Sequence[int], ranks: int, microbatches: int) -> tuple[float, str]:
    """Return (stage-micro-batches, family): the peak of the placement's first family, on its fullest rank.

    Without such a family, the peak of 1F1B: p micro-batches in every stage of a rank.
    """
    for schedule in _families(placement, (ranks, microbatches), None):
        return float(max(simulate(schedule).peak_activations)), schedule.name
    return float(ranks * max(placement.count(rank) for rank in range(ranks))), "1f1b"


def baseline(
    placement: Sequence[int], ranks: int, microbatches: int, memory: float, costs: Costs | None = None
) -> Schedule:
    """Return the placement's first family that fits the memory, else a list schedule.

    Args:
        memory: the largest peak memory of a rank, in units of `Costs.activation`.
        costs: of a stage, for the families that plan with them.

    Raises:
        ArgumentError: nothing fits the memory.
    """
    known = costs if costs is not None else Costs()
    for schedule in _families(placement, (ranks, microbatches), costs):
        if max(simulate(schedule, known).peak_memory) <= memory + TIME_TOLERANCE:
            return schedule
    for late in (True, False):
        # Every stage may hold its share of the memory, so that list scheduling cannot get stuck.
        caps = [max(1.0, memory // placement.count(rank)) for rank in placement]
        problem = single_route(placement, microbatches, known, [memory] * ranks, caps)
        try:
            programs = programs_of(problem, PriorityRule(late=late))
        except MemoryDeadlock:
            continue
        cells = [[f"{stage}{kind}{mb}" for kind, stage, mb in program] for program in programs]
        return Schedule.of(cells, placement=placement, microbatches=microbatches, name="list scheduling")
    raise ArgumentError("memory", f" is {memory:g}; no schedule was found that fits it; give more")


def _families(placement: Sequence[int], sizes: tuple[int, int], costs: Costs | None) -> list[Schedule]:
    kind, schedules = name_of(placement, sizes[0]), []
    for name in BASELINES.get(kind, ()):
        chunks = len(placement) // sizes[0] if kind == "loop" else None
        try:
            schedule = build(name, *sizes, chunks, {}, costs)
        except UsageError:  # sizes that this family refuses
            continue
        if schedule.placement == tuple(placement):
            schedules.append(schedule)
    return schedules
