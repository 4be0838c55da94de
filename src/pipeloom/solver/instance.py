"""An instance of the scheduling problem: one placement with its sizes, costs and limits, as integer tables.

It is a job shop with a memory resource: ranks are machines, micro-batches are jobs. A *node* is one F, I or W. With equal
micro-batches, first in first out per (stage, kind) loses nothing, so the k-th node of a type on a rank belongs to micro-batch k:

    type = kind * S + stage      kind: F 0, I 1, W 2
    node = type * m + microbatch

A rank executes *operations* of one to three nodes: a single node, a B (I and W), or an overlapped pair (F and I, or F, I and W).
The program of a rank is its *sequence* of operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pipeloom.schedule.actions import MOST_KINDS
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, PairTimes, Sends, StageCosts
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Objective, Timeline
from pipeloom.schedule.transforms import recompute

Sequences = list[list[int]]


class Recomputation(NamedTuple):
    """A recomputation of a stage for one micro-batch, bound to its backward.

    Attributes:
        letters: of the actions before the backward, which may run while its message is on its way; none: a block (R;B).
        time: of all of them.
        freed: memory that the F leaves out.
        held: memory that comes before the backward, or while the block runs.
        unsaved: memory that the F holds only while it runs.
    """

    letters: tuple[str, ...]
    time: float
    freed: float
    held: float
    unsaved: float


@dataclass(frozen=True)
class Instance:
    """One route through all stages in order.

    Attributes:
        placement: stage -> rank.
        microbatches: m.
        costs: costs of the stages and links.
        memory_limit: limit of the peak memory of each rank.
        objective: the makespan, or the largest span of a rank.
        order: position -> micro-batch; empty: in the order of their numbers. Sequences and nodes use positions.
        overlap_p2p: whether a message travels while its receiver computes.
        recomputed: (node of F, its recomputation) of those that are recomputed, for micro-batches of factor 1.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    memory_limit: float
    objective: Objective = "makespan"
    order: tuple[int, ...] = ()
    overlap_p2p: bool = True
    recomputed: tuple[tuple[int, Recomputation], ...] = ()

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def nodes(self) -> int:
        """The number of actions."""
        return 3 * self.stages * self.microbatches

    @property
    def factors(self) -> tuple[float, ...]:
        """The cost factor of the micro-batch at each position."""
        factors = self.costs.factors(self.microbatches)
        return tuple(factors[microbatch] for microbatch in self.order) if self.order else factors

    @cached_property
    def even(self) -> Instance:
        """The same instance with equal micro-batches: with the mean of their times, and the memory of the largest."""
        if not self.costs.microbatch:
            return self
        factors, costs = self.factors, self.costs
        mean, largest = sum(factors) / len(factors), max(factors)
        size = largest / mean if mean else 1.0
        alike = costs.even(mean)
        activation = alike.activation
        larger = tuple(a * size for a in activation) if isinstance(activation, tuple) else activation * size
        return replace(self, costs=replace(alike, activation=larger), order=())

    @cached_property
    def table(self) -> OperationTable:
        return OperationTable(self)

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """rank -> the earliest time at which an action can start there, if all micro-batches are equal."""
        time, prefix = self.costs.per_stage("forward", self.stages), [0.0]
        for left, (here, there) in enumerate(zip(self.placement, self.placement[1:], strict=False)):
            prefix.append(prefix[-1] + time[left] + self.costs.hop(here, there))
        return tuple(
            min(at for at, home in zip(prefix, self.placement, strict=True) if home == rank)
            for rank in range(self.ranks)
        )

    def simulated(self, schedule: Schedule, sends: Sends = "free") -> Timeline:
        """Return the timeline of a schedule with these costs."""
        costs = self.costs if sends == "free" else replace(self.costs, sends=sends)
        return simulate(schedule, costs, overlap_p2p=self.overlap_p2p)

    def fits(self, sequences: Sequences) -> bool:
        """Return whether no rank's memory exceeds the memory limit."""
        return all(self.peak(sequence) <= self.memory_limit + TIME_TOLERANCE for sequence in sequences)

    def peak(self, sequence: Sequence[int]) -> float:
        """Return the peak memory of a rank that executes this sequence."""
        rise, change = self.table.rise, self.table.change
        level = peak = 0.0
        for operation in sequence:
            if level + rise[operation] > peak:
                peak = level + rise[operation]
            level += change[operation]
        return peak

    def schedule_of(self, sequences: Sequences, name: str = "search") -> Schedule:
        """Return the sequences as a Schedule."""
        table, m, order = self.table, self.microbatches, self.order
        stride = table.stride
        shift, pair_stride = (0, stride, stride), MOST_KINDS * stride  # a Schedule numbers B between F and I

        def code(operation: int) -> int:
            nodes = table.nodes[operation]
            codes = [node + shift[node // stride] for node in nodes]
            if order:
                codes = [code - code % m + order[code % m] for code in codes]
            if len(nodes) > 1 and nodes[-1] >= 2 * stride:
                codes[-2] -= stride  # I and W in one: B
                codes.pop()
            return codes[0] if len(codes) == 1 else (codes[0] + 1) * pair_stride + codes[1]

        schedule = Schedule.of(
            [[code(operation) for operation in sequence] for sequence in sequences],
            placement=self.placement,
            microbatches=m,
            name=name,
        )
        for letters in dict.fromkeys(choice.letters for _, choice in self.recomputed):
            nodes = [node for node, choice in self.recomputed if choice.letters == letters]
            places = [(node // m, order[node % m] if order else node % m) for node in nodes]
            for letter in letters or ("",):
                schedule = recompute(schedule, letter == "R", places, letter.partition(":")[2])
        return schedule

    def numbered(self, programs: Iterable[Iterable[Sequence[tuple[str, int]]]], together: bool = False) -> Sequences:
        """Return sequences for programs without micro-batches: first in, first out for F and I, and a W belongs to the first I
        that has none yet.

        Args:
            programs: rank -> its entries; an entry holds the (kind, stage) of its action, or of both actions of a pair.
            together: whether each entry becomes one operation; otherwise each node is an operation, and B becomes I and W.
        """
        m, stride, sequences = self.microbatches, self.table.stride, []
        for program in programs:
            count: dict[int, int] = {}
            pending: dict[int, deque[int]] = {}
            sequence: list[int] = []
            for entry in program:
                nodes = []
                for kind, stage in entry:
                    if kind == "W":
                        nodes.append(pending[stage].popleft())
                        continue
                    operation_type = "FI".index("F" if kind == "F" else "I") * self.stages + stage
                    nodes.append(operation_type * m + count.get(operation_type, 0))
                    count[operation_type] = count.get(operation_type, 0) + 1
                    if kind == "B":
                        nodes.append(nodes[-1] + stride)
                    elif kind == "I":
                        pending.setdefault(stage, deque()).append(nodes[-1] + stride)
                sequence += [self.table.operation(*nodes)] if together else nodes
            sequences.append(sequence)
        return sequences


class OperationTable:
    """Values of each operation, as one list per attribute.

    The operation of a single node has the node's number. Operations of several nodes are numbered from the number of nodes on, in
    the order in which they are first formed, so the lists grow. Among *nodes*, the first two of these numbers are placeholders:
    `none` has always ended, and nothing waits for `unread`. So an operation below `none` is a single node, and lists by operation
    must not be indexed with a node that may be `none`.

    Attributes:
        stride: S m, the distance from a node to the one of the next kind.
        time: duration.
        rank: the rank that executes it.
        nodes: its nodes, in the order F, I, W.
        first, second: the nodes whose ends others wait for: its first node, and the I of a pair, else `unread`.
        predecessor, hop, predecessor2, hop2: the nodes whose messages `first` and `second` wait for, and their times.
        successor, successor_hop, successor2, successor2_hop: the nodes that wait for the messages of `first` and `second`.
        rise, change: memory above the level before it, at its peak and after it.
        wait: of a node, the part of its time in which its rank waits for a message (without `overlap_p2p`), before it starts.
        weight_grad_of: of an input gradient, its weight gradient.
        saved: input gradient -> time that a B takes less than I and W, for those where it takes less.
    """

    def __init__(self, instance: Instance) -> None:
        m, stages, place = instance.microbatches, instance.stages, instance.placement
        costs = instance.costs
        self.stages, self._costs = stages, costs
        self.stride = stride = stages * m
        self.none, self.unread = none, unread = 3 * stride, 3 * stride + 1
        self.microbatches = m
        self.time: list[float] = []
        self.change: list[float] = []
        self.recomputation: dict[int, tuple[float, float]] = {}  # node of I -> time and rise of its recomputation
        self.factors = factors = instance.factors
        activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
        for kind, name in enumerate(("forward", "input_grad", "weight_grad")):
            for stage, value in enumerate(costs.per_stage(name, stages)):
                share = (1.0, held[stage] - 1.0, -held[stage])[kind]
                self.time += [value * factor for factor in factors]
                self.change += [share * activation[stage] * factor for factor in factors]
        self.predecessor, self.hop = [none] * none, [0.0] * none
        self.predecessor2, self.hop2 = [none] * none, [0.0] * none
        self.successor, self.successor_hop = [none] * none, [0.0] * none
        self.successor2, self.successor2_hop = [none] * none, [0.0] * none
        self.wait = [0.0] * none
        for stage in range(stages):
            for mb in range(m):
                forward = stage * m + mb
                last = stage + 1 == stages
                self._link(forward, stride + forward if last else forward + m)
                if stage:
                    self._link(stride + forward, stride + forward - m)
        self.rank = [place[node // m % stages] for node in range(none)]
        for node in range(none):
            predecessor = self.predecessor[node]
            if predecessor != none:
                hop = costs.hop(self.rank[predecessor], self.rank[node], factors[node % m])
                if instance.overlap_p2p:
                    self.hop[node] = self.successor_hop[predecessor] = hop
                else:
                    self.time[node] += hop  # the receiver waits for all of it
                    self.wait[node] = hop
        self.weight_grad_of = [none] * stride + list(range(2 * stride, none)) + [none] * stride
        self.rise = [max(0.0, change) for change in self.change]
        for node, choice in instance.recomputed:
            self._recompute(node, choice, stride + node)
        self.saved = self._saved()
        self.nodes: list[tuple[int, ...]] = [(node,) for node in range(none)]
        self.first, self.second = list(range(none)), [unread] * none
        self._operations: dict[tuple[int, ...], int] = {}
        self._fixed_order: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def _recompute(self, forward: int, choice: Recomputation, backward: int) -> None:
        """Bind a recomputation to the I `backward`: it runs just before, so its message may arrive that much later."""
        factor = self.factors[forward % self.microbatches]
        time, freed, held = factor * choice.time, factor * choice.freed, factor * choice.held
        self.time[backward] += time
        if choice.letters:
            self.hop[backward] -= time
            self.successor_hop[self.predecessor[backward]] -= time
        self.change[forward] -= freed
        self.change[backward] += freed
        self.rise[forward] = max(0.0, self.change[forward]) + factor * choice.unsaved
        self.rise[backward] = max(held, self.change[backward])
        self.recomputation[backward] = time, held

    def _link(self, first: int, second: int) -> None:
        self.successor[first] = second
        self.predecessor[second] = first

    def _saved(self) -> dict[int, float]:
        spread, m = StageCosts(self._costs, self.stages), self.microbatches
        stages = zip(spread.input_grad, spread.weight_grad, spread.backward, strict=True)
        return {
            self.stride + stage * m + at: (i + w - b) * factor
            for stage, (i, w, b) in enumerate(stages)
            for at, factor in enumerate(self.factors)
            if (i + w - b) * factor > TIME_TOLERANCE
        }

    @cached_property
    def pair_times(self) -> PairTimes:
        return PairTimes.of(self._costs, self.stages)

    def pair(self, forward: int, backward: int, whole: bool) -> int:
        """Return the operation F|I of two nodes, or F|B if `whole`."""
        return self.operation(forward, backward, *([backward + self.stride] if whole else []))

    def backward(self, node: int) -> int:
        """Return the operation B that begins with the I `node`."""
        return self.operation(node, node + self.stride)

    def operation(self, *nodes: int) -> int:
        """Return the operation of these nodes: a single one, I W, F I, or F I W."""
        if len(nodes) == 1:
            return nodes[0]
        number = self._operations.get(nodes)
        return self._form(nodes) if number is None else number

    def _form(self, nodes: tuple[int, ...]) -> int:
        m, stages, factors = self.microbatches, self.stages, self.factors
        first, second = nodes[0], nodes[1]
        is_pair, overlaps = first < self.stride, False
        if is_pair:
            halves, split = (first // m, second // m % stages), len(nodes) == 2
            time = self.pair_times.time(*halves, split, (factors[first % m], factors[second % m]))
            overlaps = self.pair_times.overlaps(*halves, split)
        else:
            time = factors[first % m] * self.pair_times.spread.backward[first // m % stages] + self.wait[first]
            again, rise = self.recomputation.get(first, (0.0, 0.0))
            time += again
        number = self._operations[nodes] = len(self.time)
        self.time.append(time)
        self.rank.append(self.rank[first])
        self.nodes.append(nodes)
        self.first.append(first)
        self.second.append(second if is_pair else self.unread)
        self.predecessor.append(self.predecessor[first])
        self.hop.append(self.hop[first])
        self.predecessor2.append(self.predecessor[second] if is_pair else self.none)
        self.hop2.append(self.hop[second] if is_pair else 0.0)
        self.successor.append(self.successor[first])
        self.successor_hop.append(self.successor_hop[first])
        self.successor2.append(self.successor[second] if is_pair else self.none)
        self.successor2_hop.append(self.successor_hop[second] if is_pair else 0.0)
        self.change.append(sum(self.change[node] for node in nodes))
        if is_pair:
            rise = self.change[-1] if overlaps else self.change[first]
        self.rise.append(max(0.0, rise))
        return number

    def fixed_order(self, operation: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (nearest nodes of its rank that precede the operation in every sequence, nearest nodes that follow it).

        A forward comes before the backward, an input gradient before its weight gradient, and micro-batches first in, first out;
        not so weight gradients where a B saves time.
        """
        order = self._fixed_order.get(operation)
        if order is None:
            before, after = set[int](), set[int]()
            for node in self.nodes[operation]:
                before |= {self.predecessor[node]}
                after |= {self.successor[node], self.weight_grad_of[node]}
                if node >= 2 * self.stride:
                    before.add(node - self.stride)
                if self.saved and node >= 2 * self.stride:
                    continue  # a B may overtake the weight gradient of an earlier micro-batch
                if node % self.microbatches:
                    before.add(node - 1)
                if (node + 1) % self.microbatches:
                    after.add(node + 1)
            none, rank, nodes = self.none, self.rank[operation], self.nodes[operation]
            order = self._fixed_order[operation] = (
                tuple(node for node in before if node != none and self.rank[node] == rank and node not in nodes),
                tuple(node for node in after if node != none and self.rank[node] == rank and node not in nodes),
            )
        return order
