"""The dependency graph of a schedule, and the one loop that walks it: `check` asks whether it ends, `simulate` when.

An event is the end of a computation: F(stage, mb), the input gradient of (stage, mb) (by B or by I), W(stage, mb).
Every action waits for at most one event beside its place in the program:

    F of a route's first stage: nothing        F: F of the stage before
    B, I of a route's last stage: its own F    B, I: the input gradient of the stage after      W: its own input gradient

That a backward follows its own F needs no edge of its own: the chain through the last stage implies it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
        event: code -> the event that the action ends with; None where every code is its own event (no I, no W).
        needs: code -> the event that it waits for.

    A table for pairs has one more entry, for the code that is no action: it needs `always` and makes `always + 1`.
    """

    always: int
    event: list[int] | None
    needs: list[int]

    @classmethod
    def of(cls, schedule: Schedule, full: bool = False) -> Graph:
        """`full`: with all tables, needed or not."""
        m, stride = schedule.microbatches, schedule.kind_stride
        always = 3 * stride
        before, after = neighbours(schedule)
        needs: list[int] = []
        for previous in before:
            needs += range(previous * m, previous * m + m) if previous is not None else [always] * m
        for stage, following in enumerate(after):
            first = stride + following * m if following is not None else stage * m
            needs += range(first, first + m)
        if not schedule.has_split and not full:
            return cls(always, None, needs)
        needs += needs[stride:]
        needs += range(stride, 2 * stride)
        needs.append(always)
        return cls(always, [*range(2 * stride), *range(stride, 3 * stride), always + 1], needs)

    def events_of(self, codes: Sequence[int]) -> Iterable[int]:
        """The events that `codes`, in order, end with."""
        return codes if self.event is None else map(self.event.__getitem__, codes)

    def needs_of(self, codes: Sequence[int]) -> Iterable[int]:
        """The events that `codes`, in order, wait for."""
        return map(self.needs.__getitem__, codes)


@dataclass(frozen=True)
class Weights:
    """Times that a walk adds up: code -> duration, code -> hop of the message waited for, pair code -> duration.

    `hop` is None when all hops are free.
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


class _Turns:
    """Who may run: ranks that are ready, ranks that wait for an event, and the entry that each of those stopped at."""

    def __init__(self, feeds: Sequence[Iterator[Any]]) -> None:
        self.feeds = feeds
        self.ready = list(range(len(feeds)))
        self.waiting: dict[int, int] = {}
        self.held: list[tuple[Any, ...]] = [()] * len(feeds)

    def entries(self, rank: int) -> Iterator[Any]:
        """The entry that `rank` stopped at, then the rest of its program."""
        return chain(self.held[rank], self.feeds[rank])

    def stop(self, rank: int, entry: tuple[Any, ...], need: int) -> None:
        self.held[rank] = (entry,)
        self.waiting[need] = rank


def reach(schedule: Schedule, graph: Graph) -> list[int]:
    """rank -> how many entries of its program can run, with data dependencies and program order alone.

    The loops of this file are written out, one for each shape of entry: a call for each action would cost as much as the rest.
    """
    happened = bytearray(graph.always + 2)
    happened[graph.always] = 1
    if schedule.has_pairs:
        _reach_pairs(schedule, graph, happened)
    else:
        turns = _Turns([zip(graph.events_of(p), graph.needs_of(p), strict=True) for p in schedule.codes])
        ready, waiting = turns.ready, turns.waiting
        while ready:
            rank = ready.pop()
            for event, need in turns.entries(rank):
                if not happened[need]:
                    turns.stop(rank, (event, need), need)
                    break
                happened[event] = 1
                if event in waiting:
                    ready.append(waiting.pop(event))
    firsts = (split_pairs(p, schedule)[0] if schedule.has_pairs else p for p in schedule.codes)
    return [sum(map(happened.__getitem__, graph.events_of(program))) for program in firsts]


def _reach_pairs(schedule: Schedule, graph: Graph, happened: bytearray) -> None:
    feeds: list[Iterator[Any]] = []
    for program in schedule.codes:
        firsts, seconds = split_pairs(program, schedule)
        columns = [column(codes) for codes in (firsts, seconds) for column in (graph.events_of, graph.needs_of)]
        feeds.append(zip(*columns, strict=True))
    turns = _Turns(feeds)
    while turns.ready:
        rank = turns.ready.pop()
        for entry in turns.entries(rank):
            event, need, event2, need2 = entry
            if not (happened[need] and happened[need2]):
                turns.stop(rank, entry, need2 if happened[need] else need)
                break
            happened[event] = happened[event2] = 1
            for made in (event, event2):
                if made in turns.waiting:
                    turns.ready.append(turns.waiting.pop(made))


def split_pairs(program: Program, schedule: Schedule) -> tuple[list[int], list[int]]:
    """The first code of every entry, and the second: a pair's backward, or the code that is no action."""
    limit = 4 * schedule.kind_stride
    firsts = [code if code < limit else code // limit - 1 for code in program]
    return firsts, [limit if code < limit else code % limit for code in program]


def walk(
    schedule: Schedule, graph: Graph, weights: Weights, clocks: Sequence[float] | None = None, overlap_p2p: bool = True
) -> Run:
    """Every rank runs its program as early as order and messages allow; each starts at its clock (default 0).

    With `overlap_p2p` a message travels while its receiver computes; without, its hop starts when the receiver is free.
    Linear in the number of actions. A schedule with a cycle leaves ranks that wait for ever, listed in `stuck`.
    """
    end_of = [NEVER] * graph.always + [0.0, 0.0]
    run = Run([[] for _ in schedule.codes], [[] for _ in schedule.codes], [])
    clock = list(clocks) if clocks is not None else [0.0] * schedule.ranks
    if schedule.has_pairs or (weights.hop is not None and not overlap_p2p):
        feeds = [_pair_feed(program, schedule, graph, weights) for program in schedule.codes]
        _walk_pairs(_Turns(feeds), end_of, run, clock, overlap_p2p)
    else:
        feeds = [_feed(program, graph, weights) for program in schedule.codes]
        (_walk if weights.hop is None else _walk_hops)(_Turns(feeds), end_of, run, clock)
    run.stuck.extend(rank for rank, program in enumerate(schedule.codes) if len(run.ends[rank]) < len(program))
    return run


def _feed(program: Program, graph: Graph, weights: Weights) -> Iterator[Any]:
    columns: list[Iterable[Any]] = [graph.events_of(program), graph.needs_of(program)]
    columns += [map(t.__getitem__, program) for t in (weights.duration, weights.hop) if t is not None]
    return zip(*columns, strict=True)


def _walk(turns: _Turns, end_of: list[float], run: Run, clocks: list[float]) -> None:
    """Where hops are free and nothing is paired."""
    ready, waiting = turns.ready, turns.waiting
    while ready:
        rank = ready.pop()
        start, end, clock = run.starts[rank].append, run.ends[rank].append, clocks[rank]
        for event, need, duration in turns.entries(rank):
            at = end_of[need]
            if at > clock:
                if at == NEVER:
                    turns.stop(rank, (event, need, duration), need)
                    break
                clock = at
            start(clock)
            clock += duration
            end_of[event] = clock
            end(clock)
            if event in waiting:
                ready.append(waiting.pop(event))
        clocks[rank] = clock


def _walk_hops(turns: _Turns, end_of: list[float], run: Run, clocks: list[float]) -> None:
    """As `_walk`, with a hop before what is waited for arrives."""
    ready, waiting = turns.ready, turns.waiting
    while ready:
        rank = ready.pop()
        start, end, clock = run.starts[rank].append, run.ends[rank].append, clocks[rank]
        for event, need, duration, hop in turns.entries(rank):
            at = end_of[need] + hop
            if at > clock:
                if at == NEVER:
                    turns.stop(rank, (event, need, duration, hop), need)
                    break
                clock = at
            start(clock)
            clock += duration
            end_of[event] = clock
            end(clock)
            if event in waiting:
                ready.append(waiting.pop(event))
        clocks[rank] = clock


def _pair_feed(program: Program, schedule: Schedule, graph: Graph, weights: Weights) -> Iterator[Any]:
    """The duration of every entry, then event, need and hop of its first action and of its second, or ones that do nothing."""
    limit = 4 * schedule.kind_stride
    times = [weights.duration[code] if code < limit else weights.pair[code] for code in program]
    hop = weights.hop if weights.hop is not None else [0.0] * (limit + 1)
    columns: list[Iterable[Any]] = [times]
    for codes in split_pairs(program, schedule):
        columns += [graph.events_of(codes), graph.needs_of(codes), map(hop.__getitem__, codes)]
    return zip(*columns, strict=True)


def _walk_pairs(turns: _Turns, end_of: list[float], run: Run, clocks: list[float], overlap_p2p: bool) -> None:
    """As `_walk_hops`, for programs with pairs and for hops that keep their receiver waiting."""
    ready, waiting = turns.ready, turns.waiting
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        for entry in turns.entries(rank):
            duration, event, need, hop, event2, need2, hop2 = entry
            at, at2 = end_of[need], end_of[need2]
            if at == NEVER or at2 == NEVER:
                turns.stop(rank, entry, need if at == NEVER else need2)
                break
            if overlap_p2p:
                clock = max(clock, at + hop, at2 + hop2)
            else:
                clock = max(max(clock, at) + hop, max(clock, at2) + hop2)
            run.starts[rank].append(clock)
            clock += duration
            end_of[event] = end_of[event2] = clock
            run.ends[rank].append(clock)
            for made in (event, event2):
                if made in waiting:
                    ready.append(waiting.pop(made))
        clocks[rank] = clock
