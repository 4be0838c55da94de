"""The steady state of a schedule, repeated: a construction for few micro-batches gives the programs for many.

Once every rank has settled, its program runs the same actions for a few micro-batches (a period) again and again. Planning is
slow and repeating is fast: families plan for as many micro-batches as it takes to settle, and repeat a period for the rest.

A period begins on every rank at the same time, so that what was computed by then is all that the actions before it need. It
holds as many micro-batches of every action, so the same is true of what was computed at its end, and of any number of
periods: the longer schedule cannot deadlock, and no rank holds more memory than in the shorter one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import add

from pipeloom.errors import ScheduleError
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Objective, Timeline

PERIODS = (1, 2, 3, 4, 6, 12)  # micro-batches of a period; each divides the last
MOST_CELLS_PLANNED_WHOLE = 1_500  # largest p m for which nothing is repeated
MORE_TO_SETTLE = 32  # micro-batches beyond the 2p that a route of 2p stages holds


@dataclass(frozen=True)
class SteadyState:
    """A part of a schedule that can be repeated.

    Attributes:
        microbatches: that it holds of every action.
        begins: rank -> the index of its first action.
        interval: the most time that a repetition adds.
    """

    microbatches: int
    begins: tuple[int, ...]
    interval: float


def plan(
    sizes: tuple[int, int], costs: Costs, objective: Objective, candidates: Callable[[int], Iterable[Schedule]]
) -> Schedule:
    """Return the shortest schedule of `sizes` (p, m): of `candidates(m)`, or of those for fewer micro-batches, repeated.

    The shortest has the least makespan, and of equal ones the least largest span; with the objective "span", the other way round.
    """

    def in_turn(makespan: float, span: float) -> tuple[float, float]:
        makespan, span = round(makespan, 9), round(span, 9)
        return (makespan, span) if objective == "makespan" else (span, makespan)

    def length(timeline: Timeline, added: float) -> tuple[float, float]:
        return in_turn(timeline.makespan + added, max(timeline.spans) + added)

    def least(timeline: Timeline) -> tuple[float, float]:
        busy = timeline.busy
        return in_turn(max(map(add, _first_inputs(timeline.schedule, costs), busy)), max(busy))

    ranks, microbatches = sizes
    settled = 2 * ranks + MORE_TO_SETTLE
    many = ranks * microbatches > MOST_CELLS_PLANNED_WHOLE and microbatches > settled + PERIODS[-1]
    if many and not costs.uneven:
        planned = settled + (microbatches - settled) % PERIODS[-1]
        best = shortest(candidates(planned), microbatches, replace(costs, microbatch=()), length)
        if best is not None:
            return best
    best = shortest(candidates(microbatches), microbatches, costs, length, least=None if costs.uneven else least)
    if best is None:  # pragma: no cover - every family has a candidate that runs
        raise ScheduleError(f"no schedule for {ranks} ranks and {microbatches} micro-batches can run")
    return best


def shortest(
    schedules: Iterable[Schedule],
    microbatches: int,
    costs: Costs,
    length: Callable[[Timeline, float], tuple[float, ...]],
    periods: Sequence[int] = PERIODS,
    least: Callable[[Timeline], tuple[float, ...]] | None = None,
) -> Schedule | None:
    """Return the schedule of the least `length` for `microbatches`, its steady state repeated where it has fewer.

    `length` is given a schedule's timeline and the time that the repetitions add. Schedules that cannot run, or that need a
    steady state and have none, are left out; None if no schedule is left. The first whose length is the `least` that a schedule
    with its work can have ends the search: most of the time goes into constructing the others.
    """
    estimates = []
    for schedule in schedules:
        more, added, steady = microbatches - schedule.microbatches, 0.0, None
        try:
            timeline = simulate(schedule, costs)
        except ScheduleError:
            continue
        if more:
            steady = steady_state(timeline, [period for period in periods if more % period == 0])
            if steady is None:
                continue
            added = more // steady.microbatches * steady.interval
        estimates.append((length(timeline, added), schedule, steady))
        if least is not None and estimates[-1][0] == least(timeline):
            break
    if not estimates:
        return None
    _, schedule, steady = min(estimates, key=lambda estimate: estimate[0])
    return schedule if steady is None else repeated(schedule, steady, microbatches)


def _first_inputs(schedule: Schedule, costs: Costs) -> list[float]:
    """Return when the first input of each rank, of a schedule of one route, can be there."""
    forward, rank, arrival = StageCosts(costs, schedule.stages).forward, schedule.placement[0], 0.0
    first: dict[int, float] = {}
    for stage in schedule.routes[0]:
        arrival += costs.hop(rank, rank := schedule.placement[stage])
        first.setdefault(rank, arrival)
        arrival += forward[stage]
    return [first[rank] for rank in range(schedule.ranks)]


def steady_state(timeline: Timeline, periods: Iterable[int]) -> SteadyState | None:
    """Return the part of `periods` micro-batches that takes the least time for each; None where there is none."""
    schedule, starts = timeline.schedule, timeline.starts
    words = [[code // schedule.microbatches for code in program] for program in schedule.codes]
    best: SteadyState | None = None
    for period in periods:
        if 2 * period > schedule.microbatches:
            break
        sizes = [len(word) // schedule.microbatches * period for word in words]
        balanced = [balanced_windows(word, period)[:-1] for word in words]  # behind each, the time of the next action
        for first, begin in enumerate(starts[0][: len(balanced[0])]):
            if not balanced[0][first]:
                continue
            begins = [bisect_left(times, begin) for times in starts]
            if not all(at < len(fits) and fits[at] for at, fits in zip(begins, balanced, strict=True)):
                continue
            intervals = [times[at + size] - times[at] for at, times, size in zip(begins, starts, sizes, strict=True)]
            longest = max(intervals)
            if best is None or longest / period < best.interval / best.microbatches - TIME_TOLERANCE:
                best = SteadyState(period, tuple(begins), longest)
            if longest - min(intervals) <= TIME_TOLERANCE:
                return best
    return best


def balanced_windows(word: Sequence[int], period: int) -> list[bool]:
    """Return for each start of a window, `period` times as long as `word` has different items, whether it holds each so often."""
    held = Counter(dict.fromkeys(word, -period))
    size = period * len(held)
    held.update(word[:size])
    uneven = sum(1 for balance in held.values() if balance)
    fits = []
    for gone, new in zip(word, word[size:], strict=False):
        fits.append(not uneven)
        if gone != new:
            uneven += (held[gone] == 0) - (held[gone] == 1) + (held[new] == 0) - (held[new] == -1)
            held[gone] -= 1
            held[new] += 1
    return [*fits, not uneven]


def repeated(schedule: Schedule, steady: SteadyState, microbatches: int) -> Schedule:
    """Return `schedule`, of one route, for more micro-batches: `steady` is repeated. It must divide the micro-batches to add."""
    before, times = schedule.microbatches, (microbatches - schedule.microbatches) // steady.microbatches
    words = [[code // before for code in program] for program in schedule.codes]
    codes = tuple(
        tuple(extended(word, (begin, begin + len(word) // before * steady.microbatches), times, microbatches))
        for word, begin in zip(words, steady.begins, strict=True)
    )
    return replace(schedule, microbatches=microbatches, route_of=(0,) * microbatches, codes=codes)


def extended(word: list[int], window: tuple[int, int], times: int, microbatches: int) -> list[int]:
    """Return the numbers, what * microbatches + micro-batch, of `word` with a window (begin, end) repeated `times` more."""
    begin, end = window
    following = {what: count(what * microbatches) for what in set(word)}
    return [next(following[what]) for what in [*word[:begin], *word[begin:end] * times, *word[begin:]]]
