"""Shared construction of the V schedules: the best order of their building blocks for given costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.limits import MOST_PLANNED_CELLS
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.building_block import BuildingBlock, repeated_programs, sequences_of_block
from pipeloom.schedule.families.greedy import (
    MemoryDeadlock,
    Planned,
    PriorityRule,
    programs_along,
    programs_of,
    single_route,
)
from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.families.v_rounds import round_programs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Objective

FIT_SHARES = (0.5, 0.75, 1.0)
SHY = 1.05  # A W planned 5 % too long, with hops 10 % too long, is not placed in gaps that it would only just fit.
# Largest p m for which every rule of each kind is tried: p = 64, m = 256 then takes 5 s instead of 17.
MOST_CELLS_WITH_ALL_RULES = 1_500


def v_schedule(
    name: str,
    sizes: tuple[int, int],
    costs: Costs | None,
    blocks: Sequence[BuildingBlock],
    memory_limit: int,
    objective: Objective = "makespan",
    rounds: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The shortest schedule of `sizes` (p, m) at these costs with at most `memory_limit` stage-micro-batches on a rank.

    The building blocks give the order of F and I; the weight gradients are placed for the costs, in several ways. With `rounds`
    the programs of `round_programs` are candidates too, where p m is at most `MOST_CELLS_WITH_ALL_RULES`. The shortest has the
    least makespan, and of equal ones the least largest span; or, with `objective` "span", the other way round.
    """
    ranks, microbatches = sizes
    require_sizes(MOST_PLANNED_CELLS, ranks=ranks, microbatches=microbatches)
    cost_model = costs if costs is not None else Costs()
    placement = vee(ranks)
    counted = replace(cost_model, activation=1.0, held=1.0)
    many = ranks * microbatches > MOST_CELLS_WITH_ALL_RULES
    candidates: list[list[list[Planned]]] = []
    for block in blocks:
        repeated = repeated_programs(block, placement, microbatches, memory_limit)
        if repeated is not None:
            candidates.append(repeated)
        sequences = sequences_of_block(block, placement, microbatches, memory_limit)
        if sequences is None:
            continue
        for plan in _plans(counted)[: 1 if many else 3]:
            for patience in FIT_SHARES[-1 if many else 0 :]:
                try:
                    problem = single_route(placement, microbatches, plan, [memory_limit] * ranks)
                    candidates.append(programs_along(problem, sequences, patience))
                except MemoryDeadlock:
                    continue
    if cost_model != Costs() or not candidates:
        # One place is kept free for the second half of the V, without which the first could block it for ever.
        caps = [memory_limit - 1] * ranks + [memory_limit] * ranks
        problem = single_route(placement, microbatches, counted, [memory_limit] * ranks, caps)
        candidates += [programs_of(problem, PriorityRule(turns=turns)) for turns in (True, False)]
    if rounds and not many:
        candidates += round_programs(ranks, microbatches, cost_model, memory_limit)
    code = Coder(2 * ranks, microbatches)
    schedules = [
        Schedule.of_codes(
            [[code.of(*action) for action in program] for program in programs],
            placement=placement,
            microbatches=microbatches,
            name=name,
            options=dict(options or {}),
        )
        for programs in candidates
    ]
    return min(schedules, key=lambda schedule: _lengths(schedule, cost_model, objective))


def _lengths(schedule: Schedule, costs: Costs, objective: Objective) -> tuple[float, float]:
    timeline = simulate(schedule, costs)
    lengths = round(timeline.makespan, 9), round(max(timeline.spans), 9)
    return lengths if objective == "makespan" else lengths[::-1]


def _plans(costs: Costs) -> list[Costs]:
    """Costs to plan with: the true ones, ones with a margin (`SHY`), and unit ones."""
    weight, p2p = costs.weight_grad, costs.p2p
    longer = tuple(w * SHY for w in weight) if isinstance(weight, tuple) else weight * SHY
    slower = tuple(tuple(c * SHY**2 for c in row) for row in p2p) if isinstance(p2p, tuple) else p2p * SHY**2
    return [costs, replace(costs, weight_grad=longer, p2p=slower), Costs()]
