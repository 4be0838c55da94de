"""A search for a configuration's request: its result beside the family that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeloom.config.search import SearchRequest
from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.json_form import from_json, to_json


@dataclass(frozen=True)
class SearchOutcome:
    """A searched schedule beside the family that it is compared with.

    Attributes:
        schedule: the schedule to run.
        costs: the costs that it was searched for.
        objective: quantity that `value`, `baseline` and `lower_bound` give, in the unit of the costs.
        value: objective of `schedule`, simulated with the costs.
        baseline: objective of the family, simulated with the costs.
        lower_bound: bound on the objective for schedules within the memory, on the placements searched.
        source: origin of the costs, in words.
        seconds: duration of the search; 0 for an outcome reused from an earlier run.
    """

    schedule: Schedule
    costs: Costs
    objective: str
    value: float
    baseline: float
    lower_bound: float
    source: str
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """Return value / lower bound - 1, or 0 without a bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0


def to_plain(outcome: SearchOutcome) -> dict[str, Any]:
    """Return `outcome` as JSON can hold it."""
    return {
        **{spec.name: getattr(outcome, spec.name) for spec in fields(outcome)},
        "schedule": to_json(outcome.schedule),
        "costs": asdict(outcome.costs),
    }


def from_plain(plain: Mapping[str, Any]) -> SearchOutcome:
    """Invert `to_plain`. Of a schedule's options, those that its JSON form does not hold are lost."""
    costs = {key: _tuples(value) for key, value in plain["costs"].items()}
    return SearchOutcome(**{**plain, "schedule": from_json(plain["schedule"]), "costs": Costs(**costs)})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def search_for(request: SearchRequest, costs: Costs, source: str) -> SearchOutcome:
    """Search for `request`: the best schedule found for `costs`, or the request's family where that is as good.

    Raises UsageError for costs of another number of stages, CapacityError if no schedule fits into the memory.
    """
    from pipeloom.solver import search
    from pipeloom.solver.merge_backward import merge_backwards

    family, objective = request.family, request.objective
    baseline = value_of(family, costs, objective)
    memory = memory_limit(request, costs)
    try:
        result = search(
            request.ranks,
            request.microbatches,
            costs,
            memory,
            placement=request.placement,
            chunks=request.chunks,
            objective=objective,
            time_limit=request.time_limit,
            iterations=request.iterations,
            seed=request.seed,
        )
    except CapacityError:
        if max(simulate(family, costs).peak_memory) > memory + TIME_TOLERANCE:
            raise
        return SearchOutcome(family, costs, objective, baseline, baseline, 0.0, source)
    if result.interrupted:
        raise KeyboardInterrupt
    candidates = [family, merge_backwards(family, costs, objective), result.schedule]
    best = min(candidates, key=lambda schedule: value_of(schedule, costs, objective))
    value = value_of(best, costs, objective)
    return SearchOutcome(
        best, costs, objective, value, baseline, min(value, result.lower_bound), source, result.seconds
    )


def memory_limit(request: SearchRequest, costs: Costs) -> float:
    """Return the limit of a request for micro-batches of these sizes: as many of the largest ones."""
    return request.memory * max(costs.microbatch, default=1.0)


def value_of(schedule: Schedule, costs: Costs, objective: str) -> float:
    """Return the makespan or the largest span, whichever is the objective, of a simulated step."""
    return simulate(schedule, costs).value(objective)
