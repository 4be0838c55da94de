"""When everything starts for given words, and how long the work after it takes: the inner loop of the search."""

from __future__ import annotations

from pipeloom.solver.problem import Problem, Words

NEVER = -1.0


class Evaluation:
    """Start and end of every node, the tails, and the value to be made small. Made by `evaluate`.

    Attributes:
        value: the makespan, or the largest span.
        start, end: node -> times; `end` has one more entry, 0, for the node that is none.
        order: the nodes, each after what it waits for.
        offset: rank -> what is added to its last end (0; less its first start where spans count).
    """

    __slots__ = ("end", "offset", "order", "start", "value")

    def __init__(self, start: list[float], end: list[float], order: list[int], offset: list[float]) -> None:
        self.start, self.end, self.order, self.offset = start, end, order, offset
        self.value = 0.0

    def tails(self, problem: Problem) -> list[float]:
        """node -> the longest time from its start to the end, its rank's offset added; 0 or less for none."""
        tables = problem.tables
        time, feed, hop, rank = tables.time, tables.feed, tables.feed_hop, tables.rank
        on_rank = list(self.offset)
        tail = [0.0] * tables.none
        tail.append(min(self.offset))
        for node in reversed(self.order):
            home = rank[node]
            after = on_rank[home]
            other = tail[feed[node]] + hop[node]
            if other > after:
                after = other
            on_rank[home] = tail[node] = after + time[node]
        return tail


def evaluate(problem: Problem, words: Words, since: tuple[Evaluation, int, int] | None = None) -> Evaluation | None:
    """Every node as early as its rank's word and its message allow; None if the words have a cycle.

    Linear in the number of nodes. `since` is (an evaluation, rank, index) of words that differed on this rank only, from this
    index on: what came before that place in its order is taken over.
    """
    tables = problem.tables
    time, need, hops = tables.time, tables.need, tables.hop
    if since is None:
        end = [NEVER] * tables.none
        end.append(0.0)
        start = [0.0] * tables.none
        order: list[int] = []
        position, clocks = [0] * len(words), [0.0] * len(words)
    else:
        start, end, order, position, clocks = _before(words, *since)
    done = order.append
    waiting: dict[int, int] = {}
    ready = list(range(len(words)))
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        row = words[rank]
        at = position[rank]
        for node in row[at:] if at else row:
            arrival = end[need[node]]
            if arrival < 0:
                waiting[need[node]] = rank
                break
            arrival += hops[node]
            if arrival > clock:
                clock = arrival
            start[node] = clock
            clock += time[node]
            end[node] = clock
            done(node)
            at += 1
            if node in waiting:
                ready.append(waiting.pop(node))
        position[rank] = at
        clocks[rank] = clock
    if len(order) < tables.none:
        return None
    offset = [-start[row[0]] for row in words] if problem.objective == "span" else [0.0] * len(words)
    found = Evaluation(start, end, order, offset)
    found.value = max(clock + shift for clock, shift in zip(clocks, offset, strict=True))
    return found


def _before(
    words: Words, earlier: Evaluation, rank: int, index: int
) -> tuple[list[float], list[float], list[int], list[int], list[float]]:
    """start, end, order, and every rank's position and clock, as they were before the first node that may change."""
    row = words[rank]
    cut = earlier.order.index(row[index - 1]) + 1 if index else 0
    order, end = earlier.order[:cut], list(earlier.end)
    for node in earlier.order[cut:]:
        end[node] = NEVER
    position = [_ended(line, end) for line in words]
    clocks = [end[row[at - 1]] if at else 0.0 for row, at in zip(words, position, strict=True)]
    return list(earlier.start), end, order, position, clocks


def _ended(row: list[int], end: list[float]) -> int:
    """How many of the row's nodes, which come first, have an end."""
    low, high = 0, len(row)
    while low < high:
        middle = (low + high) // 2
        if end[row[middle]] < 0:
            high = middle
        else:
            low = middle + 1
    return low
