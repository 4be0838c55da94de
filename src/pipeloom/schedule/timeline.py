"""A timeline: when every entry of a schedule starts and ends, simulated or measured, and the figures derived from it.

Among these are the gaps of each rank, cut by the cause of the wait, and the critical path.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, product, starmap
from math import ceil
from operator import add, mul
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import (
    COMPUTE,
    GRADS,
    INPUT_GRADIENT,
    KEPT,
    KEPT_ON_HOST,
    ON_HOST,
    OUTPUT,
    PARAMS,
    PENDING,
    SAVED,
    SCORES,
    STAGE_VALUES,
    WEIGHT_GRADIENT,
    kind_of,
    whole_of,
)
from pipeloom.schedule.calls import Calls
from pipeloom.schedule.costs import (
    DEVICE,
    HOST_MEMORY,
    LATE,
    WHILE_RUNNING,
    Costs,
    PairTimes,
    copied_shares,
    remade_shares,
)
from pipeloom.schedule.graph import EntryWait, Graph, entry_waits
from pipeloom.schedule.model import Schedule, parts, steady_entries

Objective = Literal["makespan", "span"]
"""The value by which schedules are compared: the makespan, or the largest span of a rank."""


Cause = Literal["dependency", "message", "memory", "end of step", "overhead"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Causes for which a rank idles.

- dependency: what the next entry needs is not computed yet.
- message: it is computed, and on its way; or a sender waits for its receiver (`Costs.sends`).
- memory: the rank waits for a backward while a later forward of its program has its input, and running that forward now
  would exceed the rank's own peak memory; or it waits for a copy to or from host memory.
- end of step: the rank has nothing left to do.
- overhead: everything is there and nothing runs; a simulated timeline has none.
"""


class Gap(NamedTuple):
    """An interval in which a rank idles for one cause, before entry `at` of its program (its length: at the end)."""

    start: float
    end: float
    cause: Cause
    at: int


CommunicationKind = Literal["p2p", "tp", "cp", "dp", "all-to-all"]
COMMUNICATIONS: tuple[CommunicationKind, ...] = get_args(CommunicationKind)
"""Kinds of communication.

- p2p: messages between stages, and the gradients of weights that several pipeline ranks hold.
- tp: collectives of tensor-parallel ranks.
- cp: keys and values that context-parallel ranks exchange, and their gradients.
- dp: gradients summed over the replicas, and weights that other replicas have stepped.
- all-to-all: tokens and their gradients between expert-parallel ranks, and the counts of them.
"""


def timelines_of(value: object) -> list[Timeline]:
    """Return a timeline, or several, as a list. Raises UsageError for anything else."""
    timelines: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for each in timelines:
        if not isinstance(each, Timeline):
            raise UsageError(
                f"timeline is of type {type(each).__name__}; give a pipeloom.Timeline, such as pipeloom.simulate(schedule)"
            )
    return timelines


@dataclass(frozen=True)
class Exposed:
    """Communications of one rank in one step that no computation hid.

    Attributes:
        inside: kind -> seconds for which computation stood still inside the rank's actions.
        after: kind -> seconds after its last action.
        end: when its gradients were complete, on the clock of the timeline's starts and ends.
    """

    inside: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    end: float = 0.0


ACTIVATIONS, MESSAGES, TEMPORARIES = "activations", "messages", "temporaries"
"""Names in `Peak.bytes` of what is no name of `Costs.bytes`: what micro-batches hold, messages besides, and what an action,
or the end of the step, needs besides."""

_Moment = tuple[int, bool, float, str]
"""Entry of a program (its length: behind the last), whether at its start, the change of its rank's memory, and its name."""


class Peak(NamedTuple):
    """The most bytes of a rank at once.

    Attributes:
        at: the entry of its program that begins or runs then; its length: the step's end.
        total: the bytes.
        bytes: name of `Costs.bytes` that is there for the whole step, ACTIVATIONS, MESSAGES or TEMPORARIES -> of this.
    """

    at: int
    total: float
    bytes: Mapping[str, float]


class Idle(NamedTuple):
    """A rank's idle time, by phase."""

    warmup: float
    steady: float
    cooldown: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """Start and end of every program entry; times in the unit of the costs, from the start of the step.

    Attributes:
        schedule: the schedule that ran.
        costs: those that it was simulated with, or that were measured.
        starts, ends: rank -> times, in the order of its program.
        source: `"simulated"` or `"measured"`.
        overlap_p2p: whether messages were simulated as travelling while their receiver computes.
        exposed: rank -> communications other than messages, of a measured step; empty where they were not measured.
        messages: rank -> bytes of messages during each entry and at the end, besides the values of `costs.bytes`; empty: none.
        label: its name in tables and drawings; empty: the schedule's.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    source: str = "simulated"
    overlap_p2p: bool = True
    exposed: tuple[Exposed, ...] = ()
    messages: tuple[tuple[float, ...], ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the name of the schedule."""
        return self.label or self.schedule.name

    @classmethod
    def measured(
        cls,
        schedule: Schedule,
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
        turns: Sequence[Mapping[int, float]] = (),
        exposed: tuple[Exposed, ...] = (),
    ) -> Timeline:
        """Return the timeline of a measured step, with the mean costs that it shows.

        Args:
            turns: rank -> entry of a pair -> the time at which its forward ends and its backward begins; default: half-way.
        """
        costs = _measured_costs(schedule, starts, ends, turns)
        rows = tuple(map(tuple, starts)), tuple(map(tuple, ends))
        return cls(schedule, costs, *rows, source="measured", exposed=exposed)

    @cached_property
    def makespan(self) -> float:
        """Start of the first action to end of the last."""
        return max(map(max, filter(None, self.ends)), default=0.0) - self.begin

    @cached_property
    def begin(self) -> float:
        """Start of the first action; 0 where nothing runs."""
        return min((starts[0] for starts in self.starts if starts), default=0.0)

    @cached_property
    def _computations(self) -> tuple[Sequence[int], ...]:
        """rank -> the positions of its entries on the queue of computation, in order."""
        return tuple(queues[COMPUTE] for queues in self.schedule.queues)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """rank -> time in which it computes."""
        rows = zip(self.starts, self.ends, self._computations, strict=True)
        return tuple(
            plain(sum(map(ends.__getitem__, entries)) - sum(map(starts.__getitem__, entries)))
            for starts, ends, entries in rows
        )

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """rank -> makespan minus its busy time."""
        return tuple(plain(self.makespan - busy) for busy in self.busy)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """rank -> its first start to its last end."""
        return tuple(
            max(ends) - starts[0] if starts else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    def value(self, objective: str) -> float:
        """The makespan, or the largest span where the objective is "span", to nine decimals."""
        return plain(self.makespan if objective == "makespan" else max(self.spans))

    @cached_property
    def bubble_ratio(self) -> float:
        """Sum of idle / sum of busy (Megatron's figure)."""
        return sum(self.idle) / sum(self.busy) if sum(self.busy) else 0.0

    @cached_property
    def bubble_rate(self) -> float:
        """Sum of idle / (p * makespan)."""
        return sum(self.idle) / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def span_bubble_rate(self) -> float:
        """1 - busy / largest span, of the rank with the most work (the zero-bubble papers' figure)."""
        return 1 - max(self.busy) / max(self.spans) if max(self.spans) else 0.0

    @cached_property
    def idle_by_phase(self) -> tuple[Idle, ...]:
        """rank -> idle before its first backward, between, and after its last forward."""
        return tuple(self._phases(rank) for rank in range(self.schedule.ranks))

    def _phases(self, rank: int) -> Idle:
        entries = self._computations[rank]
        starts, ends = ([row[rank][at] for at in entries] for row in (self.starts, self.ends))
        backward, forward = steady_entries([self.schedule.programs[rank][at] for at in entries])
        origin = self.begin
        first = starts[backward] if backward < len(starts) else origin + self.makespan
        last = max(ends[forward] if forward >= 0 else origin, first)
        gaps = list(zip([origin, *ends], [*starts, origin + self.makespan], strict=True))  # one gap where nothing runs

        def within(low: float, high: float) -> float:
            return plain(sum(max(0.0, min(e, high) - max(s, low)) for s, e in gaps))

        return Idle(within(origin, first), within(first, last), within(last, origin + self.makespan))

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """rank -> the intervals in which it idles, each with its cause, in order. Linear in the number of entries."""
        ranks = range(self.schedule.ranks)
        return tuple(self._gaps_of(rank) if any(self.starts) else () for rank in ranks)

    @cached_property
    def idle_by_cause(self) -> tuple[dict[Cause, float], ...]:
        """rank -> cause -> idle time. An action that only communicates counts as a message."""
        rows = []
        for rank, idle in enumerate(self.idle):
            row = dict.fromkeys(CAUSES, 0.0)
            for gap in self.gaps[rank]:
                row[gap.cause] += gap.end - gap.start
            row = {cause: plain(time) for cause, time in row.items()}
            row["message"] = plain(row["message"] + max(0.0, plain(idle - sum(row.values()))))
            rows.append(row)
        return tuple(rows)

    @cached_property
    def memory_changes(self) -> list[float]:
        """code -> the change of its rank's memory by the action."""
        return self._memory[0]

    @cached_property
    def _memory(self) -> tuple[list[float], dict[int, float]]:
        """`_changes` of memory, in the unit of `Costs.activation`."""
        costs, stages = self.costs, self.schedule.stages
        activation, held, inputs = (costs.per_stage(name, stages) for name in ("activation", "held", "kept"))
        return _changes(
            self.schedule,
            costs,
            {
                SAVED: [(1 - share) * size for share, size in zip(inputs, activation, strict=True)],
                KEPT: [share * size for share, size in zip(inputs, activation, strict=True)],
                PENDING: [share * size for share, size in zip(held, activation, strict=True)],
            },
            *(costs.while_running(value, stages) for value in ("layer", "forward")),
        )

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """rank -> the most stage-micro-batches, or their slices, alive at once: F, or R, allocates; B, or W after an I, frees.

        Both micro-batches of a pair count, whatever the pair frees while it runs; `peak_memory` takes that into account.
        """
        schedule, one = self.schedule, [self.schedule.slices] * self.schedule.stages
        change, passing = _changes(schedule, Costs(), {SAVED: one, PENDING: one})
        if schedule.has_queues:
            curves = [self._curve(rank, self._moments(rank, change, passing)) for rank in range(schedule.ranks)]
            return tuple(ceil(max((level for _, level in curve), default=0) - 1e-9) for curve in curves)
        peaks = []
        for rank in range(schedule.ranks):
            codes = schedule._action_codes(rank)
            levels = list(accumulate(map(change.__getitem__, codes)))
            if passing:
                levels += [level - change[c] + passing.get(c, 0) for level, c in zip(levels, codes, strict=True)]
            peaks.append(round(max(levels, default=0)))
        return tuple(peaks)

    @cached_property
    def memory_curve(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """rank -> (time, memory from then on), in program order; memory by `Costs.activation` and `Costs.held`."""
        ranks = range(self.schedule.ranks)
        return tuple(self._curve(rank, self._moments(rank, *self._memory)) for rank in ranks)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """rank -> the largest value of its memory curve."""
        (change, passing), schedule = self._memory, self.schedule
        if schedule.has_queues:
            return tuple(max((level for _, level in curve), default=0.0) for curve in self.memory_curve)

        def steps(rank: int) -> Iterable[float]:
            if schedule.has_pairs or passing:
                return chain.from_iterable(self._steps(rank, change, passing))
            return map(change.__getitem__, schedule.codes[rank])  # faster, and sufficient for most schedules

        return tuple(plain(max(accumulate(steps(rank)), default=0.0)) for rank in range(schedule.ranks))

    @cached_property
    def bytes_curves(self) -> dict[str, tuple[tuple[tuple[float, float], ...], ...]]:
        """pool -> rank -> (time, bytes from then on), in order of time; by `Costs.bytes`, empty without them.

        What an action makes counts from its start, what it frees until its end; of an I that frees what is saved and leaves what
        is pending, which is a part of it, the difference counts.
        """
        return {
            pool: tuple(self._curve(rank, moves, sum(begun.values())) for rank, (begun, moves) in enumerate(ranks))
            for pool, ranks in self._bytes_moments.items()
        }

    @cached_property
    def peak_bytes(self) -> dict[str, tuple[float, ...]]:
        """pool -> rank -> the most bytes at once; empty without `Costs.bytes`."""
        return {pool: tuple(peak.total for peak in peaks) for pool, peaks in self.bytes_at_peak.items()}

    @cached_property
    def bytes_at_peak(self) -> dict[str, tuple[Peak, ...]]:
        """pool -> rank -> what the most bytes at once consist of; empty without `Costs.bytes`."""
        return {pool: tuple(starmap(_peak, ranks)) for pool, ranks in self._bytes_moments.items()}

    @cached_property
    def _bytes_moments(self) -> dict[str, list[tuple[dict[str, float], list[_Moment]]]]:
        """pool -> rank -> (name of `Costs.bytes` -> what is there at the step's start, the changes in order of time)."""
        costs, schedule = self.costs, self.schedule
        moving = {whole_of(value) for kind in schedule.kinds for value in (*kind.makes, *kind.frees)} - STAGE_VALUES
        on_host = {ON_HOST: costs.saved(schedule.stages), KEPT_ON_HOST: costs.kept_bytes(schedule.stages)}
        on_host = {value: sizes for value, sizes in on_host.items() if value in moving}
        copied = {HOST_MEMORY: on_host} if on_host else {}
        pools: dict[str, list[tuple[dict[str, float], list[_Moment]]]] = {}
        for pool in sorted({DEVICE, *copied, *dict(costs.pools).values()}) if costs.bytes else ():
            sizes = costs.bytes_in(pool, schedule.stages) | copied.get(pool, {})
            passing = {name: sizes.pop(name, None) for name in (*WHILE_RUNNING, *LATE)}
            values = {name: sizes.pop(name) for name in list(sizes) if whole_of(name) in moving}
            changes = _changes(schedule, costs, values, passing["layer"], passing["forward"])
            beside, messages = self._beside(passing), self.messages if pool == DEVICE else ()
            pools[pool] = []
            for rank, stages in enumerate(schedule.stages_of):
                begun = {name: sum(size[stage] for stage in stages) for name, size in sizes.items()}
                moments = [*self._stage_moments(rank, sizes, begun), *self._late_moments(rank, passing)]
                sent = messages[rank] if messages else ()
                pools[pool].append((begun, self._moments(rank, *changes, beside, sent, moments)))
        return pools

    def _stage_moments(
        self, rank: int, sizes: Mapping[str, Sequence[float]], begun: dict[str, float]
    ) -> Iterator[_Moment]:
        """Yield each time that one of the rank's values of stages comes or goes, and take what comes from `begun`.

        Gathered parameters count from the start of their gather. Gradients count from the start of the first action that adds to
        them until the end of their reduction, during which later ones count too.
        """
        schedule, there = self.schedule, set()
        come_and_go = {PARAMS: "UNSHARD", GRADS: "REDUCE_GRAD"}
        passing = {
            (value, stage): sizes[value][stage]
            for value, letter in come_and_go.items()
            for stage in schedule.stage_actions.get(letter, ())
            if value in sizes and schedule.placement[stage] == rank
        }
        for (value, _), size in passing.items():
            begun[value] -= size
        for at, cell in enumerate(schedule.programs[rank] if passing else ()):
            for action in parts(cell):
                kind = kind_of(action.kind)
                for value in (*kind.makes, *kind.adds):
                    key = value, action.stage
                    if key in passing and key not in there:
                        there.add(key)
                        yield at, True, passing[key], value
                for value in (*kind.frees, *kind.takes):
                    key = value, action.stage
                    if key in there:
                        there.discard(key)
                        yield at, False, -passing[key], value

    def _late_moments(self, rank: int, sizes: Mapping[str, Sequence[float] | None]) -> Iterator[_Moment]:
        """Yield the changes at the ends of a rank's entries by bytes called as in LATE."""
        schedule, (new, summed, last) = self.schedule, (sizes[name] for name in LATE)
        shares = self.costs.size_factors(schedule)
        without = {*schedule.stages_of[rank]} if new else set()  # stages whose gradients are not there yet
        for at, cell in enumerate(schedule.programs[rank] if new or summed else ()):
            for action in parts(cell):
                kind, stage, part = kind_of(action.kind), action.stage, action.slice or 0
                if new and WEIGHT_GRADIENT in kind.makes and stage in without:
                    without.discard(stage)
                    yield at, False, new[stage], GRADS
                if summed and INPUT_GRADIENT in kind.makes and not kind.vocabulary:
                    # The last slice's backward comes first, and makes those of the others, which free their own.
                    unit = schedule.unit_of(action)
                    before = sum(shares[unit - part : unit]) if part + 1 == schedule.slices else -shares[unit]
                    yield at, False, before * summed[stage], TEMPORARIES
        if last:
            at_end = len(schedule.programs[rank])
            yield from ((at_end, True, last[stage], TEMPORARIES) for stage in schedule.stages_of[rank])

    def _beside(self, sizes: Mapping[str, Sequence[float] | None]) -> dict[int, float]:
        """Return code -> what a backward, of layers or of a share of the vocabulary, holds besides its values while it runs."""
        schedule, beside = self.schedule, dict[int, float]()
        factors = self.costs.size_factors(schedule)
        for number, kind in enumerate(schedule.kinds):
            of_stage = sizes["input_grad" if PENDING in kind.makes else "backward"]
            if of_stage and kind.is_backward and not {SAVED, SCORES}.isdisjoint(kind.frees):
                place = number * schedule._kind_stride
                beside |= {place + at: size * factor for at, (size, factor) in enumerate(product(of_stage, factors))}
        return beside

    def _moments(
        self,
        rank: int,
        change: list[float],
        passing: dict[int, float],
        beside: Mapping[int, float] | None = None,
        messages: Sequence[float] = (),
        others: Iterable[_Moment] = (),
    ) -> list[_Moment]:
        """Return the changes of a rank's memory in order of time, those of entries without queues in the order of its program.

        Args:
            change, passing: as of `_changes`.
            beside: code -> what its action holds besides while it runs.
            messages: of the rank, as in `messages`.
            others: changes by other values.
        """
        schedule = self.schedule
        starts, ends, before = self.starts[rank], self.ends[rank], 0.0
        of_entries: list[list[_Moment]] = [[] for _ in range(len(starts) + 1)]
        computed = frozenset(self._computations[rank]) if messages else ()
        if beside:
            firsts, seconds = schedule._split_entries(rank)
        for at, steps in enumerate(self._steps(rank, change, passing)):
            row, at_start = of_entries[at], len(steps) > 1 or steps[0] > 0
            if at in computed:
                row.append((at, True, messages[at] - before, MESSAGES))
                before = messages[at]
            if at_start:
                row.append((at, True, steps[0], ACTIVATIONS))
            if beside and (most := max(beside.get(firsts[at], 0.0), beside.get(seconds[at], 0.0))):
                row += (at, True, most, TEMPORARIES), (at, False, -most, TEMPORARIES)
            row += [(at, False, step, ACTIVATIONS) for step in steps[at_start:]]
        if messages:
            of_entries[-1].append((len(starts), True, messages[-1] - before, MESSAGES))
        for moment in others:
            of_entries[moment[0]].append(moment)
        moments = [moment for row in of_entries for moment in row]
        if schedule.has_queues:
            times = [[plain(time) for time in (*each, max(ends, default=0.0))] for each in (starts, ends)]
            moments.sort(key=lambda moment: (times[not moment[1]][moment[0]], moment[2] > 0))
        return moments

    def _curve(self, rank: int, moments: Iterable[_Moment], level: float = 0.0) -> tuple[tuple[float, float], ...]:
        starts, ends = self.starts[rank], self.ends[rank]
        points = [(self.begin, level)] if level else []
        for at, begins, step, _ in moments:
            level += step
            time = max(ends, default=0.0) if at == len(ends) else (starts if begins else ends)[at]
            points.append((time, plain(level)))
        return tuple(points)

    def _steps(self, rank: int, change: list[float], passing: dict[int, float]) -> Iterator[tuple[float, ...]]:
        """Yield each entry's changes of memory: (change,) of an action; (change at its start, change at its end) of a pair and
        of an action that holds something while it runs.
        """
        schedule = self.schedule
        limit, stride, m = schedule._pair_stride, schedule._kind_stride, schedule.units
        splits = [WEIGHT_GRADIENT not in kind.produces for kind in schedule.kinds]
        times = PairTimes.of(self.costs, schedule.stages) if schedule.has_pairs else None
        overlaps: dict[tuple[int, int, bool], bool] = {}
        for code in schedule.codes[rank]:
            if code < limit or times is None:
                held = passing.get(code)
                yield (change[code],) if held is None else (held, change[code] - held)
                continue
            forward, backward = divmod(code, limit)
            allocated = max(passing.get(forward - 1, 0.0), change[forward - 1] + passing.get(backward, 0.0))
            freed = change[forward - 1] + change[backward] - allocated
            key = (forward - 1) // m, backward // m % schedule.stages, splits[backward // stride]
            if key not in overlaps:
                overlaps[key] = times.overlaps(*key)
            rise = max(0.0, allocated + freed) if overlaps[key] else allocated
            yield rise, allocated + freed - rise

    @cached_property
    def critical_path(self) -> tuple[tuple[int, int], ...]:
        """(rank, position in its program) of the entries that set the makespan, first to last.

        Backwards from the entry that ends last: the one before is the rank's previous entry or the one that sent the message
        waited for, whichever let it start later (the message, if both at the same time).
        """
        _, rank, at = max((end, rank, at) for rank, ends in enumerate(self.ends) for at, end in enumerate(ends))
        path: list[tuple[int, int]] = []
        last: tuple[int, int] | None = (rank, at)
        while last is not None:
            path.append(last)
            last = self.waited_for(*last)
        return tuple(reversed(path))

    def waited_for(self, rank: int, at: int) -> tuple[int, int] | None:
        """Return (rank, position in its program) of what entry `at` of `rank` waited for longest; None: it waits for none."""
        waits = self._entry_waits.get((rank, at), ())
        members = [(rank, at), *((other.rank, other.at) for other in waits if other.together)]
        candidates = [candidate for member in members for candidate in self._waits_of(*member)]
        return max(candidates)[2] if candidates else None

    def _waits_of(self, rank: int, at: int) -> Iterator[tuple[float, bool, tuple[int, int]]]:
        """Yield (moment, whether it is on another rank, rank and position) of what an entry alone waits for."""
        for code in (column[at] for column in self._columns[rank]):
            for end, hop, source, position in self._inputs(rank, code):
                arrival = end + hop if self.overlap_p2p else end  # else the hop starts when the wait ends
                yield arrival, source != rank, (source, position)
        for other in self._entry_waits.get((rank, at), ()):
            start, end = self.starts[other.rank][other.at], self.ends[other.rank][other.at]
            if not other.together:
                yield start + other.share * (end - start), other.rank != rank, (other.rank, other.at)
        for end, late, holder, last in self._held(rank, at):
            yield end + late, holder != rank, (holder, last)
        before = self._before[rank][at]
        if before is not None:
            yield self.ends[rank][before], False, (rank, before)

    @cached_property
    def _columns(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [self.schedule._split_entries(rank) for rank in range(self.schedule.ranks)]

    @cached_property
    def _entry_waits(self) -> dict[tuple[int, int], tuple[EntryWait, ...]]:
        return entry_waits(self.schedule)

    @cached_property
    def _calls(self) -> Calls:
        return Calls.of(self.schedule, self.costs)

    def _held(self, rank: int, at: int) -> Iterator[tuple[float, float, int, int]]:
        """Yield (when a rank reaches its call, time from there, the rank, its entry before) of each call that holds `at`."""
        for call, late in self._calls.waits.get((rank, at), {}).items():
            last = self._calls.before[call]
            if last is not None:
                yield self.ends[call[0]][last], late, call[0], last

    @cached_property
    def _before(self) -> tuple[dict[int, int | None], ...]:
        """rank -> entry -> the one before it on its queue."""
        return tuple(
            {at: before for row in queues.values() for before, at in zip((None, *row), row, strict=False)}
            for queues in self.schedule.queues
        )

    @cached_property
    def _makers(self) -> tuple[Graph, dict[int, tuple[int, int]], tuple[float, ...]]:
        """The graph with the needs of each code; event -> (rank, position) of what makes it; unit -> factor of its messages."""
        graph = Graph.of(self.schedule, full=True)
        assert graph.event is not None
        place: dict[int, tuple[int, int]] = {}
        for rank in range(self.schedule.ranks):
            for codes in self.schedule._split_entries(rank):
                for at, code in enumerate(codes):
                    if graph.event[code] < graph.always:
                        place[graph.event[code]] = rank, at
        return graph, place, self.costs.size_factors(self.schedule)

    def _inputs(self, rank: int, code: int) -> Iterator[tuple[float, float, int, int]]:
        """Yield (end, hop from there, rank, position) of each entry whose result the action `code` of `rank` waits for."""
        if code == self.schedule._no_action:
            return
        graph, place, factors = self._makers
        for event, name in graph.waits_of(code):
            if event in place:
                source, position = place[event]
                hop = self.costs.hop(source, rank, factors[code % self.schedule.units], name)
                yield self.ends[source][position], hop, source, position

    def _arrival(self, rank: int, code: int, clock: float) -> tuple[float, float, int] | None:
        """(arrival, end of what produces it, rank of that) of what the action waits for longest; None if it waits for nothing.

        `clock`: when its rank is free. Without `overlap_p2p` the message travels only from then on.
        """
        return max(
            (
                ((end if self.overlap_p2p else max(clock, end)) + hop, end, source)
                for end, hop, source, _ in self._inputs(rank, code)
            ),
            default=None,
        )

    def _gaps_of(self, rank: int) -> tuple[Gap, ...]:
        schedule, change = self.schedule, self.memory_changes
        firsts, seconds = schedule._split_entries(rank)
        forwards = [OUTPUT in kind.produces for kind in schedule.kinds]
        none, stride = schedule._no_action, schedule._kind_stride
        clock = self.begin
        finish = max(map(max, filter(None, self.ends)))
        dust = 1e-9 * (finish - clock)
        peak, level = self.peak_memory[rank], 0.0
        upcoming = _upcoming_forwards(firsts, [forwards[code // stride] for code in firsts])
        rank_gaps: list[Gap] = []
        for at in self._computations[rank]:
            first, second, start = firsts[at], seconds[at], self.starts[rank][at]
            if start > clock + dust:
                waits = [self._arrival(rank, code, clock) for code in (first, second)]
                waits += [(max(clock, end) + late, clock, -1) for end, late, _, _ in self._held(rank, at)]
                latest = max((wait for wait in waits if wait is not None), default=None)
                cuts = _cuts(clock, start, latest, rank)
                copied = [
                    self.ends[rank][other.at]
                    for other in self._entry_waits.get((rank, at), ())
                    if other.rank == rank and other.share and not other.late
                ]
                if copied and max(copied) > max(clock, latest[0] if latest is not None else clock):
                    cuts = _for_memory(cuts, clock if latest is None else latest[0])
                later = upcoming[at]
                if later is not None and not forwards[first // stride] and level + change[later] > peak + 1e-9 * peak:
                    ready = self._arrival(rank, later, clock)
                    cuts = _for_memory(cuts, clock if ready is None else ready[0])
                rank_gaps += (Gap(*cut, at) for cut in cuts if cut[1] > cut[0] + dust)
            level += change[first] + (change[second] if second != none else 0.0)
            clock = self.ends[rank][at]
        if finish > clock + dust:
            rank_gaps.append(Gap(clock, finish, "end of step", len(firsts)))
        return tuple(rank_gaps)

    def save(self, path: str | Path) -> None:
        """Write it to a file: `.svg`, `.html` (the page), or `.json`, which `pipeloom show` reads.

        Raises UsageError for another ending or a file that cannot be written.
        """
        from pipeloom.draw.html import forms_of
        from pipeloom.schedule.files import write_as
        from pipeloom.traces.timelines import to_dict

        write_as(path, {**forms_of(self), ".json": lambda: json.dumps(to_dict([self]))})

    def _repr_svg_(self) -> str | None:
        """For notebooks: the drawing."""
        from pipeloom.draw.html import svg_of

        return svg_of(self)

    def _repr_html_(self, **beside: float | None) -> str | None:
        """For notebooks: the page; `beside`: `bound` and `limit` of `draw.html`."""
        from pipeloom.draw.html import html_of

        return html_of(self, **beside)

    def __repr__(self) -> str:
        return f"Timeline({self.schedule!r}, {self.source}, makespan={self.makespan:g}, bubble_rate={self.bubble_rate:.4f})"


def _peak(begun: Mapping[str, float], moments: Sequence[_Moment]) -> Peak:
    levels = [sum(begun.values())]
    for _, _, step, _ in moments:
        levels.append(levels[-1] + step)
    most = levels.index(max(levels))
    sizes = defaultdict[str, float](float, begun)
    for _, _, step, name in moments[:most]:
        sizes[name] += step
    at = moments[most - 1][0] if most else 0
    return Peak(at, plain(levels[most]), {name: plain(size) for name, size in sizes.items()})


def _changes(
    schedule: Schedule,
    costs: Costs,
    sizes: Mapping[str, Sequence[float]],
    layer: Sequence[float] | None = None,
    unsaved: Sequence[float] | None = None,
) -> tuple[list[float], dict[int, float]]:
    """code -> by how much the action changes what its rank holds, and code -> what it holds only while it runs, where it does.

    Args:
        costs: with the factors of the units and the shares of parts.
        sizes: value -> its size on each stage; other values have none.
        layer: the size on each stage of what an action holds only while it runs; None: of all values that it makes and frees.
        unsaved: the size on each stage of what a forward that saves nothing holds while it runs; None: nothing.
    """
    changes: list[float] = []
    passing: dict[int, float] = {}
    factors = costs.size_factors(schedule)
    divided = {value for kind in schedule.kinds if kind.part for value in kind.touches if whole_of(value) in sizes}
    sizes = {value: size for value, size in sizes.items() if value == whole_of(value)} | {
        value: tuple(map(mul, sizes[whole_of(value)], costs.share_of(value, schedule.stages)))
        for value in divided
        if value != whole_of(value)
    }
    for kind in schedule.kinds:
        brief = [value for value in kind.makes if value in sizes and value in kind.frees]
        net = [(sizes[v], (v in kind.makes) - (v in kind.frees)) for v in sizes if v not in brief]
        for stage in range(schedule.stages):
            change = sum(sign * size[stage] for size, sign in net if sign)
            held = sum(sizes[value][stage] for value in brief) if layer is None else layer[stage]
            held = max(held, change)
            if brief:
                passing |= {len(changes) + unit: held * factor for unit, factor in enumerate(factors)}
            changes += [change * factor for factor in factors]
    again = remade_shares(schedule, costs) if SAVED in sizes else {}
    makers = {v: n for n, kind in enumerate(schedule.kinds) if kind.part and kind.queue == COMPUTE for v in kind.makes}
    for (stage, unit), values in schedule._remade.items():
        place = stage * schedule.units + unit
        left = sum(sizes[v][stage] for v in values if v in sizes)
        if (stage, unit) in again and left:  # parts together are less than their sum
            ratio, left = again[stage, unit] * sizes[SAVED][stage] / left, again[stage, unit] * sizes[SAVED][stage]
            for value in values & makers.keys():
                changes[makers[value] * schedule._kind_stride + place] *= ratio
        changes[place] -= factors[unit] * left
        if unsaved is not None:
            passing[place] = changes[place] + factors[unit] * min(left, unsaved[stage])
    for code, share in copied_shares(schedule, costs).items():
        changes[code] *= share
    return changes, passing


def plain(value: float) -> float:
    """`value` without the rounding error of adding and subtracting floats: 0.30000000000000004 -> 0.3."""
    return round(value, 9) + 0.0


def _measured_costs(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    turns: Sequence[Mapping[int, float]],
) -> Costs:
    """Return each stage's mean F, I and W of a micro-batch, in the unit of the times. p2p is 0.

    A stage whose backward is never split counts half of B as I and half as W. `backward` is given where a stage has both.
    The time of a block (R;B) counts as that of B, and so R as 0.
    """
    times: dict[str, dict[int, list[float]]] = {}  # time of the kind -> stage -> samples
    groups: dict[tuple[str, int], float] = {}  # (time of the kind, unit) -> that of the rank that began last
    by_slice, by_size = [0.0] * schedule.slices, [0.0] * schedule.slices
    for rank, program in enumerate(schedule.programs):
        for at, (cell, start, end) in enumerate(zip(program, starts[rank], ends[rank], strict=True)):
            actions = parts(cell)
            moments = [start, end]
            if len(actions) > 1:
                moments.insert(1, turns[rank][at] if turns else (start + end) / 2)
            for action, begin, stop in zip(actions, moments, moments[1:], strict=False):
                kind = kind_of(action.kind)
                name = str(kind_of(kind.fuses[-1]).time if kind.fuses else kind.time)
                if kind.execute is None:  # a registered kind may name another's time
                    times.setdefault(name, {}).setdefault(action.stage, []).append(stop - begin)
                if kind.group:
                    group = name, schedule.unit_of(action)
                    groups[group] = min(stop - begin, groups.get(group, stop - begin))
                if not kind.of_stage and kind.queue == COMPUTE:
                    (by_size if kind.vocabulary else by_slice)[action.slice or 0] += stop - begin

    def means(name: str) -> tuple[float, ...]:
        samples = times.get(name, {})
        if name in ("input_grad", "weight_grad"):
            samples = {s: [time / 2 for time in row] for s, row in times.get("backward", {}).items()} | samples
        return tuple(schedule.slices * fmean(samples.get(s, [0.0])) for s in range(schedule.stages))

    names = ["forward", "input_grad", "weight_grad", *(["recompute"] if schedule._remade else [])]
    names += [str(kind.time) for kind in schedule.kinds if kind.vocabulary and schedule.vocabulary]
    spread: dict[str, Any] = {name: means(name) for name in names}
    for name in {name for name, _ in groups}:
        spread[name] = schedule.slices * fmean(time for (group, _), time in groups.items() if group == name)
    if times.get("backward", {}).keys() & times.get("input_grad", {}).keys():
        whole, parted = means("backward"), map(add, spread["input_grad"], spread["weight_grad"])
        spread["backward"] = tuple(
            w if s in times["backward"] else p for s, (w, p) in enumerate(zip(whole, parted, strict=True))
        )

    def shares(spent: list[float]) -> tuple[float, ...]:
        whole_step = sum(spent)
        return tuple(time / whole_step for time in spent) if schedule.slices > 1 and whole_step else ()

    return Costs(
        parts={name.partition(":")[2]: means(name) for name in times if name.startswith("recompute:")},
        slice_times=shares(by_slice),
        slice_sizes=shares(by_size),
        **spread,
    )


def _upcoming_forwards(codes: Sequence[int], is_forward: list[bool]) -> list[int | None]:
    """position -> the code of the first forward at it or after it."""
    upcoming: list[int | None] = [None] * len(is_forward)
    following: int | None = None
    for at in reversed(range(len(is_forward))):
        if is_forward[at]:
            following = codes[at]
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
