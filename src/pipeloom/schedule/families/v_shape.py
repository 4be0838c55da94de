"""Shared construction of the V schedules: the best order of their building blocks for given costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from pipeloom.limits import MOST_PLANNED_CELLS
from pipeloom.schedule.actions import KindName
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
from pipeloom.schedule.families.steady import plan
from pipeloom.schedule.families.v_rounds import round_programs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee
from pipeloom.schedule.timeline import Objective

FIT_SHARES = (0.5, 0.75, 1.0)
SHY = 1.05  # A W planned 5 % too long, with hops 10 % too long, is not placed in gaps that it would only just fit.
# Largest p m, of the micro-batches planned, for which every rule is tried; above it, those of the first block that fits.
MOST_CELLS_WITH_ALL_RULES = 1_500

Programs = list[list[Planned]]


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
    the programs of `round_programs` are candidates too, where p m is at most `MOST_CELLS_WITH_ALL_RULES`.
    """
    ranks, microbatches = sizes
    require_sizes(MOST_PLANNED_CELLS, ranks=ranks, microbatches=microbatches)
    cost_model = costs if costs is not None else Costs()

    def candidates(planned: int) -> Iterator[Schedule]:
        code = Coder(2 * ranks, planned)
        for programs in _programs((ranks, planned), cost_model, blocks, memory_limit, rounds):
            yield Schedule.of_codes(
                [[code.of(*action) for action in program] for program in programs],
                placement=vee(ranks),
                microbatches=planned,
                name=name,
                options=dict(options or {}),
            )

    return plan(sizes, cost_model, objective, candidates)


def _programs(
    sizes: tuple[int, int], costs: Costs, blocks: Sequence[BuildingBlock], memory_limit: int, rounds: bool
) -> Iterator[Programs]:
    """Programs, rank -> (kind, stage, micro-batch), by every rule."""
    ranks, microbatches = sizes
    placement = vee(ranks)
    counted = replace(costs, activation=1.0, held=1.0)
    many = ranks * microbatches > MOST_CELLS_WITH_ALL_RULES
    plans = list(dict.fromkeys(_plans(counted)))[: 1 if many else None]
    fitting = False
    for block in blocks:
        if many and fitting:
            break
        repeated = repeated_programs(block, placement, microbatches, memory_limit)
        yield from repeated[-1:]
        sequences = sequences_of_block(block, placement, microbatches, memory_limit)
        orders = [] if sequences is None else [(sequences, assumed) for assumed in plans]
        if not many:
            orders += [([_without_weights(program) for program in programs], counted) for programs in repeated]
        fitting = fitting or bool(orders or repeated)
        for (order, assumed), patience in product(orders, FIT_SHARES[:: 2 if many else 1]):
            with contextlib.suppress(MemoryDeadlock):
                yield programs_along(
                    single_route(placement, microbatches, assumed, [memory_limit] * ranks), order, patience
                )
    if not fitting or (costs != Costs() and not many):
        # One place is kept free for the second half of the V, without which the first could block it for ever.
        caps = [memory_limit - 1] * ranks + [memory_limit] * ranks
        problem = single_route(placement, microbatches, counted, [memory_limit] * ranks, caps)
        for turns in (True, False):
            yield programs_of(problem, PriorityRule(turns=turns))
    if rounds and not many:
        yield from round_programs(ranks, microbatches, costs, memory_limit)


def _without_weights(program: list[Planned]) -> list[tuple[KindName, int]]:
    return [what[:2] for what in program if what[0] != "W"]


def _plans(costs: Costs) -> list[Costs]:
    """Costs to plan with: the true ones, ones with a margin (`SHY`), and unit ones."""
    weight, p2p = costs.weight_grad, costs.p2p
    longer = tuple(w * SHY for w in weight) if isinstance(weight, tuple) else weight * SHY
    slower = tuple(tuple(c * SHY**2 for c in row) for row in p2p) if isinstance(p2p, tuple) else p2p * SHY**2
    return [costs, replace(costs, weight_grad=longer, p2p=slower), Costs()]
