"""The automatic zero-bubble schedule (Qi et al., arXiv 2401.10241, section 3.1) from costs and a memory limit."""

from __future__ import annotations

from itertools import product

from pipeloom.errors import CapacityError, UsageError
from pipeloom.limits import MOST_PLANNED_CELLS
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.alternation import Alternation, RoundRules
from pipeloom.schedule.families.greedy import PriorityRule, programs_of, single_route
from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import simulate


def zb_auto(ranks: int, microbatches: int, memory: float | None = None, costs: Costs | None = None) -> Schedule:
    """The best variant of the paper's heuristic (by the largest span, then the makespan) that fits `memory`.

    One stage per rank. As many forwards as fit before the first backward, then one forward and one input gradient in turn;
    weight gradients fill gaps and make room. Below the default memory, plain list scheduling is tried too: the rule collapses
    below 1F1B's. Any m >= 1.

    Args:
        memory: the largest peak memory of a rank, in the units of `Costs.activation`; from I until W only the share `Costs.held`
            counts. Default: 2p times the largest activation.
        costs: default 1, 1, 1, 0.

    Raises:
        CapacityError: the memory does not hold one micro-batch.
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
    candidates = [
        Alternation(ranks, microbatches, cost_model, memory_limit, RoundRules(*flags)).programs()
        for flags in sorted(set(product((True, False), repeat=3)))
    ]
    if memory_limit < 2 * ranks * largest:
        problem = single_route(range(ranks), microbatches, cost_model, [memory_limit] * ranks)
        candidates += [programs_of(problem, PriorityRule(patience=share)) for share in (0.0, 1.0)]
    code = Coder(ranks, microbatches)
    options = {} if memory is None else {"memory": memory}
    schedules = [
        Schedule.of_codes(
            [[code.of(*action) for action in program] for program in programs],
            placement=range(ranks),
            microbatches=microbatches,
            name="zb-auto",
            options=options,
        )
        for programs in candidates
    ]
    return min(schedules, key=lambda schedule: _length(schedule, cost_model))


def _length(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    timeline = simulate(schedule, costs)
    return round(max(timeline.spans), 9), round(timeline.makespan, 9)
