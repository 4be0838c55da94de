"""The automatic zero-bubble schedule (Qi et al., arXiv 2401.10241, section 3.1) from costs and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

from pipeloom.errors import CapacityError, UsageError
from pipeloom.limits import MOST_PLANNED_CELLS
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.families.alternation import Alternation, RoundRules
from pipeloom.schedule.families.greedy import Planned, PriorityRule, programs_of, single_route
from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.families.steady import plan
from pipeloom.schedule.families.zb_h1 import zb_h1
from pipeloom.schedule.families.zb_h2 import zb_h2
from pipeloom.schedule.model import Program, Schedule
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Objective


def zb_auto(
    ranks: int,
    microbatches: int,
    memory: float | None = None,
    costs: Costs | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """The best variant of the paper's heuristic that fits `memory`; never longer than zb-h1 and zb-h2 where they fit it.

    One stage per rank. As many forwards as fit before the first backward, then one forward and one input gradient in turn;
    weight gradients fill gaps and make room. Below the default memory, plain list scheduling is tried too: the rule collapses
    below 1F1B's. Any m >= 1.

    Args:
        memory: the largest peak memory of a rank, in the units of `Costs.activation`; from I until W only the share `Costs.held`
            counts. Default: 2p times the largest activation.
        costs: default 1, 1, 1, 0.
        objective: "makespan", for a step that ends in a barrier, or "span", the largest span of a rank, for one that does not.

    Raises:
        CapacityError: the memory does not hold one micro-batch.
        UsageError: another objective, or a memory that is not a number above 0.
    """
    require_sizes(MOST_PLANNED_CELLS, ranks=ranks, microbatches=microbatches)
    cost_model = costs if costs is not None else Costs()
    cost_model.check_links(ranks)
    largest = max(cost_model.per_stage("activation", ranks))
    memory_limit = 2 * ranks * largest if memory is None else memory
    if (
        isinstance(memory_limit, bool)
        or not isinstance(memory_limit, (int, float))
        or memory_limit != memory_limit
        or memory_limit <= 0
    ):
        raise UsageError(f"memory is {memory!r:.200}; it must be a number above 0")
    if memory_limit < largest:
        raise CapacityError(f"memory is {memory:g}; one micro-batch's activations take {largest:g}")
    options: dict[str, object] = {} if memory is None else {"memory": memory}
    options |= {} if objective == "makespan" else {"objective": objective}

    def candidates(planned: int) -> Iterator[Schedule]:
        code = Coder(ranks, planned)
        planned_programs = _programs((ranks, planned), cost_model, memory_limit)
        encoded = ([[code.of(*action) for action in program] for program in programs] for programs in planned_programs)
        for codes in chain(encoded, _by_hand((ranks, planned), cost_model, memory_limit)):
            yield Schedule.of_codes(
                codes, placement=range(ranks), microbatches=planned, name="zb-auto", options=options
            )

    return plan((ranks, microbatches), cost_model, objective, candidates)


def _programs(sizes: tuple[int, int], costs: Costs, memory_limit: float) -> Iterator[list[list[Planned]]]:
    """Programs by the paper's rule with all its choices, and where memory is short, of list scheduling."""
    ranks, _ = sizes
    for flags in sorted(set(product((True, False), repeat=3))):
        yield Alternation(*sizes, costs, memory_limit, RoundRules(*flags)).programs()
    if memory_limit < 2 * ranks * max(costs.per_stage("activation", ranks)):
        problem = single_route(range(ranks), sizes[1], costs, [memory_limit] * ranks)
        for share in (0.0, 1.0):
            yield programs_of(problem, PriorityRule(patience=share))


def _by_hand(sizes: tuple[int, int], costs: Costs, memory_limit: float) -> Iterator[Sequence[Program]]:
    """Programs of the schedules made by hand that fit."""
    for schedule in (zb_h1(*sizes), zb_h2(*sizes)):
        if max(simulate(schedule, replace(costs, microbatch=())).peak_memory) <= memory_limit + TIME_TOLERANCE:
            yield schedule.codes
