"""Measured steps: clocks aligned, times of actions and hops, how well these predict other steps, slow stages, time by use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf
from statistics import fmean, median
from typing import Any, NamedTuple

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule.actions import Action
from pipeloom.schedule.costs import STAGE_TIME, Costs, StageCosts, durations
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import COMMUNICATIONS, Exposed, Timeline

TimeRows = Sequence[Sequence[float]]

# Two events of one rank may overlap by this share of the shorter one: timers of two streams differ a little.
_OVERLAP = 0.02


class MeasuredSteps(NamedTuple):
    """Steps that were measured.

    Attributes:
        timelines: one for each step, in seconds.
        memory: rank -> GB, the largest of the steps; empty where it is not known.
        notes: how another program's trace was read, and what was ambiguous.
    """

    timelines: tuple[Timeline, ...]
    memory: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


# -- clocks --------------------------------------------------------------------------------------------------------------


def needs(schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, entry) of the producer and of the receiver of each message, four numbers in all; also within a rank."""
    graph = Graph.of(schedule, full=True)
    assert graph.event is not None
    entries = [schedule._split_entries(rank) for rank in range(schedule.ranks)]
    maker = {
        graph.event[code]: (rank, at)
        for rank, both in enumerate(entries)
        for codes in both
        for at, code in enumerate(codes)
    }
    for rank, both in enumerate(entries):
        for codes in both:
            for at, code in enumerate(codes):
                source = maker.get(graph.needs[code]) if graph.needs[code] < graph.always else None
                if source is not None:
                    yield (*source, rank, at)


def offsets(schedule: Schedule, starts: TimeRows, ends: TimeRows) -> tuple[list[float], float]:
    """Return (rank -> seconds to add to its clock, the most by which a message still arrives before it is sent).

    The shifts are the smallest from 0 on with which no message arrives before it is sent, as longest paths over the ranks
    (Bellman and Ford). They are needed because each rank's clock begins with its own iteration.
    """
    bound: dict[tuple[int, int], float] = {}
    for source, at_source, rank, at in needs(schedule):
        if source != rank:
            late = ends[source][at_source] - starts[rank][at]
            bound[source, rank] = max(late, bound.get((source, rank), late))
    shifts = [0.0] * schedule.ranks
    for _ in range(schedule.ranks):
        for (source, rank), late in bound.items():
            shifts[rank] = max(shifts[rank], shifts[source] + late)
    left = max((shifts[source] + late - shifts[rank] for (source, rank), late in bound.items()), default=0.0)
    return shifts, max(0.0, left)


def aligned(schedule: Schedule, starts: TimeRows, ends: TimeRows) -> Timeline:
    """Return the timeline with the ranks' clocks aligned; its times count from its first action.

    Raises ScheduleError where two entries on one queue of a rank overlap: a queue runs one at a time.
    """
    starts = [_in_turn(schedule, rank, row, ends[rank]) for rank, row in enumerate(starts)]
    shifts, _ = offsets(schedule, starts, ends)
    origin = min(row[0] + shift for row, shift in zip(starts, shifts, strict=True) if row)

    def shifted(times: TimeRows) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time + shift - origin for time in row) for row, shift in zip(times, shifts, strict=True))

    begins, stops = shifted(starts), shifted(ends)
    return Timeline.measured(schedule, begins, stops)


def _in_turn(schedule: Schedule, rank: int, starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """The starts, each no earlier than the end of the entry before on its queue."""
    turns = list(starts)
    program = schedule.programs[rank]
    for before, at in (pair for positions in schedule.queues[rank].values() for pair in pairwise(positions)):
        late = ends[before] - turns[at]
        if late > _OVERLAP * min(ends[before] - turns[before], ends[at] - starts[at]) + 1e-9:
            raise ScheduleError(
                f"rank {rank} begins {program[at]} {late * 1e3:.4g} ms before {program[before]} ends; a rank runs one at a time"
            )
        turns[at] = min(max(turns[at], ends[before]), ends[at])
    return turns


# -- costs and predictions ------------------------------------------------------------------------------------------------


def costs_of(timelines: Sequence[Timeline]) -> Costs:
    """Stage costs, the hop, and the factors of the micro-batches where these differ, of some measured steps, in seconds.

    Over the steps, the median of each one's mean.

    The hop is the median of those that a rank waited for; 0 where none did. Of senders that wait it is as given.
    """
    schedule, given = timelines[0].schedule, timelines[0].costs

    def medians(rows: Iterable[Iterable[float]]) -> tuple[float, ...]:
        return tuple(median(column) for column in zip(*rows, strict=True))

    def shares(name: str) -> tuple[float, ...]:
        middles = medians(getattr(timeline.costs, name) for timeline in timelines)
        return tuple(each / sum(middles) for each in middles)

    spread = [StageCosts(timeline.costs, schedule.stages) for timeline in timelines]
    names = set.intersection(*(set(timeline.costs.stage_times()) for timeline in timelines))
    names |= {str(kind.time) for kind in schedule.kinds if kind.vocabulary and schedule.vocabulary}
    times: dict[str, Any] = {name: medians(each.time_of(name) for each in spread) for name in names}
    waited = [seconds for t in timelines for seconds in hops(t.schedule, t.starts, t.ends)]
    return Costs(
        parts={part: medians(each.time_of(f"recompute:{part}") for each in spread) for part in spread[0].parts},
        p2p=given.p2p if given.sends != "free" else max(0.0, median(waited)) if waited else 0.0,
        sends=given.sends,
        microbatch=_factors(timelines),
        slice_times=shares("slice_times"),
        slice_sizes=shares("slice_sizes"),
        **times,
    )


def _factors(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Return micro-batch -> its time over the mean one, a median; empty where they differ by no more than noise.

    The median and the noise are those over the steps, or, of a single step, over the actions of one kind and stage.
    """
    if len(timelines) > 1:
        rows = [_ratios(step)[""] for step in timelines]
    else:
        rows = [row for name, row in _ratios(timelines[0]).items() if name]
    if len(rows) < 2:
        return ()
    columns = list(zip(*rows, strict=True))
    factors = [median(column) for column in columns]
    noise = median(median(abs(x - f) for x in column) for column, f in zip(columns, factors, strict=True))
    mean = fmean(factors)
    if mean == 0 or max(abs(factor / mean - 1) for factor in factors) <= max(LEAST_EXCESS, 3 * noise):
        return ()
    return tuple(factor / mean for factor in factors)


def _ratios(timeline: Timeline) -> dict[str, list[float]]:
    """Return micro-batch -> the time of its actions over that with the step's mean costs, of each kind and stage and (under "")
    of all; pairs are left out.
    """
    sums = {"": [[0.0, 0.0] for _ in range(timeline.schedule.microbatches)]}
    for action, seconds, mean in _timed(timeline, replace(timeline.costs, microbatch=())):
        for name in ("", f"{action.kind} of stage {action.stage}") if mean > 0 else ():
            of_microbatch = sums.setdefault(name, [[0.0, 0.0] for _ in sums[""]])[action.microbatch]
            of_microbatch[0] += seconds
            of_microbatch[1] += mean
    return {name: [time / mean if mean else 1.0 for time, mean in pairs] for name, pairs in sums.items()}


def _timed(timeline: Timeline, costs: Costs) -> Iterator[tuple[Action, float, float]]:
    """Yield each action that is in no pair, the time that it took, and that which it has by these costs."""
    schedule = timeline.schedule
    expected = durations(schedule, costs)
    for codes, starts, ends in zip(schedule.codes, timeline.starts, timeline.ends, strict=True):
        for code, start, end in zip(codes, starts, ends, strict=True):
            if code < schedule._no_action:
                yield parts(schedule.decode(code))[0], end - start, expected[code]


def hops(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[float]:
    """Times from the end of an action to the start of the one on another rank that waited for its message."""
    # An action, and a pair's two, wait for the latest of what they need.
    last: dict[tuple[int, int], tuple[float, int]] = {}
    for source, at_source, rank, at in needs(schedule):
        end = ends[source][at_source]
        last[rank, at] = max(last.get((rank, at), (end, source)), (end, source))
    return [
        starts[rank][at] - end
        for (rank, at), (end, source) in last.items()
        if at and source != rank and end > ends[rank][at - 1]
    ]


def overhead(timeline: Timeline) -> float:
    """Mean time from the end of an action to the start of the next on its rank, where no message was missing; 0 without any."""
    schedule, starts, ends = timeline.schedule, timeline.starts, timeline.ends
    arrived = {(rank, at): -inf for rank, row in enumerate(starts) for at in range(1, len(row))}
    for source, at_source, rank, at in needs(schedule):
        if source != rank and at:
            arrived[rank, at] = max(arrived[rank, at], ends[source][at_source])
    gaps = [starts[rank][at] - ends[rank][at - 1] for (rank, at), end in arrived.items() if end <= ends[rank][at - 1]]
    return max(0.0, fmean(gaps)) if gaps else 0.0


def with_overhead(costs: Costs, timelines: Sequence[Timeline]) -> Costs:
    """`costs` in which every action includes the host's time before it, so that I and W have it twice for B's once.

    A hop, measured to the start of the action that waited for it, has it already.
    """
    more, stages = median(overhead(timeline) for timeline in timelines), timelines[0].schedule.stages
    assert not isinstance(costs.p2p, tuple)  # fitted costs have one hop
    whole = replace(costs, backward=StageCosts(costs, stages).backward, p2p=max(0.0, costs.p2p - more))
    return whole.changed(lambda name, row: tuple(seconds + more for seconds in row), STAGE_TIME)


@dataclass(frozen=True)
class Prediction:
    """Accuracy with which costs fitted on some measured steps predict others of the same run.

    Attributes:
        costs: of the stages and of a hop, fitted on the first half of the steps.
        fitted, tested: how many steps each half has; of a single step, the second half is that step, and `tested` is 0.
        simulated: the makespan with these costs.
        measured: the median makespan of the second half.
        by_kind: kind -> mean time of an action in the second half over its fitted time, less 1.
        speed: time of all actions of the second half's median step over their fitted time: 0.9 where the machine had become
            faster.
    """

    costs: Costs
    fitted: int
    tested: int
    simulated: float
    measured: float
    by_kind: Mapping[str, float]
    speed: float = 1.0

    @property
    def error(self) -> float:
        """Simulated over measured makespan, less 1."""
        return self.simulated / self.measured - 1 if self.measured else 0.0

    @property
    def error_at_speed(self) -> float:
        """The error with costs times `speed`: the part due to order, messages and waiting, not to the machine's speed."""
        return self.simulated * self.speed / self.measured - 1 if self.measured else 0.0


def predict(timelines: Sequence[Timeline]) -> Prediction:
    """Fit costs on the first half of the steps and predict the second; the very first one is left out where there are more
    than three, because it includes warm-up. A single step predicts nothing: `tested` is 0.

    Raises UsageError where there is no step.
    """
    steps = settled(timelines)
    half = max(1, len(steps) // 2)
    fitted, tested = steps[:half], steps[half:] or steps
    costs = _with_stalls(costs_of(fitted), fitted)
    simulated = simulate(tested[-1].schedule, costs)
    promised = sum(simulated.busy)
    return Prediction(
        costs,
        len(fitted),
        len(steps[half:]),
        simulated.makespan,
        median(timeline.makespan for timeline in tested),
        _errors_by_kind(tested, costs),
        median(sum(timeline.busy) for timeline in tested) / promised if promised else 1.0,
    )


def _with_stalls(costs: Costs, steps: Sequence[Timeline]) -> Costs:
    """`costs`, medians by stage, scaled so that a step takes as long as the median step simulated with its own costs.

    A stall of the host hits a different stage in each step, so the medians of the stages leave out all stalls, and a step
    simulated with them would be shorter than any real one.
    """
    whole = simulate(steps[-1].schedule, costs).makespan
    step_costs = (replace(costs_of([step]), microbatch=costs.microbatch) for step in steps)
    spans = [simulate(step.schedule, each).makespan for step, each in zip(steps, step_costs, strict=True)]
    return costs.scaled(median(spans) / whole) if whole else costs


def predict_another(costs: Costs, fitted: Schedule, timelines: Sequence[Timeline]) -> tuple[float, float]:
    """(simulated, median measured) makespan of another run of the same model, from costs fitted on steps of `fitted`.

    Costs are assigned by position in a route, so they apply to replicas and other placements too. Where the routes differ in
    length, each stage's time is spread evenly over its part of the model, and the other run's stages are equal parts of it.
    """
    steps = settled(timelines)
    schedule = steps[-1].schedule

    def recut(name: str, values: Any) -> Any:
        if not isinstance(values, tuple):
            return values * fitted.positions / schedule.positions
        by_position = [
            fmean(value for value, at in zip(values, fitted.position_of, strict=True) if at == position)
            for position in range(fitted.positions)
        ]
        new = _spread(by_position, schedule.positions)
        return tuple(new[at] for at in schedule.position_of)

    return simulate(schedule, costs.changed(recut, STAGE_TIME)).makespan, median(step.makespan for step in steps)


def _spread(values: Sequence[float], count: int) -> list[float]:
    """Return the sums of `values`, taken as equal parts of a line, over `count` equal parts of it."""
    old = len(values)

    def share(at: int, part: int) -> float:  # of a value, in lengths of which the line has old * count
        return max(0, min((at + 1) * count, (part + 1) * old) - max(at * count, part * old)) / count

    return [sum(value * share(at, part) for at, value in enumerate(values)) for part in range(count)]


def settled(timelines: Sequence[Timeline]) -> Sequence[Timeline]:
    """The steps without the first where there are more than three; of the last step's schedule only."""
    if not timelines:
        raise UsageError("there is no measured step")
    last = timelines[-1].schedule
    same = [timeline for timeline in timelines if timeline.schedule == last]
    return same[1:] if len(same) > 3 else same


def _errors_by_kind(timelines: Sequence[Timeline], costs: Costs) -> dict[str, float]:
    """kind -> mean measured time over the fitted one, less 1; kinds of pairs, and those that take no time, are left out."""
    took: dict[str, list[tuple[float, float]]] = {}
    for action, *times in (each for timeline in timelines for each in _timed(timeline, costs)):
        took.setdefault(action.kind, []).append((times[0], times[1]))
    return {
        kind: fmean(real for real, _ in pairs) / fmean(fitted for _, fitted in pairs) - 1
        for kind, pairs in took.items()
        if fmean(fitted for _, fitted in pairs) > 0
    }


SPENT = ("computation", *COMMUNICATIONS, "dependency", "memory", "overhead", "end of step")
"""Uses of a rank's time: computation, exposed communication by kind, idle time by cause (overhead is the host's).

The causes are the `CAUSES` of `schedule/timeline.py`, with p2p for its "message".
"""


def step_time(timeline: Timeline) -> float:
    """The time from the first action of any rank until every rank's gradients are complete."""
    return max([timeline.makespan, *(each.end - timeline.begin for each in timeline.exposed)])


def time_spent(timelines: Sequence[Timeline]) -> tuple[dict[str, float], ...]:
    """rank -> the time of a step by use, under the names in `SPENT`, the mean over the steps. A rank's row adds up to the mean
    of their `step_time`.
    """
    tables = [_spent(timeline) for timeline in timelines]
    return tuple({name: fmean(row[name] for row in rows) for name in SPENT} for rows in zip(*tables, strict=True))


def _spent(timeline: Timeline) -> list[dict[str, float]]:
    """rank -> the time of one step by use."""
    origin, whole = timeline.begin, step_time(timeline)
    exposed = timeline.exposed or (Exposed(),) * timeline.schedule.ranks
    rows = []
    for rank, rank_exposed in enumerate(exposed):
        row = dict.fromkeys(SPENT, 0.0)
        busy, inside = timeline.busy[rank], sum(rank_exposed.inside.values())
        # On a GPU the device's events time communications and the host's clock the actions: never more than all of it.
        share = min(1.0, busy / inside) if inside else 1.0
        for kind, seconds in rank_exposed.inside.items():
            row[kind] += share * seconds
        row["computation"] = busy - share * inside
        for cause, seconds in timeline.idle_by_cause[rank].items():
            row["p2p" if cause == "message" else cause] += seconds
        last = timeline.ends[rank][-1] if timeline.ends[rank] else origin
        tail = max(0.0, rank_exposed.end - last)
        spoken = sum(rank_exposed.after.values())
        share = min(1.0, tail / spoken) if spoken else 1.0
        for kind, seconds in rank_exposed.after.items():
            row[kind] += share * seconds
        row["overhead"] += tail - share * spoken
        row["end of step"] += whole - timeline.makespan - tail
        rows.append(row)
    return rows


@dataclass(frozen=True)
class SlowStage:
    """A stage that takes longer than its layers explain.

    Attributes:
        stage: its number.
        rank: the rank that holds it.
        excess: its time over that of the stages of its size, less 1.
    """

    stage: int
    rank: int
    excess: float


LEAST_EXCESS = 0.05
"""A stage is reported from this excess on: half of the smallest slowdown to be detected, and well above the difference between
the medians of equal stages in one process (1 to 2 %)."""


def slow_stages(timelines: Sequence[Timeline], layers: Sequence[float] | None = None) -> tuple[SlowStage, ...]:
    """The stages whose time per layer exceeds that of the others by more than noise.

    A stage's time is the median over the steps of its mean F + I + W. It is compared with the median of the other stages that
    have as much to do for each layer: not the first and the last, whose embedding and head are not layers, unless `layers`
    gives their cost in layers. Noise is the variation between the steps of a stage, and between the other stages.

    Args:
        layers: stage -> its layers, or their cost in layers; default: equal, first and last apart.
    """
    steps = settled(timelines)
    schedule = steps[0].schedule
    position, last = schedule.position_of, schedule.positions - 1
    sizes = list(layers) if layers is not None else [1.0] * schedule.stages
    alike = [s for s in range(schedule.stages) if sizes[s] > 0 and (layers is not None or 0 < position[s] < last)]
    times = {stage: [_stage_time(step, stage) / sizes[stage] for step in steps] for stage in alike}
    middle = {stage: median(values) for stage, values in times.items()}
    spread = {stage: median(abs(value - middle[stage]) for value in values) for stage, values in times.items()}
    outliers = []
    for stage in alike:
        others = [middle[other] for other in alike if other != stage]
        if len(others) < 2 or not median(others):
            continue
        typical = median(others)
        noise = max(median(spread.values()), spread[stage]) / typical
        differ = median(abs(a - b) for a, b in combinations(others, 2)) / typical
        excess = middle[stage] / typical - 1
        if excess > max(LEAST_EXCESS, 3 * noise, 3 * differ):
            outliers.append(SlowStage(stage, schedule.placement[stage], excess))
    return tuple(sorted(outliers, key=lambda slow: -slow.excess))


def _stage_time(timeline: Timeline, stage: int) -> float:
    stages = timeline.schedule.stages
    return sum(timeline.costs.per_stage(name, stages)[stage] for name in ("forward", "input_grad", "weight_grad"))


def drift(timelines: Sequence[Timeline]) -> float:
    """Return the growth in time from the first traced step to the last, as a share: the median slope between any two (Theil
    and Sen).
    """
    spans = [timeline.makespan for timeline in settled(timelines)]
    slopes = [(spans[b] - spans[a]) / (b - a) for a, b in combinations(range(len(spans)), 2)]
    return median(slopes) * (len(spans) - 1) / median(spans) if slopes and median(spans) else 0.0
