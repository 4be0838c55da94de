"""Lower bounds on the makespan or largest span of schedules, also where overlapped pairs save time.

The bound for pairs uses that the first actions of a rank have no counterpart yet: they run alone, or the rank is idle.
"""

from __future__ import annotations

from pipeloom.schedule.bounds import memory_bound, most_that_fits, work_bound
from pipeloom.schedule.costs import TIME_TOLERANCE, PairTimes, StageCosts
from pipeloom.solver.instance import Instance


def pairs_gain(instance: Instance) -> bool:
    """Return whether any pair F|B or F|I on any rank is shorter than its two halves one after the other, or needs less memory.

    The times of the halves are those of `Costs.least_split`, which matters where a B is cheaper than I + W.
    """
    times = PairTimes.of(instance.costs, instance.stages)
    alone = StageCosts(instance.costs.least_split(instance.stages), instance.stages)

    def gains(forward: int, backward: int) -> bool:
        return any(
            times.overlaps(forward, backward, split)
            or times.time(forward, backward, split) < alone.forward[forward] + value - TIME_TOLERANCE
            for split, value in ((True, alone.input_grad[backward]), (False, alone.backward[backward]))
        )

    return any(
        gains(s, t)
        for s, home in enumerate(instance.placement)
        for t, other in enumerate(instance.placement)
        if home == other
    )


def bound_of(instance: Instance, pairs: bool) -> float:
    """Return the largest lower bound that holds for the instance, without pairs or with them."""
    if pairs:
        return pair_bound(instance)
    sizes = instance.placement, instance.microbatches, instance.costs
    return max(work_bound(*sizes, instance.objective), memory_bound(*sizes, instance.memory_limit, instance.objective))


def pair_bound(instance: Instance) -> float:
    """Return a lower bound on the makespan (or largest span) of all schedules of the instance, with or without pairs.

    It is the larger of `work_bound` and, for the makespan, a bound per rank: no input gradient starts before the first
    micro-batch has passed through all stages (alone, as nothing can be paired with it yet) and back to the rank. Until then the
    rank is idle or runs forwards alone, as many as fit in its memory, and each of them loses what its best pair would save:

        makespan >= head + work with best pairs + min over x of [saved by x forwards + (wait - time of x forwards)+]
    """
    base = work_bound(instance.placement, instance.microbatches, instance.costs, instance.objective)
    if instance.objective != "makespan" or instance.costs.microbatch:
        return base
    times = PairTimes.of(instance.costs, instance.stages)
    back = _first_input_gradients(instance, times)
    return round(max(base, *(_of_rank(instance, times, back, rank) for rank in range(instance.ranks))), 9)


def _saved(times: PairTimes, forward: int, backward: int) -> float:
    spread = times.spread
    whole = min(spread.backward[backward], spread.input_grad[backward] + spread.weight_grad[backward])
    return spread.forward[forward] + whole - times.least(forward, backward)


def _first_input_gradients(instance: Instance, times: PairTimes) -> list[float]:
    """Return stage -> the earliest possible start of an input gradient."""
    place, costs, spread = instance.placement, instance.costs, times.spread
    last = instance.stages - 1
    clock = sum(spread.forward) + sum(costs.hop(a, b) for a, b in zip(place, place[1:], strict=False))
    starts = [0.0] * instance.stages
    for stage in range(last, -1, -1):
        starts[stage] = clock
        mates = [other for other in range(instance.stages) if place[other] == place[stage]]
        with_pairs = [times.time(other, stage, split) for other in mates for split in (True, False)]
        clock += min(spread.input_grad[stage], spread.backward[stage], *with_pairs)
        if stage:
            clock += costs.hop(place[stage], place[stage - 1])
    return starts


def _of_rank(instance: Instance, times: PairTimes, back: list[float], rank: int) -> float:
    spread, m = times.spread, instance.microbatches
    stages = [stage for stage in range(instance.stages) if instance.placement[stage] == rank]
    saved = {s: max(0.0, *(_saved(times, s, t) for t in stages)) for s in stages}
    work = sum(
        spread.forward[s] + min(spread.backward[s], spread.input_grad[s] + spread.weight_grad[s]) - saved[s]
        for s in stages
    )
    head = instance.heads[rank]
    wait = min(back[s] for s in stages) - head
    activation = instance.costs.per_stage("activation", instance.stages)
    gains = [(spread.forward[s] - saved[s], spread.forward[s], activation[s]) for s in stages]
    gains = [gain for gain in gains if gain[0] > 0]
    in_time = most_that_fits([(gain, time) for gain, time, _ in gains], m, wait)
    in_memory = most_that_fits([(gain, memory) for gain, _, memory in gains], m, instance.memory_limit + TIME_TOLERANCE)
    return head + m * work + max(0.0, wait - min(in_time, in_memory))
