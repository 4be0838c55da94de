"""List scheduling: programs constructed action by action in the order of time, under limits on memory.

For families whose papers give a rule and not a table. Whenever a rank is free, it runs the best ready action by the rule;
weight gradients fill the time that is left or free memory for a forward. Equal micro-batches run first in, first out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.schedule.families.construct.layout import Planned


@dataclass(frozen=True)
class SchedulingProblem:
    """Actions to schedule, and their limits.

    Attributes:
        placement: stage -> rank.
        routes: each route's stages, in order.
        jobs: route -> its micro-batches, in order.
        costs: of the stages and links.
        memory_limit: rank -> the memory that its activations may take at once.
        caps: stage -> the most of its micro-batches alive at once, at least 1. Where the activations of all stages at their
            caps fit the room, the construction cannot get stuck.
        fused: one B in place of I and W.
    """

    placement: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    jobs: tuple[Sequence[int], ...]
    costs: Costs
    memory_limit: tuple[float, ...]
    caps: tuple[float, ...]
    fused: bool = False


@dataclass(frozen=True)
class PriorityRule:
    """Rule by which a rank chooses among ready actions.

    Attributes:
        turns: forwards and backwards take turns where both are ready; else the backward goes first.
        late: of several forwards, the one at the latest position in its route runs first; else the one at the earliest.
        patience: a weight gradient runs if at least this share of it fits before the next known arrival.
    """

    turns: bool = False
    late: bool = True
    patience: float = 1.0


def single_route(
    placement: Sequence[int],
    microbatches: int,
    costs: Costs,
    memory_limit: Sequence[float],
    caps: Sequence[float] | None = None,
) -> SchedulingProblem:
    """Return the problem of one route through all stages in order."""
    stages = tuple(range(len(placement)))
    stage_caps = tuple(caps) if caps is not None else (math.inf,) * len(placement)
    return SchedulingProblem(
        tuple(placement), (stages,), (range(microbatches),), costs, tuple(memory_limit), stage_caps
    )


class Turns:
    """The turns of ranks that act in the order of time: for each rank the earliest one that it was called for since its last."""

    def __init__(self, ranks: int) -> None:
        self._next = [0.0] * ranks
        self._queue = [(0.0, rank) for rank in range(ranks)]

    def __iter__(self) -> Iterator[tuple[float, int]]:
        while self._queue:
            now, rank = heapq.heappop(self._queue)
            if now == self._next[rank]:
                self._next[rank] = math.inf
                yield now, rank

    def call(self, rank: int, when: float) -> None:
        """Give `rank` a turn at `when`, unless it has an earlier one."""
        if when < self._next[rank]:
            self._next[rank] = when
            heapq.heappush(self._queue, (when, rank))


class MemoryDeadlock(Exception):
    """The limits on memory allow no rank to continue."""


def programs_of(problem: SchedulingProblem, rule: PriorityRule) -> list[list[Planned]]:
    """rank -> its (kind, stage, micro-batch). Raises MemoryDeadlock."""
    return _Growth(problem, rule).run()


def programs_along(
    problem: SchedulingProblem, sequences: Sequence[Sequence[tuple[KindName, int]]], patience: float
) -> list[list[Planned]]:
    """As `programs_of`, with each rank's forwards and input gradients in the order of `sequences`: rank -> its (kind, stage).

    Only the positions of the weight gradients are chosen: in waits, where memory is short, and at the end. Raises MemoryDeadlock.
    """
    return _FixedOrder(problem, sequences, patience).run()


class _Growth:
    def __init__(self, problem: SchedulingProblem, rule: PriorityRule) -> None:
        stages = len(problem.placement)
        self.problem, self.rule = problem, rule
        self.backward_kind: KindName = "B" if problem.fused else "I"
        self.time = StageCosts(problem.costs, stages).by_letter("FIBW")
        self.activation = problem.costs.per_stage("activation", stages)
        self.held = (0.0,) * stages if problem.fused else problem.costs.per_stage("held", stages)
        self.order = [0] * stages
        self.before: list[int | None] = [None] * stages
        self.after: list[int | None] = [None] * stages
        self.jobs: list[Sequence[int]] = [()] * stages
        self.forwards: list[list[float]] = [[] for _ in range(stages)]
        self.backwards: list[list[float]] = [[] for _ in range(stages)]
        for route, jobs in zip(problem.routes, problem.jobs, strict=True):
            for position, stage in enumerate(route):
                self.order[stage], self.jobs[stage] = position, jobs
                self.before[stage] = route[position - 1] if position else None
                self.after[stage] = route[position + 1] if position + 1 < len(route) else None
            self.forwards[route[0]] = [0.0] * len(jobs)
        self.done: dict[KindName, list[int]] = {kind: [0] * stages for kind in ("F", self.backward_kind, "W")}
        count = max(problem.placement) + 1
        self.stages_of = [[s for s in range(stages) if problem.placement[s] == rank] for rank in range(count)]
        self.memory = [0.0] * count
        self.free_at = [0.0] * count
        self.last: list[KindName] = ["B"] * count
        self.gradients: list[deque[int]] = [deque() for _ in range(count)]  # stages of input gradients without their W
        self.programs: list[list[Planned]] = [[] for _ in range(count)]
        self.turns = Turns(count)

    def run(self) -> list[list[Planned]]:
        left = sum(map(len, self.jobs)) * (2 if self.problem.fused else 3)
        for now, rank in self.turns:
            choice = self._choose(rank, now)
            if choice is not None:
                self._start(rank, now, *choice)
                left -= 1
        if left:
            raise MemoryDeadlock
        return self.programs

    def _choose(self, rank: int, now: float) -> tuple[KindName, int] | None:
        """The action that `rank` runs now; None if it waits for its next known arrival."""
        best: tuple[tuple[int, int], KindName, int] | None = None
        following = math.inf
        backward_first = not self.rule.turns or self.last[rank] == "F"
        for stage in self.stages_of[rank]:
            for kind, arrivals in (("F", self.forwards[stage]), (self.backward_kind, self.backwards[stage])):
                index = self.done[kind][stage]
                if index >= len(arrivals) or (kind == "F" and not self._has_room(rank, stage)):
                    continue
                if arrivals[index] > now + TIME_TOLERANCE:
                    following = min(following, arrivals[index])
                    continue
                late = self.order[stage] if kind != "F" or not self.rule.late else -self.order[stage]
                key = (int((kind == "F") == backward_first), late)
                if best is None or key < best[0]:
                    best = key, kind, stage
        if best is not None:
            return best[1], best[2]
        return self._fill(rank, now, following)

    def _fill(self, rank: int, now: float, following: float) -> tuple[KindName, int] | None:
        """Return a weight gradient for the time until `following`, the oldest first; None to wait until then."""
        if not self.problem.fused and self.gradients[rank]:
            stage = self.gradients[rank][0]
            if following - now >= self.rule.patience * self.time["W"][stage] - TIME_TOLERANCE:
                return "W", stage
        self.turns.call(rank, following)
        return None

    def _has_room(self, rank: int, stage: int) -> bool:
        alive = self.done["F"][stage] - self.done["B" if self.problem.fused else "W"][stage]
        fits = self.memory[rank] + self.activation[stage] <= self.problem.memory_limit[rank] + TIME_TOLERANCE
        return fits and alive < self.problem.caps[stage]

    def _start(self, rank: int, now: float, kind: KindName, stage: int) -> None:
        end = now + self.time[kind][stage]
        self.programs[rank].append((kind, stage, self.jobs[stage][self.done[kind][stage]]))
        self.done[kind][stage] += 1
        self.free_at[rank] = end
        self.last[rank] = kind
        if kind == "F":
            self.memory[rank] += self.activation[stage]
            self._deliver(
                self.forwards if self.after[stage] is not None else self.backwards, stage, self.after[stage], end
            )
        elif kind == "W":
            self.memory[rank] -= self.held[stage] * self.activation[stage]
            self.gradients[rank].popleft()
        else:
            self.memory[rank] -= (1 - self.held[stage]) * self.activation[stage]
            self.gradients[rank].append(stage)
            if self.before[stage] is not None:
                self._deliver(self.backwards, stage, self.before[stage], end)
        self.turns.call(rank, end)

    def _deliver(self, inbox: list[list[float]], stage: int, to: int | None, end: float) -> None:
        target = to if to is not None else stage
        source, home = self.problem.placement[stage], self.problem.placement[target]
        arrival = end + self.problem.costs.hop(source, home)
        inbox[target].append(arrival)
        self.turns.call(home, max(arrival, self.free_at[home]))


class _FixedOrder(_Growth):
    def __init__(
        self, problem: SchedulingProblem, sequences: Sequence[Sequence[tuple[KindName, int]]], patience: float
    ) -> None:
        super().__init__(problem, PriorityRule(patience=patience))
        self.sequences = sequences
        self.position = [0] * len(sequences)

    def _choose(self, rank: int, now: float) -> tuple[KindName, int] | None:
        at = self.position[rank]
        if at == len(self.sequences[rank]):
            return self._fill(rank, now, math.inf)
        kind, stage = self.sequences[rank][at]
        arrivals = self.forwards[stage] if kind == "F" else self.backwards[stage]
        index = self.done[kind][stage]
        if index >= len(arrivals) or (kind == "F" and not self._has_room(rank, stage)):
            return self._fill(rank, now, math.inf)
        if arrivals[index] > now + TIME_TOLERANCE:
            return self._fill(rank, now, arrivals[index])
        self.position[rank] += 1
        return kind, stage
