"""The dependency graph of a schedule, and the loops that walk it: for `check`, whether every rank ends; for `simulate`, when.

An event is a result of a stage for a micro-batch: its output (F), its input gradient (B or I), its weight gradient (W).
Every action waits for at most one event beside its place in the program (`Kind.waits_for`):

    F of a route's first stage: nothing        F: the output of the stage before
    B, I of a route's last stage: its output   B, I: the input gradient of the stage after      W: its own input gradient

What an action needs beyond these exists by the order of its rank's program (`check` proves it), or it waits for the entry that
makes it (`entry_waits`): where queues run beside each other, or a value of another stage is needed.

That a backward follows its own F needs no separate edge: the chain through the last stage implies it. Nor does
a tensor that stages read by name, or its gradient: it is produced before the neighbour's message that the action waits for.
Its message may arrive later, however, so a walk that counts hops waits for it, too (`NamedNeeds`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from pipeloom.schedule.actions import (
    COMPUTE,
    EMBEDDED,
    EVENTS,
    INPUT_GRADIENT,
    OUTPUT,
    Action,
    Cell,
    Kind,
    Need,
    fraction_of,
    kind_of,
    whole_of,
)
from pipeloom.schedule.calls import NO_CALLS, Calls
from pipeloom.schedule.channels import Edge, NamedEdges
from pipeloom.schedule.model import Program, Schedule, ValueKey, parts, value_key

NEVER = math.inf


@dataclass(frozen=True)
class Graph:
    """Events of a schedule as integers: event number e of EVENTS, of (stage, unit): e * S u + stage * u + unit.

    Attributes:
        always: the index of an event that has always happened.
        event: code -> the event that the action ends with; None where every code is its own event (only F and B).
        needs: code -> the event that it waits for.
        named: dependencies of actions by name; None: there are none.

    Tables of all kinds have one more entry, for `Schedule._no_action`: it needs `always` and produces `always + 1`.
    """

    always: int
    event: list[int] | None
    needs: list[int]
    named: NamedNeeds | None = None

    @classmethod
    def of(cls, schedule: Schedule, full: bool = False) -> Graph:
        """Return the graph of `schedule`; `full`: with tables of all kinds, even those that it does not use."""
        stride = schedule._kind_stride
        always = len(EVENTS) * stride
        every = schedule._has_split or full
        columns: dict[Need | None, list[int]] = {}  # kinds with the same need share one table
        needs: list[int] = []
        for kind in schedule.kinds if every else schedule.kinds[:2]:
            if kind.waits_for not in columns:
                columns[kind.waits_for] = _needs(schedule, kind.waits_for, always)
            needs += columns[kind.waits_for]
        named = NamedNeeds.of(schedule) if schedule.tensors else None
        if not every:
            return cls(always, None, needs, named)
        event: list[int] = []
        for kind in schedule.kinds:
            first = EVENTS.index(kind.produces[0]) * stride if kind.produces else None
            event += range(first, first + stride) if first is not None else [always + 1] * stride
        return cls(always, [*event, always + 1], [*needs, always], named)

    def events_of(self, codes: Sequence[int]) -> Iterable[int]:
        """The events that `codes`, in order, end with."""
        return codes if self.event is None else map(self.event.__getitem__, codes)

    def needs_of(self, codes: Sequence[int]) -> Iterable[int]:
        """The events that `codes`, in order, wait for."""
        return map(self.needs.__getitem__, codes)

    def waits_of(self, code: int) -> list[tuple[int, str]]:
        """All events that the action waits for, each with the name of the tensor that brings it."""
        named = [] if self.named is None else [(event, edge.name) for event, edge in self.named.of_code(code)]
        return [(self.needs[code], OUTPUT), *named]


@dataclass(frozen=True)
class NamedNeeds:
    """Dependencies by name: of a forward on the tensors that its stage reads, of a backward on the gradients of those it writes.

    Attributes:
        units: the number of micro-batches, or of their slices.
        edges: code // units -> (event of unit 0, the edge that carries it) of each dependency.
    """

    units: int
    edges: tuple[tuple[tuple[int, Edge], ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> NamedNeeds:
        m, stride, named = schedule.units, schedule._kind_stride, NamedEdges.of(schedule)
        gradients = EVENTS.index(INPUT_GRADIENT) * stride
        forward = [tuple((edge.producer * m, edge) for edge in edges) for edges in named.reads]
        backward = [tuple((gradients + edge.consumer * m, edge) for edge in edges) for edges in named.writes]
        nothing: list[tuple[tuple[int, Edge], ...]] = [()] * schedule.stages
        by_step = {-1: forward, 0: nothing, 1: backward}
        steps = [kind.waits_for.step if kind.waits_for is not None else 0 for kind in schedule.kinds]
        return cls(m, tuple(edges for step in steps for edges in by_step[step]))

    def of_code(self, code: int) -> list[tuple[int, Edge]]:
        """(event, the edge that carries it) of each dependency by name of the action."""
        stage, unit = divmod(code, self.units)
        return [(event + unit, edge) for event, edge in self.edges[stage]]


def _needs(schedule: Schedule, need: Need | None, always: int) -> list[int]:
    """stage * units + unit -> the event that an action with this need waits for."""
    m, stride = schedule.units, schedule._kind_stride
    before, after = schedule.neighbours
    indices: list[int] = []
    for stage in range(schedule.stages):
        source, event = None if need is None else stage, None if need is None else need.value
        if need is not None and need.step:
            source = (before if need.step < 0 else after)[stage]
            if source is None and need.at_end is not None:
                source, event = stage, need.at_end
        if source is None or event is None:
            indices += [always] * m
        else:
            first = EVENTS.index(event) * stride + source * m
            indices += range(first, first + m)
    return indices


class EntryWait(NamedTuple):
    """The entry `at` of the program of `rank`, which is waited for.

    Attributes:
        share: how much of its time must have passed: 0 its start, 1 its end.
        late: how much of the waiting entry's own time passes before it waits.
        together: whether both are entries of one group, which starts when every rank has reached its own.
    """

    rank: int
    at: int
    share: float = 1.0
    late: float = 0.0
    together: bool = False

    @property
    def point(self) -> tuple[int, int, float]:
        """The moment that is waited for."""
        return self.rank, self.at, self.share


@lru_cache(maxsize=8)  # several costs are walked, and the timeline asks again
def entry_waits(schedule: Schedule) -> dict[tuple[int, int], tuple[EntryWait, ...]]:
    """(rank, position) -> the entries that it waits for, besides the events of `Graph` and the entry before it on its queue.

    - One on another queue than COMPUTE is issued when the computation before it in the program starts.
    - Entries of a rank that touch one value, at least one of them making, adding to or freeing it, run in the order of the
      program, whatever their queues. One that takes a value over waits for what has added to it, and what adds later does not
      wait for it.
    - Part j of k of a value is there at j/k of the time of the computation that makes it, and needed at (k - j)/k of that of the
      backward, which uses the last one first.
    - A value of another stage is waited for until the entry that makes it ends.
    - The entries of a group wait for each other's turn.
    - F of the first stage waits for the tokens' rows, where its rank's share of the vocabulary puts them together.
    - One that makes a value of `Schedule.slots` waits, in the order of the program, for as many that free one as it needs.
    """
    if not schedule.has_queues:
        return {}
    crossing = _crossing_values(schedule)
    maker = _makers(schedule)
    before, after = schedule.neighbours
    groups = groups_of(schedule)
    waits: dict[tuple[int, int], tuple[EntryWait, ...]] = {}
    for rank, program in enumerate(schedule.programs):
        queue_of = {at: queue for queue, positions in schedule.queues[rank].items() for at in positions}
        changed: dict[ValueKey, int] = {}
        read: dict[ValueKey, list[int]] = defaultdict(list)
        computation: int | None = None
        freed = _slot_waits(schedule, program, queue_of)
        for at, cell in enumerate(program):
            awaited = [EntryWait(rank, other) for other in freed.get(at, ()) if queue_of[other] != queue_of[at]]
            if queue_of[at] == COMPUTE:
                computation = at
            elif computation is not None:
                awaited.append(EntryWait(rank, computation, 0.0))
            for action in parts(cell):
                kind, stage, mb = kind_of(action.kind), action.stage, schedule.unit_of(action)
                partly: set[int] = set()
                for need in kind.needs:
                    other = stage if not need.step else (before if need.step < 0 else after)[stage]
                    source = (need.value, other) if other is not None else (need.at_end, stage)
                    origin = maker.get((source[0], source[1], mb)) if need.step and source[0] is not None else None
                    # Besides values that have events, one that another queue of this rank makes: an executor waits for its entry.
                    beside = origin is not None and origin.rank == rank and queue_of[origin.at] != queue_of[at]
                    if origin is not None and (need != kind.waits_for or beside):
                        awaited.append(origin)
                if kind.is_forward and stage == schedule.routes[0][0] and schedule._spreads_embedding:
                    awaited += filter(None, [maker.get((EMBEDDED, schedule.vocabulary[rank], mb))])
                members = groups.get((action.kind, mb), ()) if kind.group else ()
                awaited += [EntryWait(*member, 0.0, together=True) for member in members if member != (rank, at)]
                values = schedule._values_of(action)
                written = [each for each in (*values.makes, *values.frees, *kind.adds) if whole_of(each) in crossing]
                changes = {value_key(value, stage, mb) for value in written}
                reads = {value_key(value, stage, mb) for value in values.needs if whole_of(value) in crossing} - changes
                earlier = {changed[key] for key in changes | reads if key in changed}
                earlier |= {reader for key in changes for reader in read[key]}
                earlier |= {changed.get(value_key(value, stage, mb), at) for value in kind.takes} - {at}
                whole = {other for other in earlier if queue_of[other] != queue_of[at]}
                for key in changes & changed.keys():
                    fraction, other = fraction_of(key[0]), changed[key]
                    if fraction is not None and other in whole and COMPUTE in (queue_of[at], queue_of[other]):
                        share = fraction[0] / fraction[1]
                        computes = queue_of[at] == COMPUTE
                        awaited.append(
                            EntryWait(rank, other, late=1 - share) if computes else EntryWait(rank, other, share)
                        )
                        partly.add(other)
                awaited += [EntryWait(rank, other) for other in sorted(whole - partly)]
                changed |= dict.fromkeys(changes, at)
                for key in reads:
                    read[key].append(at)
            if awaited:
                waits[rank, at] = tuple(awaited)
    return waits


def _used_kinds(schedule: Schedule) -> list[Kind]:
    stride = schedule._kind_stride
    numbers = {code // stride for rank in range(schedule.ranks) for code in schedule._action_codes(rank)}
    return [schedule.kinds[number] for number in numbers]


def _crossing_values(schedule: Schedule) -> set[str]:
    """The values that entries on more than one queue touch."""
    queues: dict[str, set[str]] = defaultdict(set)
    for kind in _used_kinds(schedule):
        for value in kind.values:
            queues[value].add(kind.queue)
    return {value for value, on in queues.items() if len(on) > 1}


def _makers(schedule: Schedule) -> dict[tuple[str, int, int], EntryWait]:
    """(value, stage, unit) -> the entry that makes it, of the values that entries of other stages need."""
    sent = {EMBEDDED}
    for need in (need for kind in _used_kinds(schedule) for need in kind.needs if need.step):
        sent |= {need.value, need.at_end or need.value}
    return {
        (value, action.stage, schedule.unit_of(action)): EntryWait(rank, at)
        for rank, program in enumerate(schedule.programs)
        for at, cell in enumerate(program)
        for action in parts(cell)
        if not sent.isdisjoint(kind_of(action.kind).makes)
        for value in schedule._values_of(action).makes
        if value in sent
    }


def groups_of(schedule: Schedule) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(kind, unit) of a group -> the (rank, position) of its entries; of lookups one for each unit, if there are any."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    if schedule._spreads_embedding:
        groups |= {("EMBED", unit): [] for unit in range(schedule.units)}
    for rank, program in enumerate(schedule.programs if schedule.vocabulary else ()):
        for at, action in [(at, cell) for at, cell in enumerate(program) if isinstance(cell, Action)]:
            if kind_of(action.kind).group:
                groups[action.kind, schedule.unit_of(action)].append((rank, at))
    return groups


def _slot_waits(schedule: Schedule, program: Sequence[Cell], queue_of: Mapping[int, str]) -> dict[int, list[int]]:
    """Position of an entry that makes a value with slots -> those that must have freed one before: the first ones that do.

    Where these stand behind it, the entries wait for each other, and `check` says so.
    """
    waits: dict[int, list[int]] = defaultdict(list)
    for value, slots in schedule.slots:
        claimed = released = 0.0
        changes = list(_changes_of(schedule, program, value))
        releases = iter([(at, release) for at, _, release in changes if release])
        last: dict[str, int] = {}  # queue -> the last entry on it that must have freed
        for at, claim, _ in changes:
            claimed += claim
            while claim and claimed - released > slots + 1e-9:
                other, amount = next(releases)
                last[queue_of[other]] = other
                released += amount
            if claim:
                waits[at] += last.values()
    return waits


def _changes_of(schedule: Schedule, program: Sequence[Cell], value: str) -> Iterator[tuple[int, float, float]]:
    """Yield position, how much of `value` its action claims, and how much it frees, of each action of the program.

    Of what several actions add to, the first one claims it, until an action takes it over, which frees it.
    """
    actions = [(at, action) for at, cell in enumerate(program) for action in parts(cell)]
    taken_over = {action.stage for _, action in actions if value in kind_of(action.kind).takes}
    added: set[int] = set()
    for at, action in actions:
        kind = kind_of(action.kind)
        claim = _amount(schedule, action, value, schedule._values_of(action).makes)
        release = _amount(schedule, action, value, kind.frees)
        if value in kind.adds and action.stage in taken_over - added:
            added.add(action.stage)
            claim = 1.0
        if value in kind.takes:
            added.discard(action.stage)
            release = 1.0
        yield at, claim, release


def _amount(schedule: Schedule, action: Action, value: str, changed: tuple[str, ...]) -> float:
    """Return how much of `value` is among the values that an action makes or frees: 1, or the sum of parts that it names."""
    if value in changed:
        return 1.0
    fractions = [fraction_of(each) for each in changed if whole_of(each) == value]
    return sum(1 / fraction[1] for fraction in fractions if fraction is not None)


@dataclass(frozen=True)
class WalkCosts:
    """Times that a walk adds up: code -> duration, code -> hop of the message waited for, pair code -> duration.

    `hop` is None when all hops are free. `named`: code -> (event, hop) of each message that it waits for by name; None where
    these are free or there are none. `link`: (source rank, destination rank) -> hop of a value that only `entry_waits` tells of.
    `shared`: (rank, queue) -> the link that the queue shares with others, where it does; `slowed`: number of entries that run on
    a link at once -> how many times as long each takes. `calls`: what holds the ranks between computations.
    """

    duration: Sequence[float]
    hop: Sequence[float] | None
    pair: dict[int, float]
    named: dict[int, list[tuple[int, float]]] | None = None
    link: Callable[[int, int], float] = lambda source, destination: 0.0
    shared: Mapping[tuple[int, str], object] | None = None
    slowed: Callable[[int], float] = lambda entries: 1.0
    calls: Calls = NO_CALLS


@dataclass(frozen=True)
class WalkResult:
    """Result of `walk`.

    Attributes:
        starts, ends: rank -> times of its program's entries, as many as could run; with several queues, NEVER for the others.
        stuck: the ranks that could not finish their program.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: list[int]


class _ReadyQueue:
    """Queue of ranks: those that are ready, ranks that wait for an event, and the entry that each of those stopped at."""

    def __init__(self, feeds: Sequence[Iterator[Any]]) -> None:
        self.feeds = feeds
        self.ready = list(range(len(feeds)))
        self.waiting: dict[int, int] = {}
        self.more: dict[int, list[int]] = {}  # event -> others that wait for it (`_ReadyQueues`)
        self.held: list[tuple[Any, ...]] = [()] * len(feeds)

    def entries(self, rank: int) -> Iterator[Any]:
        """The entry that `rank` stopped at, then the rest of its program."""
        return chain(self.held[rank], self.feeds[rank])

    def stop(self, rank: int, entry: tuple[Any, ...], need: int) -> None:
        self.held[rank] = (entry,)
        self.waiting[need] = rank


class _ReadyQueues(_ReadyQueue):
    """As `_ReadyQueue`, of several queues per rank: more than one may wait for one event."""

    def stop(self, rank: int, entry: tuple[Any, ...], need: int) -> None:
        if need in self.waiting:
            self.more.setdefault(need, []).append(self.waiting[need])
        super().stop(rank, entry, need)


def runnable_prefix(schedule: Schedule, graph: Graph) -> list[int]:
    """rank -> how many entries of its program can run, with data dependencies and the order of queues alone.

    With several queues: up to the first one that cannot.
    """
    if schedule.has_pairs or schedule.has_queues:
        nothing = WalkCosts([0.0] * schedule._no_action, None, defaultdict(float))
        return [(*ends, NEVER).index(NEVER) for ends in walk(schedule, graph, nothing).ends]
    happened = bytearray(graph.always + 2)
    happened[graph.always] = 1
    turns = _ReadyQueue([zip(graph.events_of(p), graph.needs_of(p), strict=True) for p in schedule.codes])
    ready, waiting = turns.ready, turns.waiting
    # `walk` with times of 0 would take 1.4 times as long as this loop, in which most of `check` is spent.
    while ready:
        rank = ready.pop()
        for event, need in turns.entries(rank):
            if not happened[need]:
                turns.stop(rank, (event, need), need)
                break
            happened[event] = 1
            if event in waiting:
                ready.append(waiting.pop(event))
    return [
        sum(map(happened.__getitem__, graph.events_of(program))) if waiting else len(program)
        for program in schedule.codes
    ]


def walk(
    schedule: Schedule,
    graph: Graph,
    weights: WalkCosts,
    clocks: Sequence[float] | None = None,
    overlap_p2p: bool = True,
) -> WalkResult:
    """Run every rank's program as early as order and messages allow; each rank starts at its clock (default 0).

    With `overlap_p2p` a message travels while its receiver computes; without, its hop starts when the receiver is free.
    Linear in the number of actions. A schedule with a cycle leaves ranks that wait for ever, listed in `stuck`.
    """
    end_of = [NEVER] * graph.always + [0.0, 0.0]
    run = WalkResult([[] for _ in schedule.codes], [[] for _ in schedule.codes], [])
    clock = list(clocks) if clocks is not None else [0.0] * schedule.ranks
    calls = weights.calls
    end_of += [NEVER] * len(calls.number)
    for call in calls.firsts():
        end_of[graph.always + 2 + calls.number[call]] = clock[call[0]]
    if schedule.has_queues:
        _walk_queues(schedule, graph, weights, end_of, run, clock, overlap_p2p)
    elif calls.waits:
        feeds = [_feed_of_calls(schedule, rank, graph, weights) for rank in range(schedule.ranks)]
        _walk_generally(_ReadyQueues(feeds), end_of, run, clock, overlap_p2p)
    elif weights.named is not None or schedule.has_pairs or (weights.hop is not None and not overlap_p2p):
        feeds = [_general_feed(schedule, rank, graph, weights) for rank in range(schedule.ranks)]
        _walk_generally(_ReadyQueue(feeds), end_of, run, clock, overlap_p2p)
    else:
        # Two loops written out for actions alone: a call for each action would cost as much as the rest.
        feeds = [_feed(program, graph, weights) for program in schedule.codes]
        (_walk if weights.hop is None else _walk_hops)(_ReadyQueue(feeds), end_of, run, clock)
    run.stuck.extend(
        rank
        for rank, ends in enumerate(run.ends)
        if len(ends) < len(schedule.codes[rank]) or (schedule.has_queues and NEVER in ends)
    )
    return run


def _walk_queues(
    schedule: Schedule,
    graph: Graph,
    weights: WalkCosts,
    end_of: list[float],
    run: WalkResult,
    clocks: Sequence[float],
    overlap_p2p: bool,
) -> None:
    """Walk every queue of every rank as a program of its own, and write the times in the order of the ranks' programs."""
    waits = entry_waits(schedule)
    points = dict.fromkeys(wait.point for wait in chain.from_iterable(waits.values()))
    number = {point: len(end_of) + at for at, point in enumerate(points)}
    cuts: dict[tuple[int, int], set[float]] = defaultdict(set)
    for rank, at, share in points:
        cuts[rank, at].add(share)
    for place, awaited in waits.items():
        cuts[place] |= {wait.late for wait in awaited if wait.late}
    end_of += [NEVER] * len(number)
    lanes = [(rank, positions) for rank, queues in enumerate(schedule.queues) for positions in queues.values()]
    whole = [list(_feed_of_calls(schedule, rank, graph, weights)) for rank in range(schedule.ranks)]

    def entries(rank: int, at: int) -> Iterator[tuple[float, list[int], list[tuple[int, float]]]]:
        """The entry, cut where it waits or is waited for: at its start one of no length, which waits for what the start needs."""
        duration, events, needs = whole[rank][at]
        awaited = waits.get((rank, at), ())
        before = 0.0
        for share in sorted({1.0, *cuts.get((rank, at), ())}):
            for wait in awaited:
                if before <= wait.late < share or (wait.late == share == 0.0 and not wait.together):
                    near = wait.together or wait.rank == rank
                    needs.append((number[wait.point], 0.0 if near else weights.link(wait.rank, rank)))
            ends = [number[rank, at, share]] if (rank, at, share) in number else []
            yield (share - before) * duration, [*(events if share == 1.0 else ()), *ends], needs
            before, needs = share, []

    feeds = [iter([entry for at in positions for entry in entries(rank, at)]) for rank, positions in lanes]
    lane_run = WalkResult([[] for _ in lanes], [[] for _ in lanes], [])
    begun = [clocks[rank] for rank, _ in lanes]
    if weights.shared:
        links = [weights.shared.get((rank, queue)) for rank, queues in enumerate(schedule.queues) for queue in queues]
        _walk_in_time(feeds, end_of, lane_run, begun, overlap_p2p, links, weights.slowed)
    else:
        _walk_generally(_ReadyQueues(feeds), end_of, lane_run, begun, overlap_p2p)
    for rank, program in enumerate(schedule.codes):
        run.starts[rank] += [NEVER] * len(program)
        run.ends[rank] += [NEVER] * len(program)
    for lane, (rank, positions) in enumerate(lanes):
        pieces = [(at, share) for at in positions for share in sorted({1.0, *cuts.get((rank, at), ())})]
        before = 1.0
        for (at, share), start, end in zip(pieces, lane_run.starts[lane], lane_run.ends[lane], strict=False):
            if before in (0.0, 1.0):  # one of a group has its turn, and starts when all have theirs
                run.starts[rank][at] = start
            before = share
            if share == 1.0:
                run.ends[rank][at] = end


def _feed(program: Program, graph: Graph, weights: WalkCosts) -> Iterator[Any]:
    columns: list[Iterable[Any]] = [graph.events_of(program), graph.needs_of(program)]
    columns += [map(t.__getitem__, program) for t in (weights.duration, weights.hop) if t is not None]
    return zip(*columns, strict=True)


def _walk(turns: _ReadyQueue, end_of: list[float], run: WalkResult, clocks: list[float]) -> None:
    """Walk a graph in which hops are free and nothing is paired."""
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


def _walk_hops(turns: _ReadyQueue, end_of: list[float], run: WalkResult, clocks: list[float]) -> None:
    """As `_walk`, with a hop before each input arrives.

    A separate loop: one loop with hops of 0 takes 1.1 to 1.5 times as long where hops are free, and `check` always is.
    """
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


def _general_feed(schedule: Schedule, rank: int, graph: Graph, weights: WalkCosts) -> Iterator[Any]:
    """The duration of every entry, the events that it produces, and (event, hop) of each message that it waits for."""
    limit, none, needs = schedule._pair_stride, schedule._no_action, graph.needs
    event = graph.event if graph.event is not None else range(none)
    named = weights.named if weights.named is not None else {}
    hop = weights.hop if weights.hop is not None else [0.0] * none
    for code, first, second in zip(schedule.codes[rank], *schedule._split_entries(rank), strict=True):
        codes = (first,) if second == none else (first, second)
        waits = [(needs[each], hop[each]) for each in codes]
        if named:
            waits += [need for each in codes for need in named.get(each, ())]
        yield (
            weights.duration[code] if code < limit else weights.pair[code],
            [event[each] for each in codes],
            waits,
        )


def _feed_of_calls(schedule: Schedule, rank: int, graph: Graph, weights: WalkCosts) -> Iterator[Any]:
    """As `_general_feed`, with calls: a computation waits for the one before it, and reaches the one behind it as it ends."""
    calls, number, first = weights.calls, weights.calls.number, graph.always + 2
    for at, (duration, events, needs) in enumerate(_general_feed(schedule, rank, graph, weights)):
        needs += [(first + number[call], late) for call, late in calls.waits.get((rank, at), {}).items()]
        behind = calls.after.get((rank, at))
        yield duration, events if behind is None else [*events, first + number[behind]], needs


def _walk_generally(
    turns: _ReadyQueue, end_of: list[float], run: WalkResult, clocks: list[float], overlap_p2p: bool
) -> None:
    """As `_walk_hops`, for pairs, for messages by name and for hops that keep their receiver waiting."""
    ready, waiting = turns.ready, turns.waiting
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        for entry in turns.entries(rank):
            duration, events, needs = entry
            free = clock
            missing = None
            for event, hop in needs:
                end = end_of[event]
                if end == NEVER:
                    missing = event
                    break
                arrival = (end if overlap_p2p or end > free else free) + hop
                if arrival > clock:
                    clock = arrival
            if missing is not None:
                clock = free
                turns.stop(rank, entry, missing)
                break
            run.starts[rank].append(clock)
            clock += duration
            run.ends[rank].append(clock)
            for event in events:
                end_of[event] = clock
                if event in waiting:
                    ready.append(waiting.pop(event))
                    if turns.more:
                        ready += turns.more.pop(event, ())
        clocks[rank] = clock


def _walk_in_time(
    feeds: Sequence[Iterator[Any]],
    end_of: list[float],
    run: WalkResult,
    clocks: list[float],
    overlap_p2p: bool,
    links: Sequence[object],
    slowed: Callable[[int], float],
) -> None:
    """As `_walk_generally`, one moment after the other: entries of queues that share a link slow each other down.

    When an entry starts or ends, what is left of the others on its link is stretched to the new number of entries there.
    """
    entries = [next(feed, None) for feed in feeds]
    finish: list[float | None] = [None] * len(feeds)  # of the entry that a queue runs

    def beside(lane: int) -> list[int]:
        return [
            at
            for at, end in enumerate(finish)
            if end is not None and links[at] is not None and links[at] == links[lane]
        ]

    def stretch(lanes: Sequence[int], before: int, after: int, now: float) -> None:
        for at in lanes:
            finish[at] = now + (finish[at] - now) * slowed(after) / slowed(before)  # type: ignore[operator]

    while True:
        moments: list[tuple[float, bool, int]] = []
        for lane, entry in enumerate(entries):
            end = finish[lane]
            if end is not None:
                moments.append((end, False, lane))
            elif entry is not None:
                free = start = clocks[lane]
                for event, hop in entry[2]:
                    arrived = end_of[event]
                    start = max(start, (arrived if overlap_p2p or arrived > free else free) + hop)
                if start < NEVER:
                    moments.append((start, True, lane))
        if not moments:
            return
        now, starts, lane = min(moments)
        duration, events, _ = entries[lane]  # type: ignore[misc]
        if starts:
            others = beside(lane)
            stretch(others, len(others), len(others) + 1, now)
            finish[lane] = now + duration * slowed(len(others) + 1)
            run.starts[lane].append(now)
            continue
        finish[lane], clocks[lane], entries[lane] = None, now, next(feeds[lane], None)
        others = beside(lane)
        stretch(others, len(others) + 1, len(others), now)
        run.ends[lane].append(now)
        for event in events:
            end_of[event] = now
