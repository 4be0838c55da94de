"""A second simulator: events in a heap, actions as named tuples, costs read from `Costs`' fields as its docstring words them.

It shares no code with `pipeloom.schedule.simulate` beyond the schedule's decoded programs, so that a slip in either shows.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

from pipeloom.schedule import Action, Costs, Pair, Schedule


class Times:
    """The costs of one schedule as functions of its actions."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.before: dict[int, int] = {}
        self.after: dict[int, int] = {}
        for route in schedule.routes:
            self.before.update(zip(route[1:], route, strict=False))
            self.after.update(zip(route, route[1:], strict=False))

    def of_stage(self, field: str, stage: int) -> float:
        value: Any = getattr(self.costs, field)
        return value[stage] if isinstance(value, (tuple, list)) else value

    def factor(self, microbatch: int) -> float:
        return self.costs.microbatch[microbatch] if self.costs.microbatch else 1.0

    def alone(self, kind: str, stage: int) -> float:
        """One action of a micro-batch of factor 1."""
        if kind.startswith("R"):
            again = self.of_stage("forward" if self.costs.recompute is None else "recompute", stage)
            name, part = dict(self.costs.parts), kind.partition(":")[2]
            again = name.get(part, again) if part else again
            return again + (self.alone(kind[1:], stage) if kind in ("RB", "RI") else 0.0)
        if kind == "B":
            if self.costs.backward is not None:
                return self.of_stage("backward", stage)
            return self.of_stage("input_grad", stage) + self.of_stage("weight_grad", stage)
        return self.of_stage({"F": "forward", "I": "input_grad", "W": "weight_grad"}[kind], stage)

    def duration(self, cell: Action | Pair) -> float:
        if isinstance(cell, Action):
            return self.factor(cell.microbatch) * self.alone(cell.kind, cell.stage)
        s, t, kind = cell.forward.stage, cell.backward.stage, cell.backward.kind[-1]
        split, again = kind == "I", self.alone("R", t) if cell.backward.kind != kind else 0.0
        a, b = self.factor(cell.forward.microbatch), self.factor(cell.backward.microbatch)
        one, other = self.alone("F", s), self.alone(kind, t)
        given = self.given("pair_split", s, t) if split else None
        if given is None:
            given = self.given("pair", s, t)
            if given is not None and split:
                given = max(one, given + again - self.alone("W", t)) - again
        if given is not None:
            return b * again + (a * given if a == b else a * one + b * other - min(a, b) * (one + other - given))
        x, y = self.of_stage("all_to_all", s) * one, self.of_stage("all_to_all", t) * self.alone("I", t)
        communication = a * x + b * y
        if communication == 0:
            return a * one + b * (other + again)
        weight = 0.0 if split else self.alone("W", t)
        return max(a * (one - x) + b * (self.alone("I", t) - y + weight + again), communication)

    def in_turns(self, cell: Action | Pair) -> bool:
        """Whether a pair's halves take turns: both stages communicate, or its given time says that something overlaps."""
        if isinstance(cell, Action):
            return False
        s, t = cell.forward.stage, cell.backward.stage
        if self.of_stage("all_to_all", s) and self.of_stage("all_to_all", t):
            return True
        kind = cell.backward.kind[-1]
        fields = ("pair_split", "pair") if kind == "I" else ("pair",)
        if all(self.given(field, s, t) is None for field in fields):
            return False
        one = Pair(cell.forward._replace(microbatch=0), cell.backward._replace(kind=kind, microbatch=0))
        even = Times(self.schedule, replace(self.costs, microbatch=()))
        return even.duration(one) < even.alone("F", s) + even.alone(kind, t)

    def given(self, field: str, s: int, t: int) -> float | None:
        value: Any = getattr(self.costs, field)
        if not isinstance(value, (tuple, list)):
            return value
        return value[s][t] if isinstance(value[0], (tuple, list)) else value[s]

    def origin(self, action: Action) -> tuple[str, int, int] | None:
        """(F, I or W; stage; micro-batch) of the event that the action waits for."""
        kind, stage, microbatch = action[:3]
        if kind == "F":
            return ("F", self.before[stage], microbatch) if stage in self.before else None
        if kind[0] == "R" and kind[-1] not in "BI":
            return None
        if kind == "W":
            return "I", stage, microbatch
        return ("I", self.after[stage], microbatch) if stage in self.after else ("F", stage, microbatch)

    def hop(self, origin: tuple[str, int, int], to: int) -> float:
        source, target = self.schedule.placement[origin[1]], self.schedule.placement[to]
        if source == target:
            return 0.0
        p2p: Any = self.costs.p2p
        latency = p2p[source][target] if isinstance(p2p, (tuple, list)) else p2p
        return latency + self.factor(origin[2]) * self.costs.message / self.costs.bandwidth


def actions_of(cell: Action | Pair) -> tuple[Action, ...]:
    return (cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,)


def simulate_events(schedule: Schedule, costs: Costs, overlap_p2p: bool = True) -> list[list[tuple[float, float]]]:
    """rank -> (start, end) of every entry of its program; raises AssertionError where the schedule cannot end."""
    times, programs = Times(schedule, costs), schedule.programs
    sent: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in programs]
    free = [0.0] * len(programs)
    running = [False] * len(programs)
    heap: list[tuple[float, int]] = []

    def begin(rank: int) -> None:
        if running[rank] or len(spans[rank]) == len(programs[rank]):
            return
        cell, starts = programs[rank][len(spans[rank])], [free[rank]]
        for action in actions_of(cell):
            origin = times.origin(action)
            if origin is None:
                continue
            if origin not in sent:
                return
            hop = times.hop(origin, action.stage)
            starts.append(sent[origin] + hop if overlap_p2p else max(sent[origin], free[rank]) + hop)
        start = max(starts)
        spans[rank].append((start, start + times.duration(cell)))
        running[rank] = True
        heapq.heappush(heap, (spans[rank][-1][1], rank))

    for rank in range(len(programs)):
        begin(rank)
    while heap:
        now, rank = heapq.heappop(heap)
        running[rank], free[rank] = False, now
        for action in actions_of(programs[rank][len(spans[rank]) - 1]):
            sent["I" if action.kind[-1] in "BI" else action.kind, action.stage, action.microbatch] = now
        for other in range(len(programs)):
            begin(other)
    assert [len(row) for row in spans] == [len(program) for program in programs], "the schedule deadlocks"
    return spans


def memory_peaks(schedule: Schedule, costs: Costs, in_bytes: bool = False) -> list[float]:
    """rank -> its peak memory, or bytes, replayed as sums over what is alive.

    In a pair the forward comes first; its halves count after the pair alone where they run in turns (`Times.in_turns`).
    """
    times, peaks, sizes = Times(schedule, costs), [], dict(costs.bytes)

    def values(stage: int) -> tuple[float, float, float, float]:
        """What a stage saves, keeps for R, holds until W, and saves of norms."""
        if in_bytes:
            return tuple(float(sizes.get(name, 0.0)) for name in ("saved", "kept", "pending", "saved:norms"))
        whole, inputs = times.of_stage("activation", stage), times.of_stage("kept", stage)
        norms = sizes.get("saved:norms", 0.0) / (sizes.get("saved") or 1.0)
        saved = (1 - inputs) * whole
        return saved, inputs * whole, times.of_stage("held", stage) * whole, norms * saved

    for program in schedule.programs:
        again = {action[1:3]: action.kind for cell in program for action in actions_of(cell) if action.kind[0] == "R"}
        alive: dict[tuple[int, int], float] = {}
        peak = 0.0
        for cell in program:
            for kind, stage, microbatch, _ in actions_of(cell):
                saved, inputs, pending, norms = values(stage)
                late = {"R:norms": norms, "": 0.0}.get(again.get((stage, microbatch), ""), saved)
                during = saved + inputs - (late if kind == "F" else 0.0)
                after = during if kind == "F" or kind[-1] not in "BIW" else pending if kind[-1] == "I" else 0.0
                for size in (during, after) if kind in ("RB", "RI") else (after,):
                    alive[stage, microbatch] = times.factor(microbatch) * size
                    if not times.in_turns(cell) or (kind != "F" and size == after):
                        peak = max(peak, sum(alive.values()))
        peaks.append(peak)
    return peaks
