"""Weight gradients that gain nothing by being apart: back into their pair or their B, where that makes nothing longer."""

from __future__ import annotations

from collections import deque

from pipeloom.solver.pair_blocks import Blocks, Rows, times_of
from pipeloom.solver.problem import EPS

WORK = 1_000_000  # blocks looked at; beyond that what is left stays as it is
Place = tuple[int, int]  # rank, index of a block that ends with an I whose W is apart


def fused(blocks: Blocks, rows: Rows) -> Rows:
    """The rows with as many F|I and their W written as F|B, and I and W as B, as make the value no larger.

    W goes to where its I is, so that no rank holds more. Groups are tried whole, then halved, the larger first.
    """
    found = times_of(blocks, rows)
    apart = range(blocks.stride, 2 * blocks.stride)
    places = [
        (rank, at) for rank, row in enumerate(rows) for at, block in enumerate(row) if blocks.nodes[block][-1] in apart
    ]
    if found is None or not places:
        return rows
    value, chosen, groups = found.value, set[Place](), deque([places])
    for _ in range(max(1, WORK // max(1, sum(map(len, rows))))):
        if not groups:
            break
        group = groups.popleft()
        tried = times_of(blocks, _with(blocks, rows, chosen | set(group)))
        if tried is not None and tried.value <= value + EPS:
            chosen |= set(group)
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return _with(blocks, rows, chosen)


def _with(blocks: Blocks, rows: Rows, chosen: set[Place]) -> Rows:
    made: Rows = []
    for rank, row in enumerate(rows):
        new: list[int] = []
        gone: set[int] = set()
        for at, block in enumerate(row):
            if block in gone:
                continue
            nodes = blocks.nodes[block]
            if (rank, at) in chosen:
                gone.add(nodes[-1] + blocks.stride)
                block = blocks.pair(*nodes, True) if len(nodes) == 2 else blocks.backward(nodes[0])
            new.append(block)
        made.append(new)
    return made
