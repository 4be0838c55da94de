"""`search`: the best schedule that it can find for these sizes, costs and memory, and how far from optimal it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.errors import CapacityError, UsageError, did_you_mean
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.families.layout import require_sizes
from pipeloom.solver.budget import Budget
from pipeloom.solver.engine import Run, value_of
from pipeloom.solver.orders import orders_of
from pipeloom.solver.pairs import PairRun
from pipeloom.solver.placements import placements_of
from pipeloom.solver.problem import EPS, Objective, Problem
from pipeloom.solver.prove import require_solver
from pipeloom.solver.quest import Progress

OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What `search` found.

    Attributes:
        schedule: checked, ready to be drawn, exported and run.
        timeline: its simulation with the costs given.
        objective: `"makespan"` or `"span"`.
        lower_bound: a value of the objective that no schedule on the placements searched can beat.
        proved: whether nothing can be better: the bound is reached, or a solver has shown it.
        origin: the family or rule that the best schedule grew from.
        iterations: moves of the local search.
        seconds: that the search took.
        interrupted: whether Ctrl-C ended it.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    lower_bound: float
    proved: bool
    origin: str
    iterations: int
    seconds: float
    interrupted: bool = False

    @property
    def value(self) -> float:
        """The makespan or the largest span, as the objective says."""
        return value_of(self.timeline, self.objective)

    @property
    def gap(self) -> float:
        """value / lower bound - 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    def __repr__(self) -> str:
        return f"SearchResult({self.objective} {self.value:g}, bound {self.lower_bound:g}, {self.schedule!r})"


def search(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | None = None,
    *,
    placement: str | Sequence[int] | None = None,
    chunks: int | None = None,
    objective: Objective = "makespan",
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    prove: bool = False,
    pairs: bool = False,
    overlap_p2p: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The schedule with the least makespan (or largest span) found, within `memory` on every rank.

    Never worse than the best one-route family that fits with the same number of chunks or a divisor of it. Families and list
    scheduling give the starts; one period is annealed and unrolled; tabu search along critical paths improves the best. Ctrl-C
    ends it with the best so far.

    Args:
        costs: of a stage; default 1, 1, 1, 0. Micro-batches of different lengths (`Costs.microbatch`) may come in another order.
        memory: the largest peak memory of a rank, in units of `Costs.activation` (1: stage-micro-batches); None: no limit.
        placement: `"linear"`, `"loop"`, `"vee"`, or the rank of every stage; None: all three for the given chunks.
        chunks: stages a rank; default 1, or the placement's.
        objective: `"makespan"`: a step that ends in a barrier; `"span"`: steps without one.
        time_limit: seconds.
        iterations: moves of the local search. With neither: a number that takes about ten seconds. Without a time limit
            and a proof the result depends on the arguments alone.
        seed: of the random choices.
        prove: let a constraint solver (the extra `opt`) look for a proof or for something better, for what is left of the time
            limit after a quarter of it, or for two minutes. Not for micro-batches that differ.
        pairs: search over overlapped pairs F|B and F|I as well (they gain with `Costs.all_to_all` or a given pair).
        overlap_p2p: whether a message travels while its receiver computes, as in `simulate`.
        progress: called now and then.

    Raises:
        UsageError: sizes, placement, objective or limits that make no sense.
        CapacityError: the memory does not hold one micro-batch, or no start fits it.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    chosen = costs if costs is not None else Costs()
    if objective not in OBJECTIVES:
        raise UsageError(f"objective is {objective!r}{did_you_mean(str(objective), OBJECTIVES)}")
    room = math.inf if memory is None else _limit("memory", memory)
    problems = [
        Problem(place, microbatches, chosen, room, objective, order, overlap_p2p)
        for place in placements_of(ranks, chunks, placement)
        for order in orders_of(chosen.factors(microbatches))
    ]
    for problem in problems:
        require_room(problem)
    if time_limit is not None:
        _limit("time-limit", time_limit)
    if iterations is not None and (isinstance(iterations, bool) or iterations < 0):
        raise UsageError(f"iterations is {iterations!r}; it must be a whole number of at least 0")
    _require_plain(chosen, prove, pairs, overlap_p2p)
    if prove:
        require_solver()
    budget = Budget(problems[0].nodes, time_limit, iterations, prove)
    run = (PairRun if pairs else Run)(problems, budget, Random(seed), progress)
    run.go()
    assert run.best is not None
    value, origin, schedule, used = run.best
    return SearchResult(
        schedule=schedule,
        timeline=simulate(schedule, used, overlap_p2p=overlap_p2p),
        objective=objective,
        lower_bound=min(run.bound, value),
        proved=run.proved,
        origin=origin,
        iterations=run.budget.used,
        seconds=run.budget.seconds,
        interrupted=run.interrupted,
    )


def require_room(problem: Problem) -> None:
    """Raises CapacityError where not even one micro-batch at a time fits, UsageError for costs of another size."""
    activation = problem.costs.per_stage("activation", problem.stages)
    problem.costs.check_links(problem.ranks)
    largest = max(problem.factors)
    for rank in range(problem.ranks):
        least = largest * sum(a for a, home in zip(activation, problem.placement, strict=True) if home == rank)
        if least > problem.room + EPS:
            raise CapacityError(
                f"memory is {problem.room:g}; one micro-batch in all stages of rank {rank} takes {least:g}"
            )


def _require_plain(costs: Costs, prove: bool, pairs: bool, overlap_p2p: bool) -> None:
    """Refuses what a proof or the search over pairs does not know."""
    if prove and costs.uneven:
        raise UsageError("prove is for equal micro-batches; with microbatch-costs leave it out: the bound is printed")
    if pairs and prove:
        raise UsageError("prove knows no pairs; leave out pairs or prove")
    if pairs and (costs.uneven or not overlap_p2p):
        other = "microbatch-costs" if costs.uneven else "no-overlap-p2p"
        raise UsageError(
            f"pairs are searched for equal micro-batches and overlapped messages; leave out pairs or {other}"
        )


def _limit(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be a number above 0")
    return value
