"""Moves along a critical path: one action goes to another place of its rank's word, and what that could gain."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from pipeloom.solver.evaluation import Evaluation
from pipeloom.solver.problem import EPS, Problem, Words


class Move(NamedTuple):
    """The entry at `source` of `rank`'s word goes to index `target`."""

    rank: int
    source: int
    target: int


class State:
    """Words with the place of every node and the memory after every entry.

    Attributes:
        words: rank -> its nodes.
        place: node -> index in its rank's word.
        levels: rank -> memory after each entry.
    """

    def __init__(self, problem: Problem, words: Words) -> None:
        self.problem = problem
        self.words = [list(row) for row in words]
        self.place = [0] * problem.tables.none
        self.levels: list[list[float]] = [[0.0] * len(row) for row in words]
        for rank, row in enumerate(self.words):
            self._refresh(rank, 0, len(row) - 1)

    def _refresh(self, rank: int, low: int, high: int) -> None:
        row, levels, change = self.words[rank], self.levels[rank], self.problem.tables.change
        level = levels[low - 1] if low else 0.0
        for at in range(low, high + 1):
            node = row[at]
            level += change[node]
            levels[at] = level
            self.place[node] = at

    def apply(self, move: Move) -> None:
        row = self.words[move.rank]
        row.insert(move.target, row.pop(move.source))
        self._refresh(move.rank, min(move.source, move.target), max(move.source, move.target))

    def undo(self, move: Move) -> None:
        self.apply(Move(move.rank, move.target, move.source))

    def allows(self, move: Move) -> bool:
        """Whether the order on the rank itself and its memory allow the move (a cycle through other ranks may remain)."""
        rank, source, target = move
        tables = self.problem.tables
        row, levels, room = self.words[rank], self.levels[rank], self.problem.room + EPS
        node, m = row[source], tables.microbatches
        letter, change = node // m, tables.change[node]
        if source < target:
            partner, weight = tables.feed[node], tables.own_weight[node]
            for other in row[source + 1 : target + 1]:
                if other in (partner, weight) or other // m == letter:
                    return False
            return change >= 0 or max(levels[source + 1 : target + 1]) - change <= room
        need = tables.need[node]
        for other in row[target:source]:
            if other == need or tables.own_weight[other] == node or other // m == letter:
                return False
        before = levels[target - 1] if target else 0.0
        return change <= 0 or max(before, *levels[target:source]) + change <= room


def critical_blocks(state: State, found: Evaluation, random: Random) -> list[tuple[int, int, int]]:
    """(rank, first index, last index) of the runs of one critical path that lie on one rank, two entries or more."""
    tables, words = state.problem.tables, state.words
    start, end = found.start, found.end
    lasts = [end[row[-1]] + shift for row, shift in zip(words, found.offset, strict=True)]
    rank = random.choice([r for r, value in enumerate(lasts) if value >= found.value - EPS])
    at = len(words[rank]) - 1
    high = at
    blocks = []
    while True:
        node = words[rank][at]
        begin, need = start[node], tables.need[node]
        on_rank = at > 0 and end[words[rank][at - 1]] == begin
        by_message = need != tables.none and end[need] + tables.hop[node] == begin
        if on_rank and not (by_message and random.random() < 0.5):
            at -= 1
            continue
        if high > at:
            blocks.append((rank, at, high))
        if not by_message:
            return blocks
        rank, at = tables.rank[need], state.place[need]
        high = at


def neighbours(state: State, blocks: list[tuple[int, int, int]]) -> Iterator[Move]:
    """Swaps of two neighbours in a block, and moves of an entry to either end of its block, as far as allowed."""
    for rank, low, high in blocks:
        for at in range(low, high):
            for move in {Move(rank, at, at + 1), Move(rank, at, high), Move(rank, at + 1, low)}:
                if state.allows(move):
                    yield move


def estimate(state: State, found: Evaluation, tail: list[float], move: Move) -> float:
    """About the length of the longest path through what the move touches, from the times before the move."""
    rank, source, target = move
    row, tables = state.words[rank], state.problem.tables
    need, hop, feed, feed_hop, time = tables.need, tables.hop, tables.feed, tables.feed_hop, tables.time
    end = found.end
    if source < target:
        run = [*row[source + 1 : target + 1], row[source]]
        low, high = source, target
    else:
        run = [row[source], *row[target:source]]
        low, high = target, source
    clock = end[row[low - 1]] if low else 0.0
    starts = []
    for node in run:
        arrival = end[need[node]] + hop[node]
        if arrival > clock:
            clock = arrival
        starts.append(clock)
        clock += time[node]
    after = tail[row[high + 1]] if high + 1 < len(row) else found.offset[rank]
    longest = 0.0
    for node, begin in zip(reversed(run), reversed(starts), strict=True):
        other = tail[feed[node]] + feed_hop[node]
        if other > after:
            after = other
        after += time[node]
        if begin + after > longest:
            longest = begin + after
    return longest
