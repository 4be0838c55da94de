"""Chimera (Li and Hoefler, arXiv 2107.06925) with two pipelines, one down and one up."""

from __future__ import annotations

import math

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.construct.layout import encoded, family, require_even, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import PriorityRule, SchedulingProblem, programs_of
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import simulate


@family("chimera", order=170)
def chimera(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two routes over the same ranks in opposite directions; rank k holds replicas of stages k and p-1-k.

    Micro-batches take the routes in turn. At most min(p-k, p/2) of them are alive in the k-th stage of a route, and a ready
    backward runs first. Idle of the worst rank with uniform stages and m = p: (p/2-1)(f+B) at f = B, 2(p-2)f at B = 2f. For
    m > p a second schedule has p-k alive, and forwards and backwards in turn; the shorter at `costs` (default 1, 1, 1, 0) is
    returned.
    Peak activations: at most p for m <= p, 3p/2 above; parameters twice. Needs even p; any m >= 1 (an odd one leaves the
    routes unequal).

    Raises:
        UsageError: odd p, with the nearest even ones.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    require_even("chimera", ranks)
    stages = 2 * ranks
    routes = (tuple(range(ranks)), tuple(range(ranks, stages)))
    placement = (*range(ranks), *reversed(range(ranks)))
    jobs = (range(0, microbatches, 2), range(1, microbatches, 2))
    equal, unit = Costs(forward=1.0, input_grad=0.5, weight_grad=0.5), Costs()
    ways = [(equal, [min(ranks - k, ranks // 2) for k in range(ranks)], False)]
    if microbatches > ranks:
        ways.append((unit, [ranks - k for k in range(ranks)], True))
    schedules = []
    for plan, caps, turns in ways:
        problem = SchedulingProblem(
            placement, routes, jobs, plan, (math.inf,) * ranks, tuple(map(float, caps)) * 2, fused=True
        )
        schedules.append(
            Schedule.of(
                encoded(programs_of(problem, PriorityRule(turns=turns)), stages, microbatches),
                placement=placement,
                microbatches=microbatches,
                name="chimera",
                routes=routes,
                route_of=[mb % 2 for mb in range(microbatches)],
            )
        )
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)
