"""A timeline: when every entry of a schedule starts and ends, simulated or measured, and the figures drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pipeloom.schedule.actions import Action
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.critical import critical_path
from pipeloom.schedule.model import Schedule, parts


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
        schedule: what ran.
        costs: what it was simulated with, or measured at.
        starts, ends: rank -> times, in the order of its program.
        source: `"simulated"` or `"measured"`.
        overlap_p2p: whether messages were simulated as travelling while their receiver computes.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    source: str = "simulated"
    overlap_p2p: bool = True

    @cached_property
    def makespan(self) -> float:
        """Start of the first action to end of the last."""
        return max(e[-1] for e in self.ends if e) - min(s[0] for s in self.starts if s)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """rank -> time in which it computes."""
        return tuple(_plain(sum(ends) - sum(starts)) for starts, ends in zip(self.starts, self.ends, strict=True))

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
        backward = [at for at, cell in enumerate(program) if any(a.kind != "F" for a in parts(cell))]
        forward = [at for at, cell in enumerate(program) if any(a.kind == "F" for a in parts(cell))]
        first = starts[backward[0]] if backward else origin + self.makespan
        last = max(ends[forward[-1]] if forward else origin, first)
        gaps = [(origin, starts[0]), *zip(ends, starts[1:], strict=False), (ends[-1], origin + self.makespan)]

        def within(low: float, high: float) -> float:
            return _plain(sum(max(0.0, min(e, high) - max(s, low)) for s, e in gaps))

        return Idle(within(origin, first), within(first, last), within(last, origin + self.makespan))

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """rank -> the most stage-micro-batches alive at once: F allocates; B, or W where the backward is split, frees."""
        stride = self.schedule.kind_stride
        delta = [1] * stride + [-1] * stride + [0] * stride + [-1] * stride
        return tuple(
            max(accumulate(map(delta.__getitem__, _singles(self.schedule, r))), default=0)
            for r in range(self.schedule.ranks)
        )

    @cached_property
    def memory_curve(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """rank -> (time, memory from then on), in program order; memory by `Costs.activation` and `Costs.held`."""
        return tuple(self._curve(rank) for rank in range(self.schedule.ranks))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """rank -> the largest value of its memory curve."""
        change = _memory_changes(self.schedule, self.costs)
        return tuple(
            _plain(max(accumulate(map(change.__getitem__, _singles(self.schedule, rank))), default=0.0))
            for rank in range(self.schedule.ranks)
        )

    def _curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        activation = self.costs.per_stage("activation", self.schedule.stages)
        held = self.costs.per_stage("held", self.schedule.stages)
        factors = self.costs.factors(self.schedule.microbatches)
        level, points = 0.0, []
        for cell, start, end in zip(self.schedule.programs[rank], self.starts[rank], self.ends[rank], strict=True):
            for action in parts(cell):
                level += factors[action.microbatch] * _change(action, activation[action.stage], held[action.stage])
                points.append((start if action.kind == "F" else end, _plain(level)))
        return tuple(points)

    @cached_property
    def critical_path(self) -> tuple[tuple[int, int], ...]:
        """(rank, position in its program) of the entries that set the makespan, first to last.

        Backwards from the entry that ends last: the one before is the rank's previous entry or the one that made the message
        waited for, whichever let it start later (the message, where both did).
        """
        return critical_path(self)

    def __repr__(self) -> str:
        return f"Timeline({self.schedule!r}, {self.source}, makespan={self.makespan:g}, bubble_ratio={self.bubble_ratio:.4f})"


def _change(action: Action, activation: float, held: float) -> float:
    """What `action` adds to its rank's memory."""
    return {"F": 1.0, "B": -1.0, "I": held - 1.0, "W": -held}[action.kind] * activation


def _memory_changes(schedule: Schedule, costs: Costs) -> list[float]:
    activation = costs.per_stage("activation", schedule.stages)
    held = costs.per_stage("held", schedule.stages)
    factors = costs.factors(schedule.microbatches)
    changes: list[float] = []
    for kind in ("F", "B", "I", "W"):
        for stage in range(schedule.stages):
            change = _change(Action(kind, stage, 0), activation[stage], held[stage])
            changes += [change * factor for factor in factors]
    return changes


def _singles(schedule: Schedule, rank: int) -> list[int] | tuple[int, ...]:
    """A rank's program with every pair written as its forward, then its backward."""
    if not schedule.has_pairs:
        return schedule.codes[rank]
    limit = 4 * schedule.kind_stride
    return [
        c for code in schedule.codes[rank] for c in ((code,) if code < limit else (code // limit - 1, code % limit))
    ]


def _plain(value: float) -> float:
    """`value` without the dust that adding and subtracting floats leaves: 0.30000000000000004 -> 0.3."""
    return round(value, 9) + 0.0
