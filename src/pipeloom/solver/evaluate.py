"""Start and end (heads) and tails of all operations for given sequences: the inner loop of the search.

Heads and tails are the longest paths to and from an operation in the graph of messages and sequences (Balas and Vazacopoulos
1998). Most operations are single nodes, so every loop here has a fast path for them: if it looked up the second message of a
pair for every operation, tabu search without pairs would make 5 to 14 % fewer moves per second.
"""

from __future__ import annotations

from bisect import bisect_left

from pipeloom.solver.instance import Instance, Sequences

UNREACHED = -1.0


class Evaluation:
    """Start of every operation, end of every node, the tails, and the value to minimise. Created by `evaluate`.

    Attributes:
        value: the makespan, or the largest span.
        start: first node of an operation -> time.
        end: node whose end others wait for -> time; 0 for `OperationTable.none`.
        order: the operations in topological order.
        offset: rank -> value added to its last end: 0 for the makespan; for spans, minus its first start and the wait before it.
    """

    __slots__ = ("end", "offset", "order", "start", "value")

    def __init__(self, start: list[float], end: list[float], order: list[int], offset: list[float]) -> None:
        self.start, self.end, self.order, self.offset = start, end, order, offset
        self.value = 0.0

    def tails(self, instance: Instance) -> list[float]:
        """Return for each node the longest time from the start of its operation to the end, plus the offset of the rank that ends
        last on that path; 0 or less for `none`.
        """
        table = instance.table
        time, successor, hop, rank = table.time, table.successor, table.successor_hop, table.rank
        first, second, successor2, hop2 = table.first, table.second, table.successor2, table.successor2_hop
        none = table.none
        on_rank = list(self.offset)
        tail = [0.0] * (none + 2)
        tail[none] = min(self.offset)
        for operation in reversed(self.order):
            home = rank[operation]
            after = on_rank[home]
            other = tail[successor[operation]] + hop[operation]
            if other > after:
                after = other
            if operation < none:
                on_rank[home] = tail[operation] = after + time[operation]
                continue
            other = tail[successor2[operation]] + hop2[operation]
            if other > after:
                after = other
            on_rank[home] = tail[first[operation]] = tail[second[operation]] = after + time[operation]
        return tail


def evaluate(
    instance: Instance, sequences: Sequences, since: tuple[Evaluation, int, int] | None = None
) -> Evaluation | None:
    """Start every operation as early as its rank's sequence and its messages allow; return None if the sequences have a cycle.

    Linear in the number of operations. `since` is (an evaluation, rank, index) of sequences that differ only on this rank, from
    this index on: the results before that operation are reused.
    """
    table = instance.table
    time, predecessor, hop = table.time, table.predecessor, table.hop
    first, second, predecessor2, hop2 = table.first, table.second, table.predecessor2, table.hop2
    none = table.none
    if since is None:
        end = [UNREACHED] * (none + 2)
        end[none] = 0.0
        start = [0.0] * none
        order: list[int] = []
        position, clocks = [0] * len(sequences), [0.0] * len(sequences)
    else:
        start, end, order, position, clocks = _before(instance, sequences, *since)
    done = order.append
    waiting: dict[int, int] = {}
    ready = list(range(len(sequences)))
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        sequence = sequences[rank]
        at = position[rank]
        for operation in sequence[at:] if at else sequence:
            arrival = end[predecessor[operation]]
            if arrival < 0:
                waiting[predecessor[operation]] = rank
                break
            arrival += hop[operation]
            if arrival > clock:
                clock = arrival
            if operation < none:
                node = operation
                start[node] = clock
                clock += time[operation]
                end[node] = clock
            else:
                arrival = end[predecessor2[operation]]
                if arrival < 0:
                    waiting[predecessor2[operation]] = rank
                    break
                arrival += hop2[operation]
                if arrival > clock:
                    clock = arrival
                node, other = first[operation], second[operation]
                start[node] = clock
                clock += time[operation]
                end[node] = end[other] = clock
                if other in waiting:
                    ready.append(waiting.pop(other))
            done(operation)
            at += 1
            if node in waiting:
                ready.append(waiting.pop(node))
        position[rank] = at
        clocks[rank] = clock
    if any(at < len(sequence) for at, sequence in zip(position, sequences, strict=True)):
        return None
    offset = (
        [-start[first[sequence[0]]] - table.wait[first[sequence[0]]] for sequence in sequences]
        if instance.objective == "span"
        else [0.0] * len(sequences)
    )
    evaluation = Evaluation(start, end, order, offset)
    evaluation.value = max(clock + shift for clock, shift in zip(clocks, offset, strict=True))
    return evaluation


def _before(
    instance: Instance, sequences: Sequences, earlier: Evaluation, rank: int, index: int
) -> tuple[list[float], list[float], list[int], list[int], list[float]]:
    """Return start, end, order, and every rank's position and clock before the first operation that may change."""
    first, second, none = instance.table.first, instance.table.second, instance.table.none
    cut = earlier.order.index(sequences[rank][index - 1]) + 1 if index else 0
    order, end = earlier.order[:cut], list(earlier.end)
    for operation in earlier.order[cut:]:
        if operation < none:
            end[operation] = UNREACHED
        else:
            end[first[operation]] = end[second[operation]] = UNREACHED
    position = [_ended(sequence, first, end) for sequence in sequences]
    clocks = [end[first[sequence[at - 1]]] if at else 0.0 for sequence, at in zip(sequences, position, strict=True)]
    return list(earlier.start), end, order, position, clocks


def _ended(sequence: list[int], first: list[int], end: list[float]) -> int:
    """Return the number of operations at the start of the sequence that have ended."""
    return bisect_left(sequence, True, key=lambda operation: end[first[operation]] < 0)
