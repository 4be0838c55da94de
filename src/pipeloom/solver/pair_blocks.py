"""Blocks: what a rank runs as one, an action or an overlapped pair, as integers; and when everything starts.

The search over pairs moves blocks where the other search moves actions. A block's number is its action's node; a pair, or a
B in one, gets a number when it is first made. As in `problem`, the k-th F or I of a stage is micro-batch k.
"""

from __future__ import annotations

from pipeloom.schedule.costs import PairTimes
from pipeloom.schedule.model import Schedule, parts
from pipeloom.solver.problem import EPS, Problem

Rows = list[list[int]]
NEVER = -1.0


class Blocks:
    """block -> values, one list each; the lists grow as pairs are made.

    Attributes:
        none, dump: nodes that are no action: one that has always ended, one whose end nobody reads.
        stride: S m, from a node to the one of the next kind.
        time: how long the block takes.
        nodes: its F, I and W, those that it has.
        first, second: the nodes whose ends others wait for (`dump`: there is none).
        need, hop, need2, hop2: the nodes whose messages it waits for, and how long these travel.
        feed, feed_hop, feed2, feed2_hop: the nodes that wait for its messages.
        rise, change: memory above the level before it, at its peak and after it.
    """

    def __init__(self, problem: Problem) -> None:
        tables = problem.tables
        self.problem, self.tables = problem, tables
        self.none, self.dump = tables.none, tables.none + 1
        self.stride = problem.stages * problem.microbatches
        self.pair_times = PairTimes.of(problem.costs, problem.stages)
        self.factors = problem.costs.factors(problem.microbatches)
        singles, alone = range(self.none), [self.none] * self.none
        self.time, self.rank = list(tables.time), list(tables.rank)
        self.nodes: list[tuple[int, ...]] = [(node,) for node in singles]
        self.first, self.second = list(singles), [self.dump] * self.none
        self.need, self.hop = tables.need[: self.none], tables.hop[: self.none]
        self.need2, self.hop2 = list(alone), [0.0] * self.none
        self.feed, self.feed_hop = tables.feed[: self.none], tables.feed_hop[: self.none]
        self.feed2, self.feed2_hop = list(alone), [0.0] * self.none
        self.change = list(tables.change)
        self.rise = [max(0.0, change) for change in self.change]
        self._made: dict[tuple[int, ...], int] = {}

    def pair(self, forward: int, backward: int, whole: bool) -> int:
        """The block F|I of two nodes; `whole`: F|B."""
        nodes = (forward, backward, backward + self.stride) if whole else (forward, backward)
        if nodes not in self._made:
            factors = self._factor(forward), self._factor(backward)
            time = self.pair_times.time(self._stage(forward), self._stage(backward), not whole, factors)
            self._add(nodes, backward, time)
        return self._made[nodes]

    def backward(self, node: int) -> int:
        """The block B of an I's node."""
        nodes = (node, node + self.stride)
        if nodes not in self._made:
            self._add(nodes, self.none, self._factor(node) * self.pair_times.spread.backward[self._stage(node)])
        return self._made[nodes]

    def _stage(self, node: int) -> int:
        return node // self.problem.microbatches % self.problem.stages

    def _factor(self, node: int) -> float:
        return self.factors[node % self.problem.microbatches]

    def _add(self, nodes: tuple[int, ...], second: int, time: float) -> None:
        first, tables = nodes[0], self.tables
        self._made[nodes] = len(self.time)
        self.time.append(time)
        self.rank.append(tables.rank[first])
        self.nodes.append(nodes)
        self.first.append(first)
        self.second.append(second if second != self.none else self.dump)
        self.need.append(tables.need[first])
        self.hop.append(tables.hop[first])
        self.need2.append(tables.need[second])
        self.hop2.append(tables.hop[second])
        self.feed.append(tables.feed[first])
        self.feed_hop.append(tables.feed_hop[first])
        self.feed2.append(tables.feed[second])
        self.feed2_hop.append(tables.feed_hop[second])
        self.change.append(sum(tables.change[node] for node in nodes))
        self.rise.append(max(0.0, tables.change[first]))

    def rows_of(self, schedule: Schedule) -> Rows:
        """The schedule's blocks, its micro-batches numbered anew in the order in which each letter comes.

        A W leaves its pair or its B where it may follow at once without making the two longer: that is never worse.
        """
        m, rows = self.problem.microbatches, []
        for program in schedule.programs:
            done: dict[int, int] = {}
            row: list[int] = []
            for cell in program:
                nodes = []
                for action in parts(cell):
                    for kind in "IW" if action.kind == "B" else action.kind:
                        letter = "FIW".index(kind) * self.problem.stages + action.stage
                        nodes.append(letter * m + done.get(letter, 0))
                        done[letter] = done.get(letter, 0) + 1
                row += self.apart(self._block(nodes))
            rows.append(row)
        return rows

    def _block(self, nodes: list[int]) -> int:
        if len(nodes) == 1:
            return nodes[0]
        if nodes[0] >= self.stride:
            return self.backward(nodes[0])
        return self.pair(nodes[0], nodes[1], len(nodes) == 3)

    def apart(self, block: int) -> tuple[int, ...]:
        """The block, its W after it where that takes no longer."""
        nodes = self.nodes[block]
        weight = nodes[-1]
        if len(nodes) == 1 or weight < 2 * self.stride:
            return (block,)
        rest = nodes[0] if len(nodes) == 2 else self.pair(nodes[0], nodes[1], False)
        return (rest, weight) if self.time[rest] + self.time[weight] <= self.time[block] + EPS else (block,)

    def schedule_of(self, rows: Rows, name: str = "search") -> Schedule:
        """The rows as a Schedule; an I with its own W right after it, alone or paired, stays I and W."""
        shift, limit = (0, self.stride, self.stride), 4 * self.stride  # a Schedule has B between F and I

        def code(block: int) -> int:
            nodes = self.nodes[block]
            codes = [node + shift[node // self.stride] for node in nodes]
            if nodes[-1] >= 2 * self.stride and len(nodes) > 1:
                codes[-2] -= self.stride  # I and W in one: B
                codes.pop()
            return codes[0] if len(codes) == 1 else (codes[0] + 1) * limit + codes[1]

        return Schedule.of_codes(
            [[code(block) for block in row] for row in rows],
            placement=self.problem.placement,
            microbatches=self.problem.microbatches,
            name=name,
        )

    def fits(self, rows: Rows) -> bool:
        """Whether no rank's memory passes the room."""
        return all(peak <= self.problem.room + EPS for row in rows for peak in self.peaks(row))

    def peaks(self, row: list[int], level: float = 0.0) -> list[float]:
        """The peak of every block of the row, from `level` on."""
        found = []
        for block in row:
            found.append(level + self.rise[block])
            level += self.change[block]
        return found


class Times:
    """Start of every block, end of every node, and the value to be made small. Made by `times_of`.

    Attributes:
        value: the makespan, or the largest span.
        start: first node of a block -> time.
        end: node -> time; 0 for `Blocks.none`.
        order: the blocks, each after what it waits for.
        offset: rank -> what is added to its last end (0; less its first start where spans count).
    """

    __slots__ = ("end", "offset", "order", "start", "value")

    def __init__(self, start: list[float], end: list[float], order: list[int], offset: list[float]) -> None:
        self.start, self.end, self.order, self.offset = start, end, order, offset
        self.value = 0.0

    def tails(self, blocks: Blocks) -> list[float]:
        """node -> the longest time from the start of its block to the end, its rank's offset added; 0 or less for none."""
        time, rank, first, second = blocks.time, blocks.rank, blocks.first, blocks.second
        feed, hop, feed2, hop2 = blocks.feed, blocks.feed_hop, blocks.feed2, blocks.feed2_hop
        on_rank = list(self.offset)
        tail = [0.0] * (blocks.none + 2)
        tail[blocks.none] = min(self.offset)
        for block in reversed(self.order):
            home = rank[block]
            after = on_rank[home]
            other = tail[feed[block]] + hop[block]
            if other > after:
                after = other
            other = tail[feed2[block]] + hop2[block]
            if other > after:
                after = other
            on_rank[home] = tail[first[block]] = tail[second[block]] = after + time[block]
        return tail


def times_of(blocks: Blocks, rows: Rows, since: tuple[Times, int, int] | None = None) -> Times | None:
    """Every block as early as its rank's row and its messages allow; None if the rows have a cycle.

    Linear in the number of blocks. `since` is (earlier times, rank, index): only this rank's row differs from the rows that
    they belong to, from this index on.
    """
    time, first, second = blocks.time, blocks.first, blocks.second
    need, hop, need2, hop2 = blocks.need, blocks.hop, blocks.need2, blocks.hop2
    if since is None:
        end = [NEVER] * (blocks.none + 2)
        end[blocks.none] = 0.0
        start: list[float] = [0.0] * blocks.none
        order: list[int] = []
        position, clocks = [0] * len(rows), [0.0] * len(rows)
    else:
        start, end, order, position, clocks = _before(blocks, rows, *since)
    done = order.append
    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        clock, row, at = clocks[rank], rows[rank], position[rank]
        for block in row[at:] if at else row:
            arrival, arrival2 = end[need[block]], end[need2[block]]
            if arrival < 0 or arrival2 < 0:
                waiting[need[block] if arrival < 0 else need2[block]] = rank
                break
            arrival += hop[block]
            if arrival > clock:
                clock = arrival
            arrival2 += hop2[block]
            if arrival2 > clock:
                clock = arrival2
            one, two = first[block], second[block]
            start[one] = clock
            clock += time[block]
            end[one] = end[two] = clock
            done(block)
            at += 1
            if one in waiting:
                ready.append(waiting.pop(one))
            if two in waiting:
                ready.append(waiting.pop(two))
        position[rank] = at
        clocks[rank] = clock
    if any(at < len(row) for at, row in zip(position, rows, strict=True)):
        return None
    shifts = [-start[first[row[0]]] for row in rows] if blocks.problem.objective == "span" else [0.0] * len(rows)
    found = Times(start, end, order, shifts)
    found.value = max(clock + shift for clock, shift in zip(clocks, shifts, strict=True))
    return found


def _before(
    blocks: Blocks, rows: Rows, earlier: Times, rank: int, index: int
) -> tuple[list[float], list[float], list[int], list[int], list[float]]:
    """start, end, order, and every rank's position and clock, as they were before the first block that may change."""
    row, first, second = rows[rank], blocks.first, blocks.second
    cut = earlier.order.index(row[index - 1]) + 1 if index else 0
    order, end = earlier.order[:cut], list(earlier.end)
    for block in earlier.order[cut:]:
        end[first[block]] = end[second[block]] = NEVER
    position = [0] * len(rows)
    for block in order:
        position[blocks.rank[block]] += 1
    clocks = [end[first[line[at - 1]]] if at else 0.0 for line, at in zip(rows, position, strict=True)]
    return list(earlier.start), end, order, position, clocks
