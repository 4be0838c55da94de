"""A search for a configuration's request: its result beside the family that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeloom.config.search import SearchRequest
from pipeloom.errors import CapacityError, ScheduleError
from pipeloom.schedule import Costs, Schedule, check, simulate

EPS = 1e-9


@dataclass(frozen=True)
class Found:
    """A searched schedule, and how it compares.

    Attributes:
        schedule: checked for the transport.
        costs: what it was searched for.
        objective: what `value`, `was` and `lower_bound` are.
        value: simulated with the costs.
        was: that of the family that it is compared with.
        lower_bound: for schedules within the memory, on the placements searched.
        source: where the costs come from, in words.
        seconds: that the search took; 0 for one taken over.
    """

    schedule: Schedule
    costs: Costs
    objective: str
    value: float
    was: float
    lower_bound: float
    source: str
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """value / lower bound - 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0


def find_schedule(request: SearchRequest, costs: Costs, source: str, transport: str = "auto") -> Found:
    """The best schedule that the search finds for `costs`, or the request's family where that is as good.

    Raises UsageError for costs of another size, CapacityError where nothing fits.
    """
    from pipeloom.solver import search
    from pipeloom.solver.fuse import fuse, with_whole

    family, objective = request.family, request.objective
    was = value_of(family, costs, objective)
    candidates = [family, fuse(family, costs, objective)]
    try:
        result = search(
            request.ranks,
            request.microbatches,
            replace(costs, backward=None),
            request.memory,
            placement=request.placement,
            chunks=request.chunks,
            objective=objective,
            time_limit=request.time_limit,
            iterations=request.iterations,
            seed=request.seed,
        )
    except CapacityError:
        if max(simulate(family, costs).peak_memory) > request.memory + EPS:
            raise
        return Found(family, costs, objective, was, was, 0.0, source)
    if result.interrupted:
        raise KeyboardInterrupt
    candidates += [with_whole(result.schedule, ()), fuse(result.schedule, costs, objective)]
    if not runs_on(candidates[-1], transport):
        source += "; the batched transport cannot run what was found"
    runnable = [schedule for schedule in candidates if runs_on(schedule, transport)] or [family]
    best = min(runnable, key=lambda schedule: value_of(schedule, costs, objective))
    value = value_of(best, costs, objective)
    bound = min(value, _bound(request, costs)) if costs.backward is not None else result.lower_bound
    return Found(best, costs, objective, value, was, bound, source, result.seconds)


def _bound(request: SearchRequest, costs: Costs) -> float:
    """A value that no schedule beats, where a B may cost less than I and W: with I and W as short as both would have it."""
    from pipeloom.schedule.bounds import memory_bound, work_bound
    from pipeloom.solver.placements import placements_of

    places = placements_of(request.ranks, request.chunks, request.placement)
    bounds = []
    for place in places:
        whole, first, second = (costs.per_stage(name, len(place)) for name in ("backward", "input_grad", "weight_grad"))
        least = tuple(map(min, whole, first))
        rest = tuple(min(w, b - i) for b, i, w in zip(whole, least, second, strict=True))
        short = replace(costs, backward=None, input_grad=least, weight_grad=rest)
        sizes = (place, request.microbatches, short)
        bounds.append(
            max(work_bound(*sizes, request.objective), memory_bound(*sizes, request.memory, request.objective))
        )
    return min(bounds)


def value_of(schedule: Schedule, costs: Costs, objective: str) -> float:
    return simulate(schedule, costs).value(objective)


def runs_on(schedule: Schedule, transport: str) -> bool:
    """False where the batched transport would deadlock with it."""
    try:
        check(schedule, transport="batched" if transport == "batched" else "individual")
    except ScheduleError:
        return False
    return True
