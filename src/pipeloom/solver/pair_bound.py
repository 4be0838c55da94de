"""A bound for schedules whose pairs gain: what cannot be paired yet, runs alone or leaves its rank idle."""

from __future__ import annotations

import math

from pipeloom.schedule.bounds import work_bound
from pipeloom.schedule.costs import PairTimes
from pipeloom.solver.problem import EPS, Problem


def pairs_gain(problem: Problem) -> bool:
    """Whether any pair on any rank is shorter than its two halves one after the other."""
    times = PairTimes.of(problem.costs, problem.stages)
    return any(
        _saved(times, s, t) > EPS
        for s, home in enumerate(problem.placement)
        for t, other in enumerate(problem.placement)
        if home == other
    )


def pair_bound(problem: Problem) -> float:
    """A makespan (or largest span) that no schedule of the problem, pairs or not, can beat.

    The larger of `work_bound` and, for the makespan, over the ranks: no input gradient starts before the first micro-batch has
    come down all stages (alone: nothing is there to be paired with) and back to the rank's. Until then the rank is idle or runs
    forwards alone, as many as its memory holds, each of which then misses what its best pair would save:

        makespan >= head + work with best pairs + min over x of [saved by x forwards + (wait - time of x forwards)+]
    """
    base = work_bound(problem.placement, problem.microbatches, problem.costs, problem.objective)
    if problem.objective != "makespan" or problem.costs.microbatch:
        return base
    times = PairTimes.of(problem.costs, problem.stages)
    back = _first_input_gradients(problem, times)
    return round(max(base, *(_of_rank(problem, times, back, rank) for rank in range(problem.ranks))), 9)


def _saved(times: PairTimes, forward: int, backward: int) -> float:
    spread = times.spread
    whole = min(spread.backward[backward], spread.input_grad[backward] + spread.weight_grad[backward])
    return spread.forward[forward] + whole - times.least(forward, backward)


def _first_input_gradients(problem: Problem, times: PairTimes) -> list[float]:
    """stage -> the earliest start of an input gradient."""
    place, costs, spread = problem.placement, problem.costs, times.spread
    last = problem.stages - 1
    clock = sum(spread.forward) + sum(costs.hop(a, b) for a, b in zip(place, place[1:], strict=False))
    starts = [0.0] * problem.stages
    for stage in range(last, -1, -1):
        starts[stage] = clock
        mates = [other for other in range(problem.stages) if place[other] == place[stage]]
        paired = [times.time(other, stage, split) for other in mates for split in (True, False)]
        clock += min(spread.input_grad[stage], spread.backward[stage], *paired)
        if stage:
            clock += costs.hop(place[stage], place[stage - 1])
    return starts


def _of_rank(problem: Problem, times: PairTimes, back: list[float], rank: int) -> float:
    spread, m = times.spread, problem.microbatches
    own = [stage for stage in range(problem.stages) if problem.placement[stage] == rank]
    saved = {s: max(0.0, *(_saved(times, s, t) for t in own)) for s in own}
    work = sum(
        spread.forward[s] + min(spread.backward[s], spread.input_grad[s] + spread.weight_grad[s]) - saved[s]
        for s in own
    )
    head = problem.heads[rank]
    wait = min(back[s] for s in own) - head
    activation = problem.costs.per_stage("activation", problem.stages)
    gains = [(spread.forward[s] - saved[s], spread.forward[s], activation[s]) for s in own]
    gains = [gain for gain in gains if gain[0] > 0]
    in_time = _most([(gain, time) for gain, time, _ in gains], wait, m)
    in_memory = _most([(gain, memory) for gain, _, memory in gains], problem.room, m)
    return head + m * work + max(0.0, wait - min(in_time, in_memory))


def _most(items: list[tuple[float, float]], size: float, count: int) -> float:
    """The most gain of (gain, size) items, `count` of each, parts allowed, within `size`."""
    total = 0.0
    for gain, each in sorted(items, key=lambda item: item[1] / item[0]):
        taken = min(float(count), size / each) if each else float(count)
        total += taken * gain
        size -= taken * each
        if math.isclose(size, 0.0):
            break
    return total
