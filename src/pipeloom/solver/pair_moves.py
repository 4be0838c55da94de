"""Moves of blocks: another order on a critical path, two actions made a pair, a pair taken apart; and what each could gain.

A move puts new blocks in the place of a stretch of one rank's row; it never changes which actions the stretch holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pipeloom.solver.pair_blocks import Blocks, Times
from pipeloom.solver.pair_state import PairState, Stretch
from pipeloom.solver.problem import EPS

REACH = 8
PLACES = 24


def critical_stretches(state: PairState, found: Times, random: Random) -> list[tuple[int, int, int]]:
    """(rank, first index, last index) of the runs of one critical path that lie on one rank."""
    blocks, rows = state.blocks, state.rows
    start, end, first = found.start, found.end, blocks.first
    lasts = [end[first[row[-1]]] + shift for row, shift in zip(rows, found.offset, strict=True)]
    rank = random.choice([r for r, value in enumerate(lasts) if value >= found.value - EPS])
    at = high = len(rows[rank]) - 1
    runs = []
    while True:
        block = rows[rank][at]
        begin = start[first[block]]
        messages = [
            need
            for need, hop in ((blocks.need[block], blocks.hop[block]), (blocks.need2[block], blocks.hop2[block]))
            if need != blocks.none and end[need] + hop == begin
        ]
        on_rank = at > 0 and end[first[rows[rank][at - 1]]] == begin
        if on_rank and not (messages and random.random() < 0.5):
            at -= 1
            continue
        runs.append((rank, at, high))
        if not messages:
            return runs
        need = random.choice(messages)
        rank, at = blocks.rank[need], state.place[need]
        high = at


def neighbours(state: PairState, runs: list[tuple[int, int, int]], random: Random) -> Iterator[Stretch]:
    """Moves at some places of the runs of a critical path, as far as the rank's own order and memory allow."""
    places = [(rank, at, low, high) for rank, low, high in runs for at in range(low, high + 1)]
    if len(places) > PLACES:
        places = random.sample(places, PLACES)
    for rank, at, low, high in places:
        for target in {max(low, at - REACH), max(low, at - 1), min(high, at + 1), min(high, at + REACH)}:
            if target != at:
                yield from _shift(state, rank, at, target)
        nodes = state.blocks.nodes[state.rows[rank][at]]
        if len(nodes) > 1:
            yield from _split(state, rank, at)
            yield from _remate(state, rank, at)
        elif nodes[0] < 2 * state.blocks.stride:
            yield from _merge(state, rank, at)
        yield from _fuse(state, rank, at)


def _shift(state: PairState, rank: int, source: int, target: int) -> Iterator[Stretch]:
    row = state.rows[rank]
    block, passed = row[source], row[target]
    if source < target:
        new = (*row[source + 1 : target + 1], block)
        order = (passed, block)
    else:
        new = (block, *row[target:source])
        order = (block, passed)
    low, high = min(source, target), max(source, target)
    if state.allows(rank, low, new):
        yield Stretch(rank, low, high, new, order, order[::-1])


def _split(state: PairState, rank: int, at: int) -> Iterator[Stretch]:
    """The pair's two actions one after the other, in both orders; its W, or a B's, apart."""
    blocks, block = state.blocks, state.rows[rank][at]
    nodes = blocks.nodes[block]
    ways: list[tuple[int, ...]] = []
    if nodes[-1] >= 2 * blocks.stride:
        rest = nodes[0] if len(nodes) == 2 else blocks.pair(nodes[0], nodes[1], False)
        ways.append((rest, nodes[-1]))
    if nodes[0] < blocks.stride:
        back = nodes[1] if len(nodes) == 2 else blocks.backward(nodes[1])
        ways += [(nodes[0], back), (back, nodes[0])]
    for new in ways:
        if state.allows(rank, at, new):
            yield Stretch(rank, at, at, new, (-1, *nodes), (-2, *nodes))


def _fuse(state: PairState, rank: int, at: int) -> Iterator[Stretch]:
    """An I, alone or paired, and its W a little later, as one block at the I's place, where that is shorter than the two."""
    blocks, row = state.blocks, state.rows[rank]
    nodes = blocks.nodes[row[at]]
    backward, stride = nodes[-1], blocks.stride
    if not stride <= backward < 2 * stride:
        return
    to = state.place[backward + stride]
    if to > at + REACH:
        return
    whole = blocks.backward(backward) if len(nodes) == 1 else blocks.pair(nodes[0], backward, True)
    new = (whole, *row[at + 1 : to])
    if blocks.time[whole] < blocks.time[row[at]] + blocks.time[row[to]] - EPS and state.allows(rank, at, new):
        yield Stretch(rank, at, to, new, (-2, *blocks.nodes[whole]), (-1, *blocks.nodes[whole]))


def _merge(state: PairState, rank: int, at: int) -> Iterator[Stretch]:
    """The single F or I at `at` with the nearest single of the other kind, before or after, at either's place."""
    blocks, row = state.blocks, state.rows[rank]
    mine = row[at]
    before = range(at - 1, max(-1, at - 1 - REACH), -1)
    for places in (before, range(at + 1, min(len(row), at + 1 + REACH))):
        to = next((to for to in places if _can_mate(blocks, mine, row[to])), None)
        if to is None:
            continue
        pair = blocks.pair(min(mine, row[to]), max(mine, row[to]), False)
        low, high = min(at, to), max(at, to)
        between = tuple(row[low + 1 : high])
        for new in {(pair, *between), (*between, pair)}:
            if state.allows(rank, low, new):
                yield Stretch(rank, low, high, new, (-2, *blocks.nodes[pair]), (-1, *blocks.nodes[pair]))


def _can_mate(blocks: Blocks, mine: int, other: int) -> bool:
    """Whether `other` is a single action and the other half of a pair with the single F or I `mine`."""
    return other < 2 * blocks.stride and (other < blocks.stride) != (mine < blocks.stride)


def _remate(state: PairState, rank: int, at: int) -> Iterator[Stretch]:
    """The pair at `at` lets go of one action and takes a single one next to it instead."""
    blocks, row = state.blocks, state.rows[rank]
    nodes = blocks.nodes[row[at]]
    if nodes[0] >= blocks.stride or len(nodes) > 2:
        return
    forward, backward = nodes
    for to in (at - 1, at + 1):
        if not 0 <= to < len(row):
            continue
        other = row[to]
        if len(blocks.nodes[other]) > 1 or other >= 2 * blocks.stride:
            continue
        pair = blocks.pair(other, backward, False) if other < blocks.stride else blocks.pair(forward, other, False)
        left = forward if other < blocks.stride else backward
        for new in ((pair, left), (left, pair)):
            if state.allows(rank, min(at, to), new):
                yield Stretch(rank, min(at, to), max(at, to), new, (-2, *blocks.nodes[pair]), (-2, *nodes))


def slide(state: PairState, rank: int, low: int, high: int, later: bool) -> Stretch | None:
    """The forwards of the stretch against its backwards, by one place: one pair less, an F first and an I last, or the reverse.

    `later` False: (f1|i1) (f2|i2) -> f1 (f2|i1) i2; True: an F at `low` and an I at `high` close up to pairs. None if the stretch
    does not allow it.
    """
    blocks, row = state.blocks, state.rows[rank]
    stride = blocks.stride
    forwards, backwards, others = [], [], []
    for at in range(low, high + 1):
        nodes = blocks.nodes[row[at]]
        if len(nodes) > 2 or (len(nodes) == 2 and nodes[0] >= stride):
            return None
        forwards += [node for node in nodes if node < stride]
        backwards += [node for node in nodes if stride <= node < 2 * stride]
        others += [(len(backwards), node) for node in nodes if node >= 2 * stride]
    if later:
        pairs = [blocks.pair(f, i, False) for f, i in zip(forwards, backwards, strict=False)]
        mated = len(pairs)
        body = [*pairs, *forwards[mated:], *backwards[mated:]]
        lead = 0
    else:
        if not forwards or not backwards:
            return None
        pairs = [blocks.pair(f, i, False) for f, i in zip(forwards[1:], backwards, strict=False)]
        mated = len(pairs)
        body = [forwards[0], *pairs, *forwards[mated + 1 :], *backwards[mated:]]
        lead = 1
    new: list[int] = []
    for index, block in enumerate(body):
        new.append(block)
        while others and others[0][0] <= index + 1 - lead:
            new.append(others.pop(0)[1])
    new += [node for _, node in others]
    if not state.allows(rank, low, tuple(new)):
        return None
    return Stretch(rank, low, high, tuple(new), (-3, rank, low), (-3, rank, low))


def estimate(state: PairState, found: Times, tail: list[float], move: Stretch) -> float:
    """About the length of the longest path through what the move touches, from the times before the move."""
    rank, low, high, new = move[:4]
    row, blocks = state.rows[rank], state.blocks
    end, time = found.end, blocks.time
    need, hop, need2, hop2 = blocks.need, blocks.hop, blocks.need2, blocks.hop2
    feed, feed_hop, feed2, feed2_hop = blocks.feed, blocks.feed_hop, blocks.feed2, blocks.feed2_hop
    clock = end[blocks.first[row[low - 1]]] if low else 0.0
    starts = []
    for block in new:
        arrival = end[need[block]] + hop[block]
        if arrival > clock:
            clock = arrival
        arrival = end[need2[block]] + hop2[block]
        if arrival > clock:
            clock = arrival
        starts.append(clock)
        clock += time[block]
    after = tail[blocks.first[row[high + 1]]] if high + 1 < len(row) else found.offset[rank]
    longest = 0.0
    for block, begin in zip(reversed(new), reversed(starts), strict=True):
        other = tail[feed[block]] + feed_hop[block]
        if other > after:
            after = other
        other = tail[feed2[block]] + feed2_hop[block]
        if other > after:
            after = other
        after += time[block]
        if begin + after > longest:
            longest = begin + after
    return longest
