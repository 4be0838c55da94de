"""Rows of blocks while they are searched: a stretch that is put in another's place, and whether memory allows it."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.solver.pair_blocks import Blocks, Rows
from pipeloom.solver.problem import EPS


class Stretch(NamedTuple):
    """`blocks` in the place of as many actions of `rank`'s row from index `low` to `high`, both included.

    `makes` and `breaks` name what is new and what is lost (an order of two blocks, a pair), so that a walk does not go back.
    """

    rank: int
    low: int
    high: int
    blocks: tuple[int, ...]
    makes: tuple[int, ...]
    breaks: tuple[int, ...]


class PairState:
    """Rows with the place of every node and the memory before every block.

    Attributes:
        rows: rank -> its blocks.
        place: node -> index in its rank's row.
        levels: rank -> memory before each block.
    """

    def __init__(self, blocks: Blocks, rows: Rows) -> None:
        self.blocks = blocks
        self.rows = [list(row) for row in rows]
        self.place = [0] * (blocks.none + 2)
        self.levels: list[list[float]] = [[0.0] * len(row) for row in rows]
        for rank, row in enumerate(rows):
            self._refresh(rank, 0, len(row) - 1)

    def _refresh(self, rank: int, low: int, high: int) -> None:
        """Places and memory from index `low`, whose memory before is right, to `high`."""
        row, levels, blocks = self.rows[rank], self.levels[rank], self.blocks
        level = levels[low] if row else 0.0
        for at in range(low, high + 1):
            block = row[at]
            levels[at] = level
            level += blocks.change[block]
            for node in blocks.nodes[block]:
                self.place[node] = at

    def apply(self, move: Stretch) -> Stretch:
        """Makes the move; returns the one that takes it back."""
        rank, low, high, new, makes, breaks = move
        old = tuple(self.rows[rank][low : high + 1])
        self.rows[rank][low : high + 1] = new
        if len(new) == len(old):
            self._refresh(rank, low, high)
        else:
            self.levels[rank][low : high + 1] = [self.levels[rank][low]] * len(new)
            self._refresh(rank, low, len(self.rows[rank]) - 1)
        return Stretch(rank, low, low + len(new) - 1, old, breaks, makes)

    def allows(self, rank: int, low: int, new: tuple[int, ...]) -> bool:
        """Whether the order on the rank itself and its memory allow these blocks from index `low` on, in place of the same
        actions (a cycle through other ranks may remain)."""
        blocks = self.blocks
        nodes_of, rise, change = blocks.nodes, blocks.rise, blocks.change
        need, m, stride = blocks.tables.need, blocks.problem.microbatches, blocks.stride
        level, room = self.levels[rank][low], blocks.problem.room + EPS
        coming = {node for block in new for node in nodes_of[block]}
        for block in new:
            if level + rise[block] > room:
                return False
            level += change[block]
            nodes = nodes_of[block]
            for node in nodes:
                if need[node] in coming or (node % m and node - 1 in coming):
                    return False
                if node >= 2 * stride and node - stride in coming and node - stride not in nodes:
                    return False
            coming.difference_update(nodes)
        return True
