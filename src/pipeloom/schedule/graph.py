"""The dependency graph of a schedule, and the one loop that walks it: `check` asks whether it ends, `simulate` when.

An event is the end of a computation: F(stage, mb), the input gradient of (stage, mb) (by B or by I), W(stage, mb).
Every action waits for at most one event beside its place in the program:

    F of a route's first stage: nothing        F: F of the stage before
    B, I of a route's last stage: its own F    B, I: the input gradient of the stage after      W: its own input gradient

That a backward follows its own F needs no edge of its own: the chain through the last stage implies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeloom.schedule.channels import neighbours
from pipeloom.schedule.model import Program, Schedule

NEVER = math.inf


@dataclass(frozen=True)
class Graph:
    """Events of a schedule as integers: F (stage, mb) -> stage * m + mb, input gradient + S m, W + 2 S m.

    Attributes:
        always: the index of an event that has always happened.
        event: code -> the event that the action ends with.
        needs: code -> the event that it waits for.

    Both lists have one more entry, for the code that is no action: it needs `always` and makes `always + 1`.
    """

    always: int
    event: list[int]
    needs: list[int]

    @classmethod
    def of(cls, schedule: Schedule) -> Graph:
        m, stride = schedule.microbatches, schedule.kind_stride
        always = 3 * stride
        before, after = neighbours(schedule)
        forward: list[int] = []
        backward: list[int] = []
        for stage in range(schedule.stages):
            at = stage * m
            previous, following = before[stage], after[stage]
            forward += range(previous * m, previous * m + m) if previous is not None else [always] * m
            backward += range(stride + following * m, stride + following * m + m) if following is not None else range(at, at + m)
        return cls(
            always,
            [*range(2 * stride), *range(stride, 3 * stride), always + 1],
            [*forward, *backward, *backward, *range(stride, 2 * stride), always],
        )

    def maker(self, schedule: Schedule, event: int) -> int:
        """The rank where `event` happens."""
        return schedule.placement[event % schedule.kind_stride // schedule.microbatches]


@dataclass(frozen=True)
class Weights:
    """Times that a walk adds up: code -> duration, code -> hop of the message waited for, pair code -> duration.

    `hop` is None when all hops are free. Both lists have one more entry, for the code that is no action.
    """

    duration: Sequence[float]
    hop: Sequence[float] | None
    pair: dict[int, float]


@dataclass(frozen=True)
class Run:
    """What `walk` found.

    Attributes:
        starts, ends: rank -> times of its program's entries, as many as could run.
        stuck: the ranks that could not finish their program.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: list[int]


Step = Callable[[int, Iterator[Any]], "tuple[tuple[Any, ...], int] | None"]


def _in_turn(schedule: Schedule, feeds: list[Iterator[Any]], step: Step, graph: Graph) -> None:
    """Lets every rank run until it must wait; a rank that waits is tried again when the one it waits for has moved.

    `step(rank, feed)` runs the entries of `feed`; it returns the entry that has to wait and the event that it waits for, or
    None at the end of the program.
    """
    ready = list(range(schedule.ranks))
    waiting: list[list[int]] = [[] for _ in ready]
    held: list[tuple[Any, ...] | None] = [None] * len(ready)
    while ready:
        rank = ready.pop()
        entry = held[rank]
        stopped = step(rank, feeds[rank] if entry is None else chain((entry,), feeds[rank]))
        moved = stopped is None or stopped[0] != entry
        held[rank] = None
        if stopped is not None:
            held[rank] = stopped[0]
            waiting[graph.maker(schedule, stopped[1])].append(rank)
        if moved:
            ready += waiting[rank]
            waiting[rank] = []


def reach(schedule: Schedule, graph: Graph) -> list[int]:
    """rank -> how many entries of its program can run, with data dependencies and program order alone."""
    happened = bytearray(graph.always + 2)
    happened[graph.always] = 1
    split = split_pairs if schedule.has_pairs else None
    feeds = [_events(program, schedule, graph, split) for program in schedule.codes]

    def step(rank: int, feed: Iterator[Any]) -> tuple[tuple[Any, ...], int] | None:
        for event, need in feed:
            if not happened[need]:
                return (event, need), need
            happened[event] = 1
        return None

    def step_pairs(rank: int, feed: Iterator[Any]) -> tuple[tuple[Any, ...], int] | None:
        for entry in feed:
            event, need, event2, need2 = entry
            if not (happened[need] and happened[need2]):
                return entry, need2 if happened[need] else need
            happened[event] = happened[event2] = 1
        return None

    _in_turn(schedule, feeds, step_pairs if split else step, graph)
    return [_reached(program, schedule, graph, happened) for program in schedule.codes]


def _reached(program: Program, schedule: Schedule, graph: Graph, happened: bytearray) -> int:
    firsts = split_pairs(program, schedule)[0] if schedule.has_pairs else program
    return sum(map(happened.__getitem__, map(graph.event.__getitem__, firsts)))


def split_pairs(program: Program, schedule: Schedule) -> tuple[list[int], list[int]]:
    """The first code of every entry, and the second: a pair's backward, or the code that is no action."""
    limit = 4 * schedule.kind_stride
    firsts = [code if code < limit else code // limit - 1 for code in program]
    return firsts, [limit if code < limit else code % limit for code in program]


def _events(program: Program, schedule: Schedule, graph: Graph, split: Any) -> Iterator[Any]:
    event, needs = graph.event.__getitem__, graph.needs.__getitem__
    if split is None:
        return zip(map(event, program), map(needs, program), strict=True)
    firsts, seconds = split(program, schedule)
    return zip(map(event, firsts), map(needs, firsts), map(event, seconds), map(needs, seconds), strict=True)


def walk(
    schedule: Schedule, graph: Graph, weights: Weights, clocks: Sequence[float] | None = None, overlap_p2p: bool = True
) -> Run:
    """Every rank runs its program as early as order and messages allow; each starts at its clock (default 0).

    With `overlap_p2p` a message travels while its receiver computes; without, its hop starts when the receiver is free.
    Linear in the number of actions. A schedule with a cycle leaves ranks that wait for ever, listed in `stuck`.
    """
    end_of = [NEVER] * graph.always
    end_of += [0.0, 0.0]
    starts: list[list[float]] = [[] for _ in schedule.codes]
    ends: list[list[float]] = [[] for _ in schedule.codes]
    clock = list(clocks) if clocks is not None else [0.0] * schedule.ranks
    feeds: list[Iterator[Any]]
    step: Step
    if schedule.has_pairs or (weights.hop is not None and not overlap_p2p):
        feeds = [_pair_feed(program, schedule, graph, weights) for program in schedule.codes]
        step = _pair_step(end_of, starts, ends, clock, overlap_p2p)
    else:
        feeds = [_feed(program, graph, weights) for program in schedule.codes]
        step = (_step if weights.hop is None else _hop_step)(end_of, starts, ends, clock)
    _in_turn(schedule, feeds, step, graph)
    stuck = [rank for rank, program in enumerate(schedule.codes) if len(ends[rank]) < len(program)]
    return Run(starts, ends, stuck)


def _feed(program: Program, graph: Graph, weights: Weights) -> Iterator[Any]:
    columns: list[Any] = [map(table.__getitem__, program) for table in (graph.event, graph.needs, weights.duration)]
    if weights.hop is not None:
        columns.append(map(weights.hop.__getitem__, program))
    return zip(*columns, strict=True)


def _step(end_of: list[float], starts: list[list[float]], ends: list[list[float]], clocks: list[float]) -> Step:
    """Runs one rank where hops are free and nothing is paired."""

    def step(rank: int, feed: Iterator[Any]) -> tuple[tuple[Any, ...], int] | None:
        start, end, clock = starts[rank].append, ends[rank].append, clocks[rank]
        for event, need, duration in feed:
            at = end_of[need]
            if at > clock:
                if at == NEVER:
                    clocks[rank] = clock
                    return (event, need, duration), need
                clock = at
            start(clock)
            clock += duration
            end_of[event] = clock
            end(clock)
        clocks[rank] = clock
        return None

    return step


def _hop_step(end_of: list[float], starts: list[list[float]], ends: list[list[float]], clocks: list[float]) -> Step:
    """As `_step`, with a hop before what is waited for arrives."""

    def step(rank: int, feed: Iterator[Any]) -> tuple[tuple[Any, ...], int] | None:
        start, end, clock = starts[rank].append, ends[rank].append, clocks[rank]
        for event, need, duration, hop in feed:
            at = end_of[need] + hop
            if at > clock:
                if at == NEVER:
                    clocks[rank] = clock
                    return (event, need, duration, hop), need
                clock = at
            start(clock)
            clock += duration
            end_of[event] = clock
            end(clock)
        clocks[rank] = clock
        return None

    return step


def _pair_feed(program: Program, schedule: Schedule, graph: Graph, weights: Weights) -> Iterator[Any]:
    """As `_feed` with hops, and a second event, need and hop: those of a pair's backward, or ones that do nothing."""
    firsts, seconds = split_pairs(program, schedule)
    limit = 4 * schedule.kind_stride
    times = [weights.duration[code] if code < limit else weights.pair[code] for code in program]
    hop = weights.hop if weights.hop is not None else [0.0] * (limit + 1)
    tables = [graph.event, graph.needs, hop]
    columns = [map(table.__getitem__, codes) for codes in (firsts, seconds) for table in tables]  # type: ignore[attr-defined]
    return zip(times, *columns, strict=True)


def _pair_step(
    end_of: list[float], starts: list[list[float]], ends: list[list[float]], clocks: list[float], overlap_p2p: bool
) -> Step:
    """As `_hop_step`, for programs with pairs and for hops that keep their receiver waiting."""

    def step(rank: int, feed: Iterator[Any]) -> tuple[tuple[Any, ...], int] | None:
        clock = clocks[rank]
        for entry in feed:
            duration, event, need, hop, event2, need2, hop2 = entry
            at, at2 = end_of[need], end_of[need2]
            if at == NEVER or at2 == NEVER:
                clocks[rank] = clock
                return entry, need if at == NEVER else need2
            if overlap_p2p:
                clock = max(clock, at + hop, at2 + hop2)
            else:
                clock = max(max(clock, at) + hop, max(clock, at2) + hop2)
            starts[rank].append(clock)
            clock += duration
            end_of[event] = end_of[event2] = clock
            ends[rank].append(clock)
        clocks[rank] = clock
        return None

    return step
