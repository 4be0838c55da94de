"""A timeline: when every entry of a schedule starts and ends, simulated or measured, and the figures derived from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from pipeloom.schedule.actions import WEIGHT_GRADIENT, kind_of, kinds
from pipeloom.schedule.costs import Costs, PairTimes
from pipeloom.schedule.critical import critical_path
from pipeloom.schedule.exposed import Exposed
from pipeloom.schedule.idle import CAUSES, Cause, Gap, gaps
from pipeloom.schedule.model import Schedule, parts

Objective = Literal["makespan", "span"]
"""The value by which schedules are compared: the makespan, or the largest span of a rank."""


class Idle(NamedTuple):
    """A rank's idle time, by phase."""

    warmup: float
    steady: float
    cooldown: float

    @property
    def total(self) -> float:
        return self.warmup + self.steady + self.cooldown


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
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    source: str = "simulated"
    overlap_p2p: bool = True
    exposed: tuple[Exposed, ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Start of the first action to end of the last."""
        if not any(self.starts):
            return 0.0
        return max(e[-1] for e in self.ends if e) - min(s[0] for s in self.starts if s)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """rank -> time in which it computes."""
        totals = [sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)]
        silent = {kind.letter for kind in kinds() if kind.resource == "communication"}
        for rank, program in enumerate(self.schedule.programs if silent else ()):
            for cell, start, end in zip(program, self.starts[rank], self.ends[rank], strict=True):
                if all(action.kind in silent for action in parts(cell)):
                    totals[rank] -= end - start
        return tuple(map(_plain, totals))

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """rank -> makespan minus its busy time."""
        return tuple(_plain(self.makespan - busy) for busy in self.busy)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """rank -> its first start to its last end."""
        return tuple(
            ends[-1] - starts[0] if starts else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    def value(self, objective: str) -> float:
        """The makespan, or the largest span where the objective is "span"."""
        return self.makespan if objective == "makespan" else max(self.spans)

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
        starts, ends = self.starts[rank], self.ends[rank]
        origin = min(s[0] for s in self.starts if s)
        program = self.schedule.programs[rank]
        backward = [at for at, cell in enumerate(program) if any(kind_of(a.kind).is_backward for a in parts(cell))]
        forward = [at for at, cell in enumerate(program) if any(kind_of(a.kind).is_forward for a in parts(cell))]
        first = starts[backward[0]] if backward else origin + self.makespan
        last = max(ends[forward[-1]] if forward else origin, first)
        gaps = [(origin, starts[0]), *zip(ends, starts[1:], strict=False), (ends[-1], origin + self.makespan)]

        def within(low: float, high: float) -> float:
            return _plain(sum(max(0.0, min(e, high) - max(s, low)) for s, e in gaps))

        return Idle(within(origin, first), within(first, last), within(last, origin + self.makespan))

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """rank -> the intervals in which it idles, each with its cause (`pipeloom.schedule.idle`)."""
        return gaps(self)

    @cached_property
    def idle_by_cause(self) -> tuple[dict[Cause, float], ...]:
        """rank -> cause -> idle time. An action that only communicates counts as a message."""
        rows = []
        for rank, idle in enumerate(self.idle):
            row = dict.fromkeys(CAUSES, 0.0)
            for gap in self.gaps[rank]:
                row[gap.cause] += gap.end - gap.start
            row = {cause: _plain(time) for cause, time in row.items()}
            row["message"] = _plain(row["message"] + max(0.0, _plain(idle - sum(row.values()))))
            rows.append(row)
        return tuple(rows)

    @cached_property
    def memory_changes(self) -> list[float]:
        """code -> the change of its rank's memory by the action."""
        return _memory_changes(self.schedule, self.costs)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """rank -> the most stage-micro-batches alive at once: F allocates; B, or W where the backward is split, frees.

        Both micro-batches of a pair count, whatever the pair frees while it runs; `peak_memory` takes that into account.
        """
        delta = [change for kind in kinds() for change in [round(sum(kind.memory))] * self.schedule.kind_stride]
        return tuple(
            max(accumulate(map(delta.__getitem__, self.schedule.action_codes(rank))), default=0)
            for rank in range(self.schedule.ranks)
        )

    @cached_property
    def memory_curve(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """rank -> (time, memory from then on), in program order; memory by `Costs.activation` and `Costs.held`."""
        return tuple(self._curve(rank) for rank in range(self.schedule.ranks))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """rank -> the largest value of its memory curve."""
        change, schedule = self.memory_changes, self.schedule

        def steps(rank: int) -> Iterable[float]:
            if schedule.has_pairs:
                return chain.from_iterable(self._steps(rank, change))
            return map(change.__getitem__, schedule.codes[rank])  # faster, and sufficient for most schedules

        return tuple(_plain(max(accumulate(steps(rank)), default=0.0)) for rank in range(schedule.ranks))

    def _curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        change = self.memory_changes
        level, points = 0.0, []
        for steps, start, end in zip(self._steps(rank, change), self.starts[rank], self.ends[rank], strict=True):
            for at, step in enumerate(steps):
                level += step
                points.append((start if not at and (len(steps) > 1 or step > 0) else end, _plain(level)))
        return tuple(points)

    def _steps(self, rank: int, change: list[float]) -> Iterator[tuple[float, ...]]:
        """Yield each entry's changes of memory: (change,) of an action, (change at the start, change at the end) of a pair."""
        schedule = self.schedule
        limit, stride, m = schedule.pair_stride, schedule.kind_stride, schedule.microbatches
        splits = [WEIGHT_GRADIENT not in kind.produces for kind in kinds()]
        times = PairTimes.of(self.costs, schedule.stages) if schedule.has_pairs else None
        overlaps: dict[tuple[int, int, bool], bool] = {}
        for code in schedule.codes[rank]:
            if code < limit or times is None:
                yield (change[code],)
                continue
            forward, backward = divmod(code, limit)
            allocated, freed = change[forward - 1], change[backward]
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
        return critical_path(self.schedule, self.costs, self.ends, self.overlap_p2p)

    def _repr_svg_(self) -> str | None:
        """For notebooks: the drawing."""
        from pipeloom.draw.notebook import svg_of

        return svg_of(self)

    def _repr_html_(self) -> str | None:
        """For notebooks: the page."""
        from pipeloom.draw.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        return f"Timeline({self.schedule!r}, {self.source}, makespan={self.makespan:g}, bubble_ratio={self.bubble_ratio:.4f})"


def _memory_changes(schedule: Schedule, costs: Costs) -> list[float]:
    """code -> the change of its rank's memory by the action."""
    activation = costs.per_stage("activation", schedule.stages)
    held = costs.per_stage("held", schedule.stages)
    factors = costs.factors(schedule.microbatches)
    changes: list[float] = []
    for kind in kinds():
        constant, share = kind.memory
        for stage in range(schedule.stages):
            change = (constant + share * held[stage]) * activation[stage]
            changes += [change * factor for factor in factors]
    return changes


def _plain(value: float) -> float:
    """`value` without the rounding error of adding and subtracting floats: 0.30000000000000004 -> 0.3."""
    return round(value, 9) + 0.0
