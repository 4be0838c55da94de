"""Where the search over pairs starts: other schedules' orders with pairs formed on the way, and weight gradients put off.

Any schedule gives, for every rank, an order of its forwards, an order of its input gradients, and how many of these come before
each forward. `paired` runs both orders side by side and makes a pair wherever both sides are there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeloom.solver.pair_blocks import NEVER, Blocks, Rows
from pipeloom.solver.problem import EPS


@dataclass(frozen=True)
class Habit:
    """How `paired` decides.

    Attributes:
        patience: how long an action waits for its other half, as a share of what the pair saves.
        ahead: forwards that may run alone before the input gradients that the order has before them.
        late: the share of a weight gradient that may delay what follows it.
    """

    patience: float
    ahead: int
    late: float


FIRST = (Habit(0.0, 2, 0.0), Habit(1.0, 2, 1.0))
OTHERS = tuple(
    habit
    for habit in (Habit(patience, ahead, late) for patience in (0.0, 1.0) for ahead in (0, 2) for late in (0.0, 1.0))
    if habit not in FIRST
)


def starts_of(
    blocks: Blocks, rows: Rows, habits: Sequence[Habit] = FIRST, lates: Sequence[float] = (0.5,)
) -> Iterator[Rows]:
    """The rows with their weight gradients in other places (`lates`), and with pairs formed by the habits."""
    for late in lates:
        found = with_weights(blocks, rows, late)
        if found is not None:
            yield found
    for habit in habits:
        found = paired(blocks, rows, habit)
        if found is not None:
            yield found


def with_weights(blocks: Blocks, rows: Rows, late: float) -> Rows | None:
    """The rows with their single weight gradients placed anew: in waits that they delay by at most `late` of themselves, where
    the memory is short, and at the end. None where the rows cannot run so."""
    bare = [[block for block in row if blocks.nodes[block][0] < 2 * blocks.stride] for row in rows]
    placing = _Placing(blocks, bare, late)
    return placing.rows if placing.run() else None


class _Placing:
    """One walk of rows without single weight gradients, which are put where they fit."""

    def __init__(self, blocks: Blocks, bare: Rows, late: float) -> None:
        self.blocks, self.bare, self.late = blocks, bare, late
        self.rows: Rows = [[] for _ in bare]
        self.end = [NEVER] * (blocks.none + 2)
        self.end[blocks.none] = 0.0
        self.clocks, self.levels = [0.0] * len(bare), [0.0] * len(bare)
        self.position = [0] * len(bare)
        self.queues: list[deque[int]] = [deque() for _ in bare]

    def run(self) -> bool:
        """Whether every row ran to its end."""
        waiting: dict[int, int] = {}
        ready = list(range(len(self.bare)))
        while ready:
            rank = ready.pop()
            row = self.bare[rank]
            while self.position[rank] < len(row):
                block = row[self.position[rank]]
                missing = self._missing(block)
                if missing is not None:
                    waiting[missing] = rank
                    break
                self._place(rank, block)
                for node in (self.blocks.first[block], self.blocks.second[block]):
                    if node in waiting:
                        ready.append(waiting.pop(node))
        for rank, queue in enumerate(self.queues):
            self.rows[rank] += queue
        return all(at == len(row) for at, row in zip(self.position, self.bare, strict=True))

    def _missing(self, block: int) -> int | None:
        for need in (self.blocks.need[block], self.blocks.need2[block]):
            if self.end[need] < 0:
                return need
        return None

    def _place(self, rank: int, block: int) -> None:
        blocks, queue, clock, level = self.blocks, self.queues[rank], self.clocks[rank], self.levels[rank]
        arrival = max(
            self.end[blocks.need[block]] + blocks.hop[block], self.end[blocks.need2[block]] + blocks.hop2[block]
        )
        room = blocks.problem.room + EPS
        while queue:
            weight = queue[0]
            fits = clock + (1 - self.late) * blocks.time[weight] <= arrival + EPS
            if not fits and level + blocks.rise[block] <= room:
                break
            queue.popleft()
            self.rows[rank].append(weight)
            clock += blocks.time[weight]
            level += blocks.change[weight]
        clock = max(clock, arrival) + blocks.time[block]
        self.end[blocks.first[block]] = self.end[blocks.second[block]] = clock
        self.clocks[rank], self.levels[rank] = clock, level + blocks.change[block]
        self.rows[rank].append(block)
        self.position[rank] += 1
        last = blocks.nodes[block][-1]
        if blocks.stride <= last < 2 * blocks.stride:
            queue.append(last + blocks.stride)


def paired(blocks: Blocks, rows: Rows, habit: Habit) -> Rows | None:
    """The rows' orders of forwards and of input gradients run side by side in time, in pairs where both are there.

    None where the memory does not let it end.
    """
    return _Pairing(blocks, rows, habit).run()


@dataclass
class _Side:
    """One rank while it grows: what is left of its two orders, weight gradients that wait, its clock and memory."""

    forwards: list[int]
    backwards: list[int]
    before: list[int]
    at: list[int] = field(default_factory=lambda: [0, 0])
    weights: deque[int] = field(default_factory=deque)
    row: list[int] = field(default_factory=list)
    free: float = 0.0
    level: float = 0.0


class _Pairing:
    def __init__(self, blocks: Blocks, rows: Rows, habit: Habit) -> None:
        self.blocks, self.habit, self.room = blocks, habit, blocks.problem.room + EPS
        self.end = [NEVER] * (blocks.none + 2)
        self.end[blocks.none] = 0.0
        self.sides = [self._side(row) for row in rows]
        self.heap = [(0.0, rank) for rank in range(len(rows))]

    def _side(self, row: list[int]) -> _Side:
        side, stride = _Side([], [], []), self.blocks.stride
        for block in row:
            for node in self.blocks.nodes[block]:
                if node < stride:
                    side.forwards.append(node)
                    side.before.append(len(side.backwards))
                elif node < 2 * stride:
                    side.backwards.append(node)
        return side

    def run(self) -> Rows | None:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            side = self.sides[rank]
            if now < side.free - EPS:
                continue  # it is called again when it is free
            block = self._choose(side, now, rank)
            if block is not None:
                self._do(side, block, now, rank)
        done = all(s.at == [len(s.forwards), len(s.backwards)] for s in self.sides)
        return [side.row + list(side.weights) for side in self.sides] if done else None

    def _arrival(self, node: int) -> float:
        """When the node's message is there, as far as is known by now: infinite where its sender has not started."""
        end = self.end[self.blocks.need[node]]
        return end + self.blocks.hop[node] if end >= 0 else float("inf")

    def _choose(self, side: _Side, now: float, rank: int) -> int | None:
        """The block to start now; None to wait (the rank is called again when something arrives)."""
        blocks = self.blocks
        forward = side.forwards[side.at[0]] if side.at[0] < len(side.forwards) else None
        backward = side.backwards[side.at[1]] if side.at[1] < len(side.backwards) else None
        if forward is not None and side.level + blocks.rise[forward] > self.room:
            if side.weights:
                return side.weights.popleft()
            forward = None
        times = [self._arrival(node) if node is not None else float("inf") for node in (forward, backward)]
        here = [time <= now + EPS for time in times]
        if forward is not None and backward is not None:
            pair = blocks.pair(forward, backward, False)
            saved = blocks.time[forward] + blocks.time[backward] - blocks.time[pair]
            if all(here) and saved > -EPS:
                return pair
            if saved > EPS and max(times) <= now + self.habit.patience * saved + EPS:
                return self._weight_before(side, now, max(times), rank)
        if here[1]:
            return backward
        if here[0] and forward is not None and side.before[side.at[0]] <= side.at[1] + self.habit.ahead:
            return forward
        return self._weight_before(side, now, min(times), rank)

    def _weight_before(self, side: _Side, now: float, until: float, rank: int) -> int | None:
        """A weight gradient that fits before `until`, or None and a call at that time."""
        if side.weights and now + (1 - self.habit.late) * self.blocks.time[side.weights[0]] <= until + EPS:
            return side.weights.popleft()
        if until > now + EPS and until < float("inf"):
            self._call(rank, until)
        return None

    def _call(self, rank: int, at: float) -> None:
        heapq.heappush(self.heap, (at, rank))

    def _do(self, side: _Side, block: int, now: float, rank: int) -> None:
        blocks = self.blocks
        side.row.append(block)
        side.free = now + blocks.time[block]
        side.level += blocks.change[block]
        for node in blocks.nodes[block]:
            if node < blocks.stride:
                side.at[0] += 1
            elif node < 2 * blocks.stride:
                side.at[1] += 1
                side.weights.append(node + blocks.stride)
        self._call(rank, side.free)
        for node, feed, hop in (
            (blocks.first[block], blocks.feed[block], blocks.feed_hop[block]),
            (blocks.second[block], blocks.feed2[block], blocks.feed2_hop[block]),
        ):
            self.end[node] = side.free
            if feed != blocks.none:
                self._call(blocks.rank[feed], side.free + hop)
