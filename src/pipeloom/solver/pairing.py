"""Warm starts with pairs: the orders of other schedules, with pairs formed along the way and weight gradients deferred.

A schedule defines for every rank an order of its forwards, an order of its input gradients, and the number of input gradients
before each forward. `with_pairs` follows both orders side by side and forms a pair whenever the next action of both can start.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.evaluate import UNREACHED
from pipeloom.solver.instance import Instance, Sequences


@dataclass(frozen=True)
class PairingRule:
    """Rule by which `with_pairs` decides.

    Attributes:
        patience: how long an action waits for its other half, as a share of the time that the pair saves.
        ahead: the number of input gradients that a forward may overtake when it runs alone.
        late: the share of its time by which a weight gradient may delay the next action.
    """

    patience: float
    ahead: int
    late: float


FIRST_RULES = (PairingRule(0.0, 2, 0.0), PairingRule(1.0, 2, 1.0))
OTHER_RULES = tuple(
    rule
    for rule in (
        PairingRule(patience, ahead, late) for patience in (0.0, 1.0) for ahead in (0, 2) for late in (0.0, 1.0)
    )
    if rule not in FIRST_RULES
)


def variants_with_pairs(
    instance: Instance,
    sequences: Sequences,
    rules: Sequence[PairingRule] = FIRST_RULES,
    lates: Sequence[float] = (0.5,),
) -> Iterator[Sequences]:
    """Yield the sequences with their weight gradients placed anew (for each of `lates`), and with pairs formed by each rule."""
    for late in lates:
        placed = with_weight_grads(instance, sequences, late)
        if placed is not None:
            yield placed
    for rule in rules:
        paired = with_pairs(instance, sequences, rule)
        if paired is not None:
            yield paired


def with_weight_grads(instance: Instance, sequences: Sequences, late: float) -> Sequences | None:
    """Return the sequences with their single weight gradients placed anew: in waits that they exceed by at most the share `late`
    of their time, where memory is short, and at the end. None if the sequences have a cycle.
    """
    table = instance.table
    bare = [
        [operation for operation in sequence if table.nodes[operation][0] < 2 * table.stride] for sequence in sequences
    ]
    placing = _Placing(instance, bare, late)
    return placing.sequences if placing.run() else None


class _Placing:
    """A run of sequences without single weight gradients, during which these are placed where they fit."""

    def __init__(self, instance: Instance, bare: Sequences, late: float) -> None:
        self.table, self.bare, self.late = instance.table, bare, late
        self.memory_limit = instance.memory_limit + TIME_TOLERANCE
        self.sequences: Sequences = [[] for _ in bare]
        self.end = [UNREACHED] * (self.table.none + 2)
        self.end[self.table.none] = 0.0
        self.clocks, self.levels = [0.0] * len(bare), [0.0] * len(bare)
        self.position = [0] * len(bare)
        self.queues: list[deque[int]] = [deque() for _ in bare]

    def run(self) -> bool:
        """Return whether every sequence ran to its end."""
        waiting: dict[int, int] = {}
        ready = list(range(len(self.bare)))
        while ready:
            rank = ready.pop()
            sequence = self.bare[rank]
            while self.position[rank] < len(sequence):
                operation = sequence[self.position[rank]]
                missing = self._missing(operation)
                if missing is not None:
                    waiting[missing] = rank
                    break
                self._place(rank, operation)
                for node in (self.table.first[operation], self.table.second[operation]):
                    if node in waiting:
                        ready.append(waiting.pop(node))
        for rank, queue in enumerate(self.queues):
            self.sequences[rank] += queue
        return all(at == len(sequence) for at, sequence in zip(self.position, self.bare, strict=True))

    def _missing(self, operation: int) -> int | None:
        for predecessor in (self.table.predecessor[operation], self.table.predecessor2[operation]):
            if self.end[predecessor] < 0:
                return predecessor
        return None

    def _place(self, rank: int, operation: int) -> None:
        table, queue, clock, level = self.table, self.queues[rank], self.clocks[rank], self.levels[rank]
        arrival = max(
            self.end[table.predecessor[operation]] + table.hop[operation],
            self.end[table.predecessor2[operation]] + table.hop2[operation],
        )
        while queue:
            weight = queue[0]
            fits = clock + (1 - self.late) * table.time[weight] <= arrival + TIME_TOLERANCE
            if not fits and level + table.rise[operation] <= self.memory_limit:
                break
            queue.popleft()
            self.sequences[rank].append(weight)
            clock += table.time[weight]
            level += table.change[weight]
        clock = max(clock, arrival) + table.time[operation]
        self.end[table.first[operation]] = self.end[table.second[operation]] = clock
        self.clocks[rank], self.levels[rank] = clock, level + table.change[operation]
        self.sequences[rank].append(operation)
        self.position[rank] += 1
        last = table.nodes[operation][-1]
        if table.stride <= last < 2 * table.stride:
            queue.append(last + table.stride)


def with_pairs(instance: Instance, sequences: Sequences, rule: PairingRule) -> Sequences | None:
    """Follow the sequences' orders of forwards and of input gradients side by side, and form pairs where both can start.

    Returns None if the memory limit leads to a deadlock.
    """
    return _Pairing(instance, sequences, rule).run()


@dataclass
class _Side:
    """The state of one rank: its two orders with the position in each, queued weight gradients, clock and memory."""

    forwards: list[int]
    backwards: list[int]
    before: list[int]
    at: list[int] = field(default_factory=lambda: [0, 0])
    weights: deque[int] = field(default_factory=deque)
    sequence: list[int] = field(default_factory=list)
    free: float = 0.0
    level: float = 0.0


class _Pairing:
    def __init__(self, instance: Instance, sequences: Sequences, rule: PairingRule) -> None:
        self.table, self.rule, self.memory_limit = instance.table, rule, instance.memory_limit + TIME_TOLERANCE
        self.end = [UNREACHED] * (self.table.none + 2)
        self.end[self.table.none] = 0.0
        self.sides = [self._side(sequence) for sequence in sequences]
        self.heap = [(0.0, rank) for rank in range(len(sequences))]

    def _side(self, sequence: list[int]) -> _Side:
        side, stride = _Side([], [], []), self.table.stride
        for operation in sequence:
            for node in self.table.nodes[operation]:
                if node < stride:
                    side.forwards.append(node)
                    side.before.append(len(side.backwards))
                elif node < 2 * stride:
                    side.backwards.append(node)
        return side

    def run(self) -> Sequences | None:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            side = self.sides[rank]
            if now < side.free - TIME_TOLERANCE:
                continue  # another event follows when the rank is free
            operation = self._choose(side, now, rank)
            if operation is not None:
                self._do(side, operation, now, rank)
        done = all(s.at == [len(s.forwards), len(s.backwards)] for s in self.sides)
        return [side.sequence + list(side.weights) for side in self.sides] if done else None

    def _arrival(self, node: int) -> float:
        """Return the arrival time of the node's message; infinite if its sender has not started."""
        end = self.end[self.table.predecessor[node]]
        return end + self.table.hop[node] if end >= 0 else float("inf")

    def _choose(self, side: _Side, now: float, rank: int) -> int | None:
        """Return the operation to start now, or None to wait for the rank's next event."""
        table = self.table
        forward = side.forwards[side.at[0]] if side.at[0] < len(side.forwards) else None
        backward = side.backwards[side.at[1]] if side.at[1] < len(side.backwards) else None
        if forward is not None and side.level + table.rise[forward] > self.memory_limit:
            if side.weights:
                return side.weights.popleft()
            forward = None
        times = [self._arrival(node) if node is not None else float("inf") for node in (forward, backward)]
        here = [time <= now + TIME_TOLERANCE for time in times]
        if forward is not None and backward is not None:
            pair = table.pair(forward, backward, False)
            saved = table.time[forward] + table.time[backward] - table.time[pair]
            if all(here) and saved > -TIME_TOLERANCE:
                return pair
            if saved > TIME_TOLERANCE and max(times) <= now + self.rule.patience * saved + TIME_TOLERANCE:
                return self._weight_before(side, now, max(times), rank)
        if here[1]:
            return backward
        if here[0] and forward is not None and side.before[side.at[0]] <= side.at[1] + self.rule.ahead:
            return forward
        return self._weight_before(side, now, min(times), rank)

    def _weight_before(self, side: _Side, now: float, until: float, rank: int) -> int | None:
        """Return a weight gradient that fits before `until`; else None, with an event scheduled for that time."""
        if side.weights and now + (1 - self.rule.late) * self.table.time[side.weights[0]] <= until + TIME_TOLERANCE:
            return side.weights.popleft()
        if until > now + TIME_TOLERANCE and until < float("inf"):
            self._call(rank, until)
        return None

    def _call(self, rank: int, at: float) -> None:
        heapq.heappush(self.heap, (at, rank))

    def _do(self, side: _Side, operation: int, now: float, rank: int) -> None:
        table = self.table
        side.sequence.append(operation)
        side.free = now + table.time[operation]
        side.level += table.change[operation]
        for node in table.nodes[operation]:
            if node < table.stride:
                side.at[0] += 1
            elif node < 2 * table.stride:
                side.at[1] += 1
                side.weights.append(node + table.stride)
        self._call(rank, side.free)
        for node, successor, hop in (
            (table.first[operation], table.successor[operation], table.successor_hop[operation]),
            (table.second[operation], table.successor2[operation], table.successor2_hop[operation]),
        ):
            self.end[node] = side.free
            if successor != table.none:
                self._call(table.rank[successor], side.free + hop)
