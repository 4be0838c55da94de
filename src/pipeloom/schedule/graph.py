"""The dependency graph of a schedule, and the one loop that walks it: `check` asks whether it ends, `simulate` when.

An event is the end of a computation: F(stage, mb), the input gradient of (stage, mb) (by B or by I), W(stage, mb).
Every action waits for at most one event beside its place in the program:

    F of a route's first stage: nothing        F: F of the stage before
    B, I of a route's last stage: its own F    B, I: the input gradient of the stage after      W: its own input gradient

That a backward follows its own F needs no edge of its own: the chain through the last stage implies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from pipeloom.schedule.channels import neighbours
from pipeloom.schedule.model import Program, Schedule


@dataclass(frozen=True)
class Graph:
    """Events of a schedule as integers: F (stage, mb) -> stage * m + mb, input gradient + S m, W + 2 S m.

    Attributes:
        always: the index of an event that has always happened.
        event: code -> the event that the action ends with.
        needs: code -> the event that it waits for.
        source: code -> the rank where that event happens (its own rank for `always`).
        home: code -> its own rank.
    """

    always: int
    event: list[int]
    needs: list[int]
    source: list[int]
    home: list[int]

    @classmethod
    def of(cls, schedule: Schedule) -> Graph:
        m, stride = schedule.microbatches, schedule.kind_stride
        always = 3 * stride
        event = [*range(2 * stride), *range(stride, 3 * stride)]
        before, after = neighbours(schedule)
        forward, backward, weight = [], [], []
        forward_source, backward_source, own = [], [], []
        for stage, rank in enumerate(schedule.placement):
            at = stage * m
            own += [rank] * m
            previous, following = before[stage], after[stage]
            forward += range(previous * m, previous * m + m) if previous is not None else [always] * m
            forward_source += [schedule.placement[previous] if previous is not None else rank] * m
            backward += range(stride + following * m, stride + following * m + m) if following is not None else range(at, at + m)
            backward_source += [schedule.placement[following] if following is not None else rank] * m
            weight += range(stride + at, stride + at + m)
        return cls(
            always,
            event,
            forward + backward + backward + weight,
            forward_source + backward_source + backward_source + own,
            own * 4,
        )


@dataclass(frozen=True)
class Run:
    """What `walk` found.

    Attributes:
        starts, ends: rank -> times of its program's entries, as many as could run.
        event_end: event -> when it happened, None if never.
        stuck: the ranks that could not finish their program.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    event_end: list[float | None]
    stuck: list[int]


@dataclass(frozen=True)
class Weights:
    """Times that a walk adds up: code -> duration, code -> hop of the message waited for, pair code -> duration."""

    duration: Sequence[float]
    hop: Sequence[float]
    pair: dict[int, float]


@dataclass(frozen=True)
class Sleepers:
    """Event -> the ranks that wait for it; the ranks that may go on; rank -> the entry that it fell asleep at."""

    waiting: dict[int, list[int]]
    ready: list[int]
    held: list[tuple[Any, ...]]

    def entries(self, rank: int, feed: Iterator[Any]) -> Iterator[Any]:
        """The entry that `rank` fell asleep at, then the rest of its feed."""
        held, self.held[rank] = self.held[rank], ()
        return chain(held, feed)


def walk(schedule: Schedule, graph: Graph, weights: Weights, clocks: Sequence[float] | None = None) -> Run:
    """Every rank runs its program as early as order and messages allow; each starts at its clock (default 0).

    Linear in the number of actions. A rank that waits for an event sleeps until that event wakes it; a schedule with a
    cycle leaves ranks asleep, listed in `stuck`.
    """
    event_end: list[float | None] = [None] * graph.always
    event_end.append(0.0)
    event_end.append(None)  # written by entries that are no pair
    feed = _pair_feed if schedule.has_pairs else _feed
    feeds = [feed(program, schedule, graph, weights) for program in schedule.codes]
    starts: list[list[float]] = [[] for _ in schedule.codes]
    ends: list[list[float]] = [[] for _ in schedule.codes]
    clock = list(clocks) if clocks is not None else [0.0] * schedule.ranks
    sleepers = Sleepers({}, list(range(schedule.ranks)), [()] * schedule.ranks)
    step = _advance_pairs if schedule.has_pairs else _advance
    while sleepers.ready:
        rank = sleepers.ready.pop()
        clock[rank] = step(rank, feeds, event_end, clock[rank], (starts[rank], ends[rank]), sleepers)
    stuck = [rank for rank, program in enumerate(schedule.codes) if len(ends[rank]) < len(program)]
    return Run(starts, ends, event_end[: graph.always], stuck)


def _feed(program: Program, schedule: Schedule, graph: Graph, weights: Weights) -> Iterator[Any]:
    return zip(
        map(graph.event.__getitem__, program),
        map(graph.needs.__getitem__, program),
        map(weights.hop.__getitem__, program),
        map(weights.duration.__getitem__, program),
        strict=True,
    )


def _advance(
    rank: int,
    feeds: list[Iterator[Any]],
    event_end: list[float | None],
    clock: float,
    times: tuple[list[float], list[float]],
    sleepers: Sleepers,
) -> float:
    """Runs `rank` until its program ends or it must wait; returns its clock."""
    start, end = times[0].append, times[1].append
    waiting, ready = sleepers.waiting, sleepers.ready
    for entry in sleepers.entries(rank, feeds[rank]):
        event, need, hop, duration = entry
        at = event_end[need]
        if at is None:
            waiting.setdefault(need, []).append(rank)
            sleepers.held[rank] = (entry,)
            break
        at += hop
        if at < clock:
            at = clock
        start(at)
        clock = at + duration
        end(clock)
        event_end[event] = clock
        if event in waiting:
            ready.extend(waiting.pop(event))
    return clock


def _pair_feed(program: Program, schedule: Schedule, graph: Graph, weights: Weights) -> Iterator[Any]:
    """As `_feed`, with a second event, need and hop: those of a pair's backward, or ones that do nothing."""
    limit = 4 * schedule.kind_stride
    for code in program:
        if code < limit:
            nothing = (graph.always + 1, graph.always, 0.0)
            yield graph.event[code], graph.needs[code], weights.hop[code], weights.duration[code], *nothing
        else:
            forward, backward = divmod(code, limit)
            forward -= 1
            yield (
                graph.event[forward],
                graph.needs[forward],
                weights.hop[forward],
                weights.pair[code],
                graph.event[backward],
                graph.needs[backward],
                weights.hop[backward],
            )


def _advance_pairs(
    rank: int,
    feeds: list[Iterator[Any]],
    event_end: list[float | None],
    clock: float,
    times: tuple[list[float], list[float]],
    sleepers: Sleepers,
) -> float:
    """As `_advance`, for programs with pairs."""
    waiting, ready = sleepers.waiting, sleepers.ready
    for entry in sleepers.entries(rank, feeds[rank]):
        event, need, hop, duration, event2, need2, hop2 = entry
        at, at2 = event_end[need], event_end[need2]
        if at is None or at2 is None:
            waiting.setdefault(need if at is None else need2, []).append(rank)
            sleepers.held[rank] = (entry,)
            break
        at = max(clock, at + hop, at2 + hop2)
        times[0].append(at)
        clock = at + duration
        times[1].append(clock)
        event_end[event] = event_end[event2] = clock
        for happened in (event, event2):
            if happened in waiting:
                ready.extend(waiting.pop(happened))
    return clock


def nothing_but_order(schedule: Schedule) -> Weights:
    """Weights of zero: a walk with them finds out only whether the schedule can run."""
    zeros = [0.0] * (4 * schedule.kind_stride)
    limit = 4 * schedule.kind_stride
    pairs: Iterable[int] = (code for program in schedule.codes for code in program if code >= limit)
    return Weights(zeros, zeros, dict(zip(pairs, repeat(0.0))) if schedule.has_pairs else {})

