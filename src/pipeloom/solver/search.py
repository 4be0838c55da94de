"""`search`: the best schedule found for given sizes, costs and memory, with a bound on its distance from the optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from pipeloom.errors import ArgumentError, CapacityError
from pipeloom.limits import (
    MOST_SEARCHED_CELLS,
    MOST_SECONDS,
    MOST_STEPS,
    of_annotated_types,
    require_at_most,
    require_positive,
    require_whole,
)
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families.construct.layout import require_sizes
from pipeloom.schedule.model import places_of
from pipeloom.schedule.placement import NAMED, named, require_placement
from pipeloom.schedule.timeline import Objective
from pipeloom.solver.bounds import pairs_gain
from pipeloom.solver.driver import SearchDriver
from pipeloom.solver.exact import require_solver
from pipeloom.solver.incumbent import Budget, Progress
from pipeloom.solver.instance import Instance
from pipeloom.solver.memory import offer_start, per_rank_limits, search_within_memory
from pipeloom.solver.recompute import bound_with_recomputation

OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True, repr=False)
class SearchResult:
    """Result of `search`.

    Attributes:
        schedule: checked, ready to be drawn, exported and run.
        timeline: its simulation with the costs given.
        objective: `"makespan"` or `"span"`.
        lower_bound: lower bound on the objective over all schedules on the placements searched.
        proved: whether the schedule is proved optimal: it reaches the bound, or a solver has proved it.
        origin: the family or rule from which the best schedule was developed.
        iterations: moves of the local search.
        seconds: duration of the search.
        interrupted: whether Ctrl-C ended it.
        limit: of a rank's memory, in the unit of `timeline.peak_memory` or in bytes; None: none, or one for each rank.
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
    limit: float | None = None

    @property
    def value(self) -> float:
        """The makespan or the largest span, depending on the objective."""
        return self.timeline.value(self.objective)

    @property
    def gap(self) -> float:
        """value / lower bound - 1; 0 if the bound is 0."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def recomputed(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the micro-batches that are recomputed, whole, in blocks or by part."""
        return places_of(self.schedule, "R")

    @property
    def offloaded(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the micro-batches of which at least a part is copied to host memory."""
        return places_of(self.schedule, "O")

    def _repr_svg_(self) -> str | None:
        """Return the drawing of its timeline, for notebooks."""
        return self.timeline._repr_svg_()

    def _repr_html_(self) -> str | None:
        """Return the page of its timeline, with its bound and its limit, for notebooks."""
        return self.timeline._repr_html_(**self.beside)

    @property
    def beside(self) -> dict[str, float | None]:
        """`bound` and `limit` of `draw.html`."""
        return {"bound": self.lower_bound if self.objective == "makespan" else None, "limit": self.limit}

    def __repr__(self) -> str:
        return f"SearchResult({self.objective} {self.value:g}, bound {self.lower_bound:g}, {self.schedule!r})"


@of_annotated_types
def search(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    placement: str | Sequence[int] | None = None,
    chunks: int | None = None,
    start: Schedule | None = None,
    objective: Objective = "makespan",
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    prove: bool = False,
    pairs: bool = False,
    overlap_p2p: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Return the schedule with the least makespan (or largest span) found, within `memory` on every rank.

    The result is never worse than the best one-route family that fits the memory and has the same number of chunks or a divisor
    of it. Families and list scheduling provide the starts; one period is improved by simulated annealing and unrolled. Walks of
    tabu search along critical paths improve the starts, and others restart from one micro-batch after the other. More iterations
    are never worse for a seed. Ctrl-C ends the search with the best schedule so far.

    >>> result = search(2, 4, memory=1, iterations=50)
    >>> result.value, result.lower_bound, max(result.timeline.peak_activations)
    (20.0, 20.0, 1)

    Args:
        costs: costs of a stage; default: `Costs()`, F = I = W = 1. Micro-batches of different lengths (`Costs.microbatch`)
            may be reordered. With a memory limit and `Costs.recompute`, the search also decides which micro-batches of which
            stages are recomputed, whole or by the parts that `Costs.bytes` has, and with a finite `Costs.host_bandwidth` which
            are copied to host memory and back (neither with `prove` or `pairs`).
        memory: the largest peak memory of a rank, in units of `Costs.activation` (default: stage-micro-batches), or one for
            each rank; None: no limit.
        placement: `"linear"`, `"loop"`, `"vee"`, or the rank of every stage; None: all three for the given chunks.
        chunks: stages per rank; default 1, or the placement's.
        start: a schedule of the same sizes to start from, beside the families; it may recompute and copy.
        objective: `"makespan"`, for steps that end in a barrier; `"span"`, the largest span of a rank, for steps without one.
        time_limit: longest search, in seconds.
        iterations: most moves of the local search. Without a time limit and a proof, the result then depends only on the
            arguments. With neither limit: a number that takes about ten seconds, and at most 30 seconds.
        seed: seed of the random choices.
        prove: let a constraint solver (the extra `opt`) search for a proof or a better schedule, for the last three quarters
            of the time limit, or for two minutes. Micro-batches must be equal. The solver does not model pairs: where pairs
            save time or memory, the result is proved only if it reaches the bounds by formula.
        pairs: search over overlapped pairs F|B and F|I as well (they gain with `Costs.all_to_all` or a given pair).
        overlap_p2p: whether messages are transferred while their receiver computes, as in `simulate`.
        progress: called repeatedly during the search.

    Raises:
        UsageError: invalid sizes, placement, objective or limits.
        CapacityError: the memory does not hold one micro-batch, or no start fits it.
    """
    require_sizes(MOST_SEARCHED_CELLS, ranks=ranks, microbatches=microbatches, chunks=1 if chunks is None else chunks)
    if time_limit is not None:
        require_positive("time_limit", time_limit, MOST_SECONDS)
    if iterations is not None:
        require_whole("iterations", iterations, 0)
        require_at_most("iterations", iterations, MOST_STEPS)
    cost_model = costs if costs is not None else Costs()
    plain = replace(cost_model, sends="free")
    limits = _limits(memory, ranks)
    if start is not None and placement is None and chunks is None:
        placement = start.placement
    # What a call takes holds its receiver in any case.
    overlaps = overlap_p2p and (cost_model.sends != "coupled" or pairs)
    instances = [
        Instance(place, microbatches, _costs_within(limits, place, plain), max(limits), objective, order, overlaps)
        for place in placements_of(ranks, chunks, placement)
        for order in microbatch_orders(cost_model.factors(microbatches))
    ]
    limited = memory is not None and not (pairs or prove)
    recomputes, copies = limited and cost_model.recompute is not None, limited and cost_model.host_bandwidth < math.inf
    roomy = _roomy(instances, limits, required=not (recomputes or copies))
    _require_plain(cost_model, prove, pairs, overlap_p2p)
    if prove:
        require_solver()
    with_pairs = pairs and any(map(pairs_gain, instances))
    budget = Budget(instances[0].nodes, time_limit, iterations, prove, with_pairs)
    given = [] if start is None else [start]
    driver = SearchDriver(instances, budget, Random(seed), progress, with_pairs, given, cost_model.sends)
    if recomputes or copies:
        driver.incumbent.bounds |= {each: bound_with_recomputation(each) for each in instances}
    if start is not None:
        offer_start(driver, start, plain, limits)
    if recomputes or copies:
        search_within_memory(driver, roomy, seed, recomputes, copies)
    else:
        driver.run()
    incumbent, best = driver.incumbent, driver.incumbent.best
    assert best is not None
    return SearchResult(
        schedule=best.schedule,
        timeline=simulate(best.schedule, cost_model, overlap_p2p=overlap_p2p),
        objective=objective,
        lower_bound=min(incumbent.bound, best.value),
        proved=incumbent.proved,
        origin=best.origin,
        iterations=budget.used,
        seconds=budget.seconds,
        interrupted=driver.interrupted,
        limit=None if cost_model.bytes or isinstance(memory, Sequence) else memory,
    )


def _limits(memory: float | Sequence[float] | None, ranks: int) -> list[float]:
    """rank -> its memory limit."""
    if memory is None:
        return [math.inf] * ranks
    limits = list(memory) if isinstance(memory, Sequence) and not isinstance(memory, str) else [memory] * ranks
    for limit in limits:
        require_positive("memory", limit)
    return limits


def _costs_within(limits: Sequence[float], placement: Sequence[int], costs: Costs) -> Costs:
    return costs if len(set(limits)) == 1 else per_rank_limits(placement, costs, limits)


def _roomy(instances: Sequence[Instance], limits: Sequence[float], required: bool) -> list[Instance]:
    """Return the instances in which one micro-batch at a time fits; raise CapacityError for another if `required`.

    Raises UsageError for costs of other sizes than an instance.
    """
    roomy = []
    for instance in instances:
        instance.costs.check_links(instance.ranks)
        rank, share = fullest(instance)
        if (share - 1) * instance.memory_limit <= TIME_TOLERANCE:
            roomy.append(instance)
        elif required:
            raise CapacityError(
                f"memory is {limits[rank]:g}; one micro-batch in all stages of rank {rank} takes {share * limits[rank]:g}"
            )
    return roomy


def placements_of(ranks: int, chunks: int | None, placement: str | Sequence[int] | None) -> list[tuple[int, ...]]:
    """Return the placements (stage -> rank) to search, without repetition.

    Raises UsageError for an unknown name, and for ranks that do not hold `chunks` stages each.
    """
    if chunks is not None:
        require_sizes(chunks=chunks)
    if placement is None:
        return list(dict.fromkeys(named(name, ranks, chunks or 1) for name in NAMED))
    if isinstance(placement, str):
        return [named(placement, ranks, chunks or (1 if placement == "linear" else 2))]
    return [require_placement(placement, ranks, chunks)]


def microbatch_orders(factors: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the orders (position -> micro-batch) to search: as given (empty), short at both ends, short first, long first.

    If all factors are equal, only the first. Once the order is chosen, micro-batches of different lengths pass every stage first
    in, first out. Short micro-batches at the ends make the warm-up and the cool-down short.
    """
    numbers = range(len(factors))
    rising = sorted(numbers, key=factors.__getitem__)
    ends = [*rising[::2], *reversed(rising[1::2])]
    orders: dict[tuple[float, ...], tuple[int, ...]] = {tuple(factors): ()}
    for order in (ends, rising, rising[::-1]):
        orders.setdefault(tuple(factors[at] for at in order), tuple(order))
    return list(orders.values())


def fullest(instance: Instance) -> tuple[int, float]:
    """Return the rank whose memory one micro-batch in all of its stages fills most, and the share of it that it fills."""
    takes = [0.0] * instance.ranks
    for activation, rank in zip(
        instance.costs.per_stage("activation", instance.stages), instance.placement, strict=True
    ):
        takes[rank] += activation
    rank = max(range(instance.ranks), key=takes.__getitem__)
    return rank, max(instance.factors) * takes[rank] / instance.memory_limit


def _require_plain(costs: Costs, prove: bool, pairs: bool, overlap_p2p: bool) -> None:
    """Refuse options that a proof or the search over pairs does not support."""
    if prove and costs.uneven:
        raise ArgumentError(
            "prove", " requires equal micro-batches, but those of costs.microbatch differ: leave one of them out"
        )
    if pairs and prove:
        raise ArgumentError("prove", " does not support pairs; leave out pairs or prove")
    if pairs and (costs.uneven or not overlap_p2p):
        other = "costs.microbatch" if costs.uneven else "overlap_p2p=False"
        raise ArgumentError(
            "pairs", f" require equal micro-batches and overlapped messages; leave out pairs or {other}"
        )
