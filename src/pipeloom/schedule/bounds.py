"""Lower bounds on the makespan, each with its domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeloom.schedule.costs import Costs, PairTimes, StageCosts
from pipeloom.schedule.model import Schedule, of_schedule

ROUNDING = 1e-9  # by how much a peak may exceed a memory and still fit: peaks are sums of floats


@of_schedule
def lower_bound(schedule: Schedule, costs: Costs | None = None, *, split_backward: bool = True) -> float:
    """Return a makespan that no schedule with this placement, these routes, m and costs can beat.

    The largest, over the ranks, of

    * head: the rank's work (F + I + W of all its stages and micro-batches, less what pairs could save) after the
      least, over its stages, of the forward prefix of the stage's route and its hops: before that, nothing can start
      there. Holds for loops, V placements and two routes alike. The forwards before a rank's first action are not paired if the
      rank is on every route in use (a backward would have reached it before); elsewhere, where pairs gain, head is 0.
    * with `split_backward=False` and one route (no schedule with I and W apart is considered): the suffix too. After a
      rank's last backward, of stage s, the backwards of stages s-1 .. 0 and their hops still follow.

    Micro-batches may differ (`Costs.microbatch`), and come in any order: the least of a route's factors, and of the
    slices' shares, stands for the one that a rank waits for. Memory does not enter. docs/bounds.md: work, head, tail.
    """
    cost_model = costs if costs is not None else Costs()
    if schedule.forwards_alone:
        cost_model = replace(cost_model, input_grad=0.0, weight_grad=0.0, backward=None, pair=None, pair_split=None)
    least_share = min(cost_model.slice_times or (1 / schedule.slices,)) if schedule.slices > 1 else 1.0
    least_size = min(cost_model.slice_sizes or (1 / schedule.slices,)) if schedule.slices > 1 else 1.0
    factors = cost_model.factors(schedule.microbatches)
    spread = StageCosts(cost_model, schedule.stages)
    before, _ = schedule.neighbours
    prefix, suffix = [0.0] * schedule.stages, [0.0] * schedule.stages
    sums = [0.0] * len(schedule.routes)
    for index, route in enumerate(schedule.routes):
        factors_of_route = [
            factor for factor, route_index in zip(factors, schedule.route_of, strict=True) if route_index == index
        ]
        sums[index], least = sum(factors_of_route), min(factors_of_route, default=1.0)
        for stage in route:
            previous = before[stage]
            if previous is not None:
                here, there = schedule.placement[stage], schedule.placement[previous]
                size, share = least * least_size, least * least_share
                out, back = cost_model.hop(there, here, size), cost_model.hop(here, there, size)
                prefix[stage] = prefix[previous] + share * spread.forward[previous] + out
                suffix[stage] = suffix[previous] + share * spread.backward[previous] + back
    route_of = {stage: index for index, route in enumerate(schedule.routes) for stage in route}
    uses = {stage: sums[route] for stage, route in route_of.items()}
    in_use = set(schedule.route_of)
    gainless = _gainless(cost_model, schedule.stages)
    best = 0.0
    for stages in schedule.stages_of:
        busy = [stage for stage in stages if uses.get(stage)]
        if not busy:
            continue
        work = _least_work(cost_model, schedule.stages, [(stage, uses[stage]) for stage in busy])
        work += sum(sums[0] * (spread.scores[s] + spread.scores_grad[s]) for s in schedule.vocabulary if s in stages)
        head = min(prefix[stage] for stage in busy) if gainless or not in_use - {route_of[s] for s in busy} else 0.0
        tail = min(suffix[stage] for stage in busy) if not split_backward and len(schedule.routes) == 1 else 0.0
        best = max(best, work + head + tail)
    return round(best, 9)


def _gainless(costs: Costs, stages: int) -> bool:
    """Return whether no pair is given and no stage communicates, so that a pair takes as long as its halves."""
    return costs.pair is None and costs.pair_split is None and not any(costs.per_stage("all_to_all", stages))


def _least_work(costs: Costs, stages: int, uses: list[tuple[int, float]]) -> float:
    """The least time in which one rank can do its stages: each forward alone, or in its cheapest pair.

    `uses`: (stage, how many micro-batches; where they differ, the sum of their factors).
    With all-to-all, computation alone and communication alone are bounds, too; they are what pairs can reach.
    Outside its domain it is 0: for micro-batches that differ where `pair_split` alone is given beside all-to-all.
    """
    times = PairTimes.of(costs, stages)
    spread, share = times.spread, times.share
    whole = {s: min(spread.backward[s], spread.input_grad[s] + spread.weight_grad[s]) for s, _ in uses}
    if times.given is None and times.given_split is None:
        back = {s: min(share[s] * spread.input_grad[s], whole[s]) for s, _ in uses}  # a B given may be shorter
        talk = sum(c * (share[s] * spread.forward[s] + back[s]) for s, c in uses)
        busy = {s: (1 - share[s]) * spread.input_grad[s] + spread.weight_grad[s] for s, _ in uses}
        compute = sum(c * ((1 - share[s]) * spread.forward[s] + min(whole[s], busy[s])) for s, c in uses)
        return max(compute, talk)
    if times.given is None and costs.uneven and any(share[s] for s, _ in uses):
        return 0.0
    least = 0.0
    for stage, count in uses:
        gain = max(spread.forward[stage] + whole[other] - times.least(stage, other) for other, _ in uses)
        least += count * (spread.forward[stage] + whole[stage] - max(0.0, gain))
    return max(0.0, least)


def work_bound(placement: Sequence[int], microbatches: int, costs: Costs, objective: str = "makespan") -> float:
    """`lower_bound` of one route through all stages in order; for the objective `"span"` a rank's work alone."""
    empty = Schedule.of([()] * (max(placement) + 1), placement=placement, microbatches=microbatches, name="empty")
    if objective == "makespan":
        return lower_bound(empty, costs)
    stages = len(placement)
    whole = sum(costs.factors(microbatches))
    return max(_least_work(costs, stages, [(stage, whole) for stage in held]) for held in empty.stages_of)


def memory_bound(
    placement: Sequence[int], microbatches: int, costs: Costs, memory: float, objective: str = "makespan"
) -> float:
    """A makespan (or largest span) that no schedule of one route within `memory` on every rank can beat.

    Its domain: costs without all-to-all and without given pairs; elsewhere 0. If B is cheaper than I + W: `Costs.least_split`.

    For each rank, with chain(s) the time from the start of F of stage s to the end of its I, through the last stage:

    * before the first backward: no I of stage s ends sooner than chain(s) after its F, and until the rank's first I
      starts, only the forwards that fit the memory can run. With one stage per rank and k places:
      span >= work + max(0, (p-1)(b+2c) + (p-k) f).
    * after the last input gradient, for the makespan: of the rank's first stage s. The input gradients of stages s-1 .. 0 and one
      W still follow, if there are any, and until then the rank has at most the W whose memory fits. With room for k of them:
      makespan >= head + work + max(0, s (b+c) + w - k w).
    * steady state: a micro-batch takes memory in stage s from its F until its I and, for the share held, until its W; the sum of
      these areas is at most memory * span. A share above 1 counts as 1, because I and W in one B never hold it.

    Makespan adds the least time before the rank can start. Where micro-batches differ, the smallest stands for the one that is
    waited for, and of the forwards before the first backward parts may fit. docs/bounds.md.
    """
    count = len(placement)
    if not _gainless(costs, count):
        return 0.0
    costs = costs.least_split(count)
    spread = StageCosts(costs, count)
    activation, held = costs.per_stage("activation", count), costs.per_stage("held", count)
    factors = costs.factors(microbatches)
    smallest, whole, room = min(factors), sum(factors), memory + ROUNDING
    even = smallest == 1 == max(factors)
    head, chain, tail = _ways(placement, costs, smallest)
    chains = {factor: _ways(placement, costs, factor)[1] for factor in set(factors)}
    best = 0.0
    for rank in range(max(placement) + 1):
        stages_of_rank = [s for s in range(count) if placement[s] == rank]
        work = whole * sum(spread.forward[s] + spread.backward[s] for s in stages_of_rank)
        loads = [(spread.forward[s], activation[s]) for s in stages_of_rank]
        filled = most_that_fits(loads, whole, room, even)
        area = sum(
            factor * activation[s] * (chains[factor][s] + factor * min(1.0, held[s]) * spread.weight_grad[s])
            for factor in factors
            for s in stages_of_rank
        )
        first = min(head[s] for s in stages_of_rank)
        if objective == "makespan":
            wait = min(head[s] + chain[s] - smallest * spread.input_grad[s] for s in stages_of_rank)
            pending = [(spread.weight_grad[s], held[s] * activation[s]) for s in stages_of_rank]
            last = most_that_fits(pending, whole, room, even)
            idle = max(0.0, tail[stages_of_rank[0]] - last)
            best = max(best, max(wait - filled, first) + work + idle, first + area / memory)
        else:
            wait = min(chain[s] - smallest * spread.input_grad[s] for s in stages_of_rank)
            best = max(best, wait + work - filled, area / memory)
    return round(best, 9)


def _ways(placement: Sequence[int], costs: Costs, factor: float) -> tuple[list[float], list[float], list[float]]:
    """stage -> time from the step's start to its F, from F's start through the last stage to the end of its I (or B), and from
    there to the end of the first stage's W.
    """
    count = len(placement)
    spread = StageCosts(costs, count)
    chain, head, tail = [0.0] * count, [0.0] * count, [0.0] * count
    for s in range(1, count):
        here, there = placement[s - 1], placement[s]
        head[s] = head[s - 1] + factor * spread.forward[s - 1] + costs.hop(here, there, factor)
        after = spread.input_grad[s - 1] if s > 1 else spread.input_grad[0] + spread.weight_grad[0]
        tail[s] = costs.hop(there, here, factor) + factor * after + tail[s - 1]
    for s in reversed(range(count)):
        chain[s] = factor * (spread.forward[s] + spread.input_grad[s])
        if s + 1 < count:
            here, there = placement[s], placement[s + 1]
            chain[s] += costs.hop(here, there, factor) + chain[s + 1] + costs.hop(there, here, factor)
    return head, chain, tail


def most_that_fits(items: list[tuple[float, float]], count: float, room: float, even: bool = False) -> float:
    """Return the largest sum of (gain, size) items whose sizes fit into `room`: a fractional knapsack with `count` of each item.

    `even`: where the sizes are alike, only whole items fit.
    """
    total, left = 0.0, room
    alike = even and len({size for _, size in items}) == 1
    for gain, size in sorted(items, key=lambda item: item[1] / item[0] if item[0] else math.inf):
        fitting = min(count, left / size) if size else count
        if alike:
            fitting = math.floor(fitting + ROUNDING)
        total += fitting * gain
        left -= fitting * size if size else 0.0
    return total
