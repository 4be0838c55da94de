"""What is searched: the sizes, costs and limits of one placement as integer tables.

With equal micro-batches, first in first out per (stage, kind) loses nothing. So a rank's program is a word over the
letters (kind, stage), and the k-th letter of a kind is micro-batch k:

    letter = kind * S + stage      kind: F 0, I 1, W 2
    node   = letter * m + microbatch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule

Objective = Literal["makespan", "span"]
Words = list[list[int]]
EPS = 1e-9


@dataclass(frozen=True)
class Problem:
    """One route through all stages in order, without pairs.

    Attributes:
        placement: stage -> rank.
        microbatches: m.
        costs: of the stages and links.
        room: the largest peak memory of a rank.
        objective: the makespan, or the largest span of a rank.
        order: position -> micro-batch; empty: as they are numbered. Words and nodes count positions.
        overlap_p2p: whether a message travels while its receiver computes.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    room: float
    objective: Objective = "makespan"
    order: tuple[int, ...] = ()
    overlap_p2p: bool = True

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
        """position -> the factor of the micro-batch there."""
        factors = self.costs.factors(self.microbatches)
        return tuple(factors[microbatch] for microbatch in self.order) if self.order else factors

    @cached_property
    def even(self) -> Problem:
        """The same with micro-batches that are all alike: as long as they are in the mean, as large as the largest."""
        if not self.costs.microbatch:
            return self
        factors, costs = self.factors, self.costs
        mean, largest = sum(factors) / len(factors), max(factors)
        size = largest / mean if mean else 1.0
        alike = replace(costs, microbatch=(), message=costs.message * mean).scaled(mean)
        activation = alike.activation
        larger = tuple(a * size for a in activation) if isinstance(activation, tuple) else activation * size
        return replace(self, costs=replace(alike, activation=larger), order=())

    @cached_property
    def tables(self) -> Tables:
        return Tables(self)

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """rank -> the earliest time at which anything can start there, where micro-batches are alike."""
        time, prefix = self.costs.per_stage("forward", self.stages), [0.0]
        for left, (here, there) in enumerate(zip(self.placement, self.placement[1:], strict=False)):
            prefix.append(prefix[-1] + time[left] + self.costs.hop(here, there))
        return tuple(
            min(at for at, home in zip(prefix, self.placement, strict=True) if home == rank)
            for rank in range(self.ranks)
        )

    def fits(self, words: Words) -> bool:
        """Whether no rank's memory passes the room."""
        change = self.tables.change
        return all(max(accumulate(change[node] for node in row), default=0.0) <= self.room + EPS for row in words)

    def schedule_of(self, words: Words, name: str = "search") -> Schedule:
        """The words as a Schedule."""
        stride = self.stages * self.microbatches
        shift = (0, stride, stride)  # a Schedule has B between F and I
        m, order = self.microbatches, self.order
        if order:
            words = [[node - node % m + order[node % m] for node in row] for row in words]
        return Schedule.of_codes(
            [[node + shift[node // stride] for node in row] for row in words],
            placement=self.placement,
            microbatches=self.microbatches,
            name=name,
        )

    def words_of(self, programs: Sequence[Sequence[tuple[str, int]]]) -> Words:
        """Words from every rank's (kind, stage), where a B is an I followed by a W."""
        m, words = self.microbatches, []
        for program in programs:
            done: dict[int, int] = {}
            row = []
            for kind, stage in program:
                for letter_kind in "IW" if kind == "B" else kind:
                    letter = "FIW".index(letter_kind) * self.stages + stage
                    row.append(letter * m + done.get(letter, 0))
                    done[letter] = done.get(letter, 0) + 1
            words.append(row)
        return words


class Tables:
    """node -> numbers, one list each. Index `none` (one past the last node) stands for "no action".

    Attributes:
        time: how long it takes.
        need: the node whose message it waits for.
        hop: how long that message travels.
        feed: the node that waits for its message.
        feed_hop: how long that message travels.
        own_weight: of an input gradient, its weight gradient.
        change: what it adds to its rank's memory.
        rank: where it runs.
    """

    def __init__(self, problem: Problem) -> None:
        m, stages, place = problem.microbatches, problem.stages, problem.placement
        costs = problem.costs
        stride = stages * m
        self.none = none = 3 * stride
        self.microbatches = m
        self.time: list[float] = []
        self.change: list[float] = []
        factors = problem.factors
        activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
        for kind, name in enumerate(("forward", "input_grad", "weight_grad")):
            for stage, value in enumerate(costs.per_stage(name, stages)):
                share = (1.0, held[stage] - 1.0, -held[stage])[kind]
                self.time += [value * factor for factor in factors]
                self.change += [share * activation[stage] * factor for factor in factors]
        self.need = [none] * (none + 1)
        self.hop = [0.0] * (none + 1)
        self.feed = [none] * (none + 1)
        self.feed_hop = [0.0] * (none + 1)
        for stage in range(stages):
            for mb in range(m):
                forward = stage * m + mb
                last = stage + 1 == stages
                self._link(forward, stride + forward if last else forward + m)
                if stage:
                    self._link(stride + forward, stride + forward - m)
        self.rank = [place[node // m % stages] for node in range(none)]
        for node in range(none):
            need = self.need[node]
            if need != none:
                hop = costs.hop(self.rank[need], self.rank[node], factors[node % m])
                if problem.overlap_p2p:
                    self.hop[node] = self.feed_hop[need] = hop
                else:
                    self.time[node] += hop  # the receiver waits for all of it
        self.own_weight = [none] * stride + list(range(2 * stride, none)) + [none] * stride

    def _link(self, first: int, second: int) -> None:
        self.feed[first] = second
        self.need[second] = first
