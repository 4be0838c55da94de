"""Lower bounds on the makespan, each with its domain."""

from __future__ import annotations

from pipeloom.schedule.channels import neighbours
from pipeloom.schedule.costs import Costs, PairTimes, StageCosts
from pipeloom.schedule.model import Schedule


def lower_bound(schedule: Schedule, costs: Costs | None = None, *, split_backward: bool = True) -> float:
    """A makespan that no schedule with this placement, these routes, m and costs can beat.

    The largest, over the ranks, of

    * head: the rank's work (F + I + W of all its stages and micro-batches, less what pairs could save) after the
      least, over its stages, of the forward prefix of the stage's route and its hops: before that, nothing can start
      there. Holds for loops, V placements and two routes alike.
    * with `split_backward=False` and one route (no schedule with I and W apart is considered): the suffix too. After a
      rank's last backward, of stage s, the backwards of stages s-1 .. 0 and their hops still follow.

    Memory does not enter. Source: SPEC section 3, "work" and "head".
    """
    chosen = costs if costs is not None else Costs()
    spread = StageCosts.of(chosen, schedule.stages)
    before, _ = neighbours(schedule)
    prefix, suffix = [0.0] * schedule.stages, [0.0] * schedule.stages
    for route in schedule.routes:
        for stage in route:
            previous = before[stage]
            if previous is not None:
                here, there = schedule.placement[stage], schedule.placement[previous]
                prefix[stage] = prefix[previous] + spread.forward[previous] + chosen.hop(there, here)
                suffix[stage] = suffix[previous] + spread.backward[previous] + chosen.hop(here, there)
    count = [sum(1 for taken in schedule.route_of if taken == route) for route in range(len(schedule.routes))]
    uses = {stage: count[route] for route, stages in enumerate(schedule.routes) for stage in stages}
    best = 0.0
    for stages in schedule.stages_of:
        busy = [stage for stage in stages if uses[stage]]
        if not busy:
            continue
        work = _least_work(chosen, schedule.stages, [(stage, uses[stage]) for stage in busy])
        head = min(prefix[stage] for stage in busy)
        tail = min(suffix[stage] for stage in busy) if not split_backward and len(schedule.routes) == 1 else 0.0
        best = max(best, work + head + tail)
    return round(best, 9)


def _least_work(costs: Costs, stages: int, uses: list[tuple[int, int]]) -> float:
    """The least time in which one rank can do its (stage, how often): each forward alone, or in its cheapest pair.

    With all-to-all, computation alone and communication alone are bounds, too; they are what pairs can reach.
    """
    times = PairTimes.of(costs, stages)
    spread = times.spread
    alone = sum(count * (spread.forward[stage] + spread.backward[stage]) for stage, count in uses)
    if times.given is None:
        talk = sum(c * times.share[s] * (spread.forward[s] + spread.input_grad[s]) for s, c in uses)
        return max(alone - talk, talk)
    saved = 0.0
    for stage, count in uses:
        gain = max(
            spread.forward[stage] + spread.backward[other] - times.time(stage, other, False) for other, _ in uses
        )
        saved += count * max(0.0, gain)
    return max(0.0, alone - saved)
