"""The neighbourhood of a schedule: moves on a critical path, and an estimate of the value after each.

A move replaces a range of one rank's sequence by operations of the same nodes: an operation shifts to another index, or, with
pairs, a pair is formed, split or recombined. Critical blocks and shifts are those of Nowicki and Smutnicki (1996), the
estimate by heads and tails is that of Balas and Vazacopoulos (1998); here every rank also has a limit on its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.evaluate import Evaluation
from pipeloom.solver.instance import Instance, Sequences

CriticalBlock = tuple[int, int, int]  # rank, first index, last index


@dataclass(frozen=True)
class TabuParameters:
    """The constants of tabu search: the choice of the moves that are evaluated, then those of the walk."""

    # Whether pairs are formed and split. They gain nothing where no two actions overlap.
    pairs: bool = False
    # Whether I and W become one B, and apart again. That gains nothing where a B takes as long as both.
    whole: bool = False
    # How far an operation shifts at once (to the end of its block if that is nearer), and how far away its partner in a pair may
    # be; None: any. A longer reach estimates more operations per move.
    reach: int | None = None
    # Number of positions on the critical path whose moves are estimated, drawn at random; None: all. All of them give better
    # moves, but with pairs far fewer per second.
    sampled_positions: int | None = None
    # Tenure in moves: the minimum, and the range of the random part. With a shorter one the search cycles; with a longer one it
    # cannot undo a poor move. The random part breaks cycles that a fixed tenure leaves.
    tenure: int = 15
    tenure_range: int = 25
    # Moves without progress before a restart from the best: more search deeper around one solution, fewer diversify.
    patience: int = 2000
    # Random moves after a restart: after too few it returns to the same local optimum, after too many the quality is lost.
    perturbations: int = 6
    # Draws per random move of a restart: a tight memory limit refuses most of them.
    draws: int = 20
    # Moves between two polls of the clock and of the progress callback: fewer stop sooner, more cost less.
    poll_interval: int = 16


class Move(NamedTuple):
    """Replacement of the operations of `rank` from index `low` to `high`, both included, by `operations`.

    `makes` and `breaks` are the attributes (an order of two operations, or a pair) that the move creates and destroys; tabu
    search uses them to avoid undoing it.
    """

    rank: int
    low: int
    high: int
    operations: tuple[int, ...]
    makes: tuple[int, ...]
    breaks: tuple[int, ...]


# The first element of the attributes of moves other than shifts. Plain integers: tabu search looks attributes up for every move,
# and the hash of an enum's member is computed in Python.
APART, TOGETHER = -1, -2


class SequenceState:
    """Sequences, with the place of every node and the memory at every operation.

    Attributes:
        sequences: rank -> its operations.
        place: node -> index in its rank's sequence.
        levels: rank -> memory before each operation.
        peaks: rank -> memory at the peak of each operation.
    """

    def __init__(self, instance: Instance, sequences: Sequences) -> None:
        self.table, self.memory_limit = instance.table, instance.memory_limit + TIME_TOLERANCE
        self.sequences = [list(sequence) for sequence in sequences]
        self.place = [0] * self.table.none
        self.levels = [[0.0] * len(sequence) for sequence in sequences]
        self.peaks = [[0.0] * len(sequence) for sequence in sequences]
        for rank, sequence in enumerate(sequences):
            self._refresh(rank, 0, len(sequence) - 1)

    def _refresh(self, rank: int, low: int, high: int) -> None:
        """Update places and memory from index `low`, the level before which is correct already, to `high`."""
        sequence, levels, peaks, place = self.sequences[rank], self.levels[rank], self.peaks[rank], self.place
        rise, change, nodes, none = self.table.rise, self.table.change, self.table.nodes, self.table.none
        level = levels[low]
        for at in range(low, high + 1):
            operation = sequence[at]
            levels[at], peaks[at] = level, level + rise[operation]
            level += change[operation]
            if operation < none:
                place[operation] = at
            else:
                for node in nodes[operation]:
                    place[node] = at

    def apply(self, move: Move) -> Move:
        """Make the move, and return its inverse."""
        rank, low, high, operations, makes, breaks = move
        before = tuple(self.sequences[rank][low : high + 1])
        self.sequences[rank][low : high + 1] = operations
        if len(operations) == len(before):
            self._refresh(rank, low, high)
        else:
            level, count = self.levels[rank][low], len(operations)
            self.levels[rank][low : high + 1] = [level] * count
            self.peaks[rank][low : high + 1] = [level] * count
            self._refresh(rank, low, len(self.sequences[rank]) - 1)
        return Move(rank, low, low + len(operations) - 1, before, breaks, makes)

    def allows_shift(self, rank: int, source: int, target: int) -> bool:
        """Return whether order on the rank and memory allow a shift from `source` to `target` (a cycle may remain)."""
        table, place, levels, peaks = self.table, self.place, self.levels[rank], self.peaks[rank]
        sequence = self.sequences[rank]
        operation = sequence[source]
        before, after = table.fixed_order(operation)
        change, limit = table.change[operation], self.memory_limit
        if source < target:
            for node in after:
                if place[node] <= target:
                    return False
            level = levels[target] + table.change[sequence[target]] - change
            return level + table.rise[operation] <= limit and (
                change >= 0 or max(peaks[source + 1 : target + 1]) - change <= limit
            )
        for node in before:
            if place[node] >= target:
                return False
        return levels[target] + table.rise[operation] <= limit and (
            change <= 0 or max(peaks[target:source]) + change <= limit
        )

    def allows(self, rank: int, low: int, operations: tuple[int, ...]) -> bool:
        """Return whether order on the rank and memory allow these operations from index `low` on, in place of those of the same
        nodes (a cycle through other ranks may remain).
        """
        table, m = self.table, self.table.microbatches
        nodes_of, rise, change, predecessor = table.nodes, table.rise, table.change, table.predecessor
        stride, level = table.stride, self.levels[rank][low]
        in_order = 2 * stride if table.saved else table.none  # nodes below this number are first in, first out
        coming = {node for operation in operations for node in nodes_of[operation]}
        for operation in operations:
            if level + rise[operation] > self.memory_limit:
                return False
            level += change[operation]
            nodes = nodes_of[operation]
            for node in nodes:
                if predecessor[node] in coming or (node < in_order and node % m and node - 1 in coming):
                    return False
                if node >= 2 * stride and node - stride in coming and node - stride not in nodes:
                    return False
            coming.difference_update(nodes)
        return True


def critical_blocks(state: SequenceState, evaluation: Evaluation, random: Random) -> list[CriticalBlock]:
    """Return the blocks of one critical path, drawn at random: its runs of operations on one rank."""
    table, sequences = state.table, state.sequences
    start, end, first = evaluation.start, evaluation.end, table.first
    lasts = [end[first[sequence[-1]]] + shift for sequence, shift in zip(sequences, evaluation.offset, strict=True)]
    rank = random.choice([r for r, value in enumerate(lasts) if value >= evaluation.value - TIME_TOLERANCE])
    at = high = len(sequences[rank]) - 1
    blocks = []
    while True:
        operation = sequences[rank][at]
        begin = start[first[operation]]
        senders = [
            sender
            for sender, hop in (
                (table.predecessor[operation], table.hop[operation]),
                (table.predecessor2[operation], table.hop2[operation]),
            )
            if sender != table.none and end[sender] + hop == begin
        ]
        on_rank = at > 0 and end[first[sequences[rank][at - 1]]] == begin
        if on_rank and not (senders and random.random() < 0.5):
            at -= 1
            continue
        blocks.append((rank, at, high))
        if not senders:
            return blocks
        sender = random.choice(senders)
        rank, at = table.rank[sender], state.place[sender]
        high = at


def neighbours(
    state: SequenceState, blocks: list[CriticalBlock], random: Random, parameters: TabuParameters
) -> Iterator[Move]:
    """Yield the moves at positions of the blocks that order on the rank and memory allow.

    Every operation shifts by one, and to both ends of its block, or by `reach` towards them; for pairs, see the functions below.
    """
    places = [(rank, at, low, high) for rank, low, high in blocks for at in range(low, high + 1)]
    count, pairs, whole = parameters.sampled_positions, parameters.pairs, parameters.whole
    if count is not None and len(places) > count:
        places = random.sample(places, count)
    reach = len(state.place) if parameters.reach is None else parameters.reach
    near = reach if count is None else 1  # if all positions are visited, the previous one yields this exchange already
    for rank, at, low, high in places:
        for target in {max(low, at - reach), max(low, at - near), min(high, at + 1), min(high, at + reach)}:
            if target != at and (move := shift(state, rank, at, target)) is not None:
                yield move
        if whole:
            yield from _whole(state, rank, at, reach)
        if pairs:
            yield from _pairing(state, rank, at, reach)


def shift(state: SequenceState, rank: int, source: int, target: int) -> Move | None:
    """Return the move of the operation at `source` to index `target`; None if order on the rank or memory does not allow it."""
    if not state.allows_shift(rank, source, target):
        return None
    sequence = state.sequences[rank]
    operation, passed = sequence[source], sequence[target]
    if source < target:
        operations = (*sequence[source + 1 : target + 1], operation)
        return Move(rank, source, target, operations, (passed, operation), (operation, passed))
    operations = (operation, *sequence[target:source])
    return Move(rank, target, source, operations, (operation, passed), (passed, operation))


def _pairing(state: SequenceState, rank: int, at: int, reach: int) -> Iterator[Move]:
    """Yield the moves that form, split or recombine a pair or a B at index `at`."""
    nodes = state.table.nodes[state.sequences[rank][at]]
    if len(nodes) > 1:
        yield from _split(state, rank, at)
        yield from _pair_anew(state, rank, at)
    elif nodes[0] < 2 * state.table.stride:
        yield from _pair(state, rank, at, reach)


def _whole(state: SequenceState, rank: int, at: int, reach: int) -> Iterator[Move]:
    """Yield the moves that separate the W of a B, or of a pair, at index `at`, or merge the I or W there with the other."""
    table, sequence = state.table, state.sequences[rank]
    nodes = table.nodes[sequence[at]]
    kind = nodes[-1] // table.stride
    if kind == 2 and len(nodes) > 1:
        operations = table.operation(*nodes[:-1]), nodes[-1]
        if state.allows(rank, at, operations):
            yield Move(rank, at, at, operations, (APART, *nodes), (TOGETHER, *nodes))
    elif kind:
        input_grad = nodes[-1] if kind == 1 else nodes[0] - table.stride
        yield from _merge(state, rank, state.place[input_grad], state.place[input_grad + table.stride], reach)


def _merge(state: SequenceState, rank: int, at: int, to: int, reach: int) -> Iterator[Move]:
    """Yield the merges of an I at `at`, alone or paired, with its W a little later, if that is shorter than the two."""
    if to > at + reach:
        return
    table, sequence = state.table, state.sequences[rank]
    whole = table.operation(*table.nodes[sequence[at]], sequence[to])
    if table.time[whole] < table.time[sequence[at]] + table.time[sequence[to]] - TIME_TOLERANCE:
        between = sequence[at + 1 : to]
        yield from _join(state, rank, (at, to), whole, [(whole, *between), (*between, whole)])


def _split(state: SequenceState, rank: int, at: int) -> Iterator[Move]:
    """Yield the splits of a pair into its two actions, in both orders."""
    table = state.table
    nodes = table.nodes[state.sequences[rank][at]]
    if nodes[0] >= table.stride:
        return
    backward = table.operation(*nodes[1:])
    for operations in ((nodes[0], backward), (backward, nodes[0])):
        if state.allows(rank, at, operations):
            yield Move(rank, at, at, operations, (APART, *nodes), (TOGETHER, *nodes))


def _pair(state: SequenceState, rank: int, at: int, reach: int) -> Iterator[Move]:
    """Yield pairs of the single F or I at `at` with the nearest single one of the other kind on each side, at either place."""
    table, sequence = state.table, state.sequences[rank]
    node, stride = sequence[at], table.stride
    for places in (range(at - 1, max(-1, at - 1 - reach), -1), range(at + 1, min(len(sequence), at + 1 + reach))):
        for to in places:
            other = sequence[to]
            if other < 2 * stride and (other < stride) != (node < stride):
                yield from _pair_with(state, rank, (min(at, to), max(at, to)), reach)
                break


def _pair_with(state: SequenceState, rank: int, ends: tuple[int, int], reach: int) -> Iterator[Move]:
    """Yield F|I of the nodes at both ends of a range, and F|B if W is near and the pair needs less memory with it."""
    table, sequence, (low, high) = state.table, state.sequences[rank], ends
    forward, backward = sorted((sequence[low], sequence[high]))
    pair, between = table.pair(forward, backward, False), sequence[low + 1 : high]
    yield from _join(state, rank, ends, pair, [(pair, *between), (*between, pair)])
    weight = state.place[backward + table.stride]
    whole = table.pair(forward, backward, True)
    if table.rise[whole] >= table.rise[pair] - TIME_TOLERANCE or weight > high + reach:
        return
    last = max(high, weight)
    before, after = (
        [sequence[at] for at in part if at != weight] for part in (range(low + 1, high), range(high + 1, last + 1))
    )
    yield from _join(state, rank, (low, last), whole, [(whole, *before, *after), (*before, whole, *after)])


def _join(
    state: SequenceState, rank: int, ends: tuple[int, int], joined: int, ways: list[tuple[int, ...]]
) -> Iterator[Move]:
    """Yield a move for each of `ways` to replace the operations between `ends` that is allowed; `joined` is the new operation."""
    nodes = state.table.nodes[joined]
    for operations in set(ways):
        if state.allows(rank, ends[0], operations):
            yield Move(rank, *ends, operations, (TOGETHER, *nodes), (APART, *nodes))


def _pair_anew(state: SequenceState, rank: int, at: int) -> Iterator[Move]:
    """Yield the moves in which the pair at `at` exchanges one of its actions for the single action next to it."""
    table, sequence = state.table, state.sequences[rank]
    nodes = table.nodes[sequence[at]]
    if nodes[0] >= table.stride or len(nodes) > 2:
        return
    forward, backward = nodes
    for to in (at - 1, at + 1):
        if not 0 <= to < len(sequence) or sequence[to] >= 2 * table.stride:
            continue
        other = sequence[to]
        left, pair = (
            (forward, table.pair(other, backward, False))
            if other < table.stride
            else (backward, table.pair(forward, other, False))
        )
        for operations in ((pair, left), (left, pair)):
            if state.allows(rank, min(at, to), operations):
                yield Move(
                    rank, min(at, to), max(at, to), operations, (TOGETHER, *table.nodes[pair]), (TOGETHER, *nodes)
                )


def random_move(state: SequenceState, random: Random, parameters: TabuParameters) -> Move | None:
    """Return a random move of `neighbours` at two adjacent positions; None if the draw is not allowed."""
    rank = random.randrange(len(state.sequences))
    at = random.randrange(len(state.sequences[rank]) - 1)
    moves = list(neighbours(state, [(rank, at, at + 1)], random, parameters))
    return random.choice(moves) if moves else None


def estimate(state: SequenceState, evaluation: Evaluation, tail: list[float], move: Move) -> float:
    """Return about the length of the longest path through the operations of the move, estimated from the times before it."""
    rank, low, high, operations, _, _ = move
    sequence, table = state.sequences[rank], state.table
    predecessor, hop, time = table.predecessor, table.hop, table.time
    successor, successor_hop = table.successor, table.successor_hop
    end, none = evaluation.end, table.none
    clock = end[table.first[sequence[low - 1]]] if low else 0.0
    starts = []
    for operation in operations:
        arrival = end[predecessor[operation]] + hop[operation]
        if arrival > clock:
            clock = arrival
        if operation >= none:
            arrival = end[table.predecessor2[operation]] + table.hop2[operation]
            if arrival > clock:
                clock = arrival
        starts.append(clock)
        clock += time[operation]
    after = tail[table.first[sequence[high + 1]]] if high + 1 < len(sequence) else evaluation.offset[rank]
    longest = 0.0
    for operation, begin in zip(reversed(operations), reversed(starts), strict=True):
        other = tail[successor[operation]] + successor_hop[operation]
        if other > after:
            after = other
        if operation >= none:
            other = tail[table.successor2[operation]] + table.successor2_hop[operation]
            if other > after:
                after = other
        after += time[operation]
        if begin + after > longest:
            longest = begin + after
    return longest
