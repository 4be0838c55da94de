"""Causes of idle time: every gap between two entries of a rank's program, cut by what the rank waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from pipeloom.schedule.actions import OUTPUT, kinds
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.model import Schedule

Cause = Literal["dependency", "message", "memory", "end of step", "overhead"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Causes for which a rank idles.

- dependency: what the next entry needs is not computed yet.
- message: it is computed, and on its way.
- memory: the rank waits for a backward while a later forward of its program has its input, and running that forward now
  would exceed the rank's own peak memory.
- end of step: the rank has nothing left to do.
- overhead: everything is there and nothing runs; a simulated timeline has none.
"""


class Gap(NamedTuple):
    """An interval in which a rank idles for one cause, before entry `at` of its program (its length: at the end)."""

    start: float
    end: float
    cause: Cause
    at: int


class TimedSchedule(Protocol):
    """The part of a `Timeline` that decides the causes; its attributes are described there."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def costs(self) -> Costs: ...
    @property
    def starts(self) -> tuple[tuple[float, ...], ...]: ...
    @property
    def ends(self) -> tuple[tuple[float, ...], ...]: ...
    @property
    def overlap_p2p(self) -> bool: ...
    @property
    def peak_memory(self) -> Sequence[float]: ...
    @property
    def memory_changes(self) -> Sequence[float]: ...


def gaps(timeline: TimedSchedule) -> tuple[tuple[Gap, ...], ...]:
    """rank -> its gaps from the start of the step to its end, in order. Linear in the number of entries."""
    schedule = timeline.schedule
    if not any(timeline.starts):
        return ((),) * schedule.ranks
    maker = _makers(timeline)
    origin = min(starts[0] for starts in timeline.starts if starts)
    finish = max(ends[-1] for ends in timeline.ends if ends)
    return tuple(_gaps_of(timeline, rank, maker, (origin, finish)) for rank in range(schedule.ranks))


class _Makers(NamedTuple):
    """event -> (rank, position) of the entry that produces it, and the graph with the needs of each code."""

    graph: Graph
    place: dict[int, tuple[int, int]]


def _makers(timeline: TimedSchedule) -> _Makers:
    schedule = timeline.schedule
    graph = Graph.of(schedule, full=True)
    assert graph.event is not None
    place: dict[int, tuple[int, int]] = {}
    for rank in range(schedule.ranks):
        for codes in schedule.split_entries(rank):
            for at, code in enumerate(codes):
                if graph.event[code] < graph.always:
                    place[graph.event[code]] = rank, at
    return _Makers(graph, place)


def _arrival(
    timeline: TimedSchedule, maker: _Makers, rank: int, code: int, clock: float
) -> tuple[float, float, int] | None:
    """(arrival, end of what produces it, rank of that) of what the action waits for longest; None where it waits for nothing.

    `clock`: when its rank is free. Without `overlap_p2p` the message travels only from then on.
    """
    factor = timeline.costs.factors(timeline.schedule.microbatches)[code % timeline.schedule.microbatches]
    arrivals = []
    for event, name in maker.graph.waits_of(code):
        if event not in maker.place:
            continue
        source, position = maker.place[event]
        end = timeline.ends[source][position]
        leaves = end if timeline.overlap_p2p else max(clock, end)
        arrivals.append((leaves + timeline.costs.hop(source, rank, factor, name), end, source))
    return max(arrivals, default=None)


def _gaps_of(timeline: TimedSchedule, rank: int, maker: _Makers, step: tuple[float, float]) -> tuple[Gap, ...]:
    schedule = timeline.schedule
    firsts, seconds = schedule.split_entries(rank)
    forwards = [OUTPUT in kind.produces for kind in kinds()]
    none, stride = schedule.no_action, schedule.kind_stride
    clock, finish = step
    dust = 1e-9 * (finish - clock)
    peak, level = timeline.peak_memory[rank], 0.0
    change = timeline.memory_changes
    upcoming = _upcoming_forwards(firsts, [forwards[code // stride] for code in firsts])
    rank_gaps: list[Gap] = []
    for at, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        start = timeline.starts[rank][at]
        if start > clock + dust:
            waits = [_arrival(timeline, maker, rank, code, clock) for code in (first, second) if code != none]
            latest = max((wait for wait in waits if wait is not None), default=None)
            cuts = _cuts(clock, start, latest, rank)
            later = upcoming[at]
            if later is not None and not forwards[first // stride] and level + change[later] > peak + 1e-9 * peak:
                ready = _arrival(timeline, maker, rank, later, clock)
                cuts = _for_memory(cuts, clock if ready is None else ready[0])
            rank_gaps += (Gap(*cut, at) for cut in cuts if cut[1] > cut[0] + dust)
        level += change[first] + (change[second] if second != none else 0.0)
        clock = timeline.ends[rank][at]
    if finish > clock + dust:
        rank_gaps.append(Gap(clock, finish, "end of step", len(firsts)))
    return tuple(rank_gaps)


def _upcoming_forwards(codes: object, is_forward: list[bool]) -> list[int | None]:
    """position -> the code of the first forward at it or after it."""
    upcoming: list[int | None] = [None] * len(is_forward)
    following: int | None = None
    for at in reversed(range(len(is_forward))):
        if is_forward[at]:
            following = codes[at]  # type: ignore[index]
        upcoming[at] = following
    return upcoming


_Cut = tuple[float, float, Cause]


def _cuts(clock: float, start: float, wait: tuple[float, float, int] | None, rank: int) -> list[_Cut]:
    """The interval from `clock` to `start` as dependency, message and overhead, given the last arrival waited for."""
    if wait is None:
        return [(clock, start, "overhead")]
    arrival, end, source = wait
    computed = min(start, max(clock, end))
    moving = source != rank and arrival > clock
    return [(clock, computed, "dependency"), (computed, start, "message" if moving else "overhead")]


def _for_memory(cuts: list[_Cut], ready: float) -> list[_Cut]:
    """`cuts` with everything from `ready` on attributed to memory."""
    before: list[_Cut] = [(start, min(end, ready), cause) for start, end, cause in cuts if start < ready]
    start, end = max(cuts[0][0], ready), cuts[-1][1]
    return [*before, (start, end, "memory")] if start < end else before
