"""Hanayo (Liu et al., arXiv 2308.15762): wave-like pipelines."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.construct.layout import encoded, family, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import PriorityRule, programs_of, single_route
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee
from pipeloom.schedule.simulate import simulate

# Largest S m for which two limits on the micro-batches alive are tried, which takes twice as long.
MOST_TASKS_WITH_CAPS = 4_000


@family("hanayo", placement="vee", order=160)
def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """One route that runs down and up the ranks `waves` times: 2 · waves chunks per rank, and no hop at the turns.

    Constructed with B = 2f: a ready backward first, else the forward at the latest position. For more than p micro-batches also
    with forwards and backwards in turn, and for small schedules with fewer alive; the shortest is returned. Idle of the worst
    rank at B = 2f, one wave and p = m = 4: 12f of a stage (1F1B on the same stages: 18f). Peak activations: m 2 waves for
    m <= p, and at most 4 p waves. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches, waves=waves)
    placement = vee(ranks, 2 * waves)
    turns = (False,) if microbatches <= ranks else (False, True)
    small = len(placement) * microbatches <= MOST_TASKS_WITH_CAPS
    caps = (2 * ranks, 3 * ranks // 2) if microbatches > ranks and small else (2 * ranks,)
    schedules = []
    for turn, cap in product(turns, caps):
        problem = single_route(placement, microbatches, Costs(), [math.inf] * ranks, [cap] * len(placement))
        programs = programs_of(replace(problem, fused=True), PriorityRule(turns=turn))
        schedules.append(
            Schedule.of(
                encoded(programs, len(placement), microbatches),
                placement=placement,
                microbatches=microbatches,
                name="hanayo",
                options={"waves": waves},
            )
        )
    return min(schedules, key=lambda schedule: simulate(schedule).makespan)
