"""Warm starts: every one-route family on a placement, list scheduling by priority rules, and both with pairs formed.

A schedule defines for every rank an order of its forwards, an order of its input gradients, and the number of input gradients
before each forward. `with_pairs` follows both orders side by side and forms a pair whenever the next action of both can start.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from operator import mul
from typing import Any

from pipeloom.errors import ArgumentError, PipeloomError
from pipeloom.schedule.actions import Action, kind_of
from pipeloom.schedule.costs import STAGE_SIZE, STAGE_TIME, TIME_TOLERANCE, WHILE_RUNNING, Costs
from pipeloom.schedule.families import BASELINES, ONE_ROUTE, build
from pipeloom.schedule.families.construct.list_scheduling import (
    MemoryDeadlock,
    PriorityRule,
    programs_along,
    programs_of,
    single_route,
)
from pipeloom.schedule.families.interleaved import round_sequences, round_sizes
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.placement import loop, name_of
from pipeloom.schedule.transforms import cut_stages, merge_backward
from pipeloom.solver.evaluate import UNREACHED
from pipeloom.solver.instance import Instance, Sequences

CHEAP = ("1f1b", "interleaved", "zb-h1", "zb-h2")
ROUNDS = ("zbv", "v-half", "zb-auto")


# Sizes up to which warm starts are constructed and searched in full.
# Nodes above which only cheap families are tried and no tabu search follows: a few moves would use up the time.
LARGEST_WALKED = 60_000
# Most nodes of the reduced instance that stands for a large one: a larger one repeats better, but takes longer.
LARGEST_REDUCED = 200_000


def family_schedules(
    placement: Sequence[int], microbatches: int, costs: Costs, memory_limit: float, only: Sequence[str] = ()
) -> Iterator[Schedule]:
    """Yield every one-route family on this placement, or on one that becomes it when each stage is cut into equal runs.

    A family of v' chunks, v' a divisor of v, is created for stages that merge v / v' stages each, and then cut (`cut_stages`).
    Families that do not support the sizes are left out. Schedules may exceed `memory_limit`, which only zb-auto takes into
    account: the caller checks.

    Args:
        only: names of the families to create; empty: all, or only `CHEAP` ones for large sizes.
    """
    stages, ranks = len(placement), max(placement) + 1
    large = 3 * stages * microbatches > LARGEST_WALKED
    for run in range(1, stages // ranks + 1):
        merged = [placement[at] for at in range(0, stages, run)]
        if stages % run or [rank for rank in merged for _ in range(run)] != list(placement):
            continue
        chunks, rough = len(merged) // ranks, merge_stage_costs(costs, stages, run)
        for name, options in _candidates(merged, ranks, chunks, memory_limit):
            if (only or large) and name not in (only or CHEAP):
                continue
            try:
                schedule = build(
                    name, ranks, microbatches, chunks if name in ONE_ROUTE["loop"] else None, options, rough
                )
            except PipeloomError:
                continue
            if list(schedule.placement) == merged:
                yield cut_stages(schedule, run) if run > 1 else schedule


def _candidates(
    merged: Sequence[int], ranks: int, chunks: int, memory_limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    placement = name_of(merged, ranks)
    for name in ONE_ROUTE.get(placement, ()):
        if name == "zb-auto" and memory_limit < math.inf:
            yield name, {"memory": memory_limit}
        else:
            yield name, {"waves": chunks // 2} if name == "hanayo" else {}
    if placement == "loop":
        yield from ((name, {"group_size": ranks}) for name in BASELINES["loop"])


def merge_stage_costs(costs: Costs, stages: int, run: int) -> Costs:
    """Return the costs of stages that each merge `run` consecutive stages."""
    if run == 1:
        return costs
    return cut_costs(replace(costs, all_to_all=0.0, pair=None, pair_split=None), (run,) * (stages // run))


def cut_costs(costs: Costs, cut: Sequence[int]) -> Costs:
    """Return the costs of stages of so many consecutive layers each from the costs of the layers.

    Times, activations and bytes add up, shares are those of the sums, and `bytes["layer"]` and `bytes["forward"]` are those of
    the largest layer. Raises UsageError for costs of another number of layers, and for pairs and all-to-all, which belong to
    stages.
    """
    layers, edges = sum(cut), [0]
    for size in cut:
        edges.append(edges[-1] + size)
    for name in ("pair", "pair_split", "all_to_all"):
        if getattr(costs, name):
            raise ArgumentError(name, " belongs to stages; leave it out of the costs of layers")

    def merged(name: str, value: Any) -> tuple[float, ...]:
        values = (float(value),) * layers if not isinstance(value, tuple) else value
        if len(values) != layers:
            raise ArgumentError(
                name, f" has {len(values)} values and the model {layers} layers: give one number or {layers}"
            )
        join: Any = max if name in largest else sum
        return tuple(join(values[a:b]) for a, b in pairwise(edges))

    largest = {f"bytes[{name!r}]" for name in WHILE_RUNNING}
    stages = costs.changed(merged, STAGE_TIME, STAGE_SIZE)
    shares: dict[str, Any] = {}
    for name in ("held", "kept"):
        amounts = tuple(map(mul, *(costs.per_stage(each, layers) for each in ("activation", name))))
        totals = zip(merged(name, amounts), stages.per_stage("activation", len(cut)), strict=True)
        of_sums = (part / whole if whole else 1.0 for part, whole in totals)
        shares[name] = tuple(min(1.0, share) if name == "kept" else share for share in of_sums)  # sums are rounded
    return replace(stages, **shares)


def plain_order(schedule: Schedule) -> Schedule:
    """Return `schedule` without what recomputes, moves or gathers: its F, B, I, W and pairs."""
    plain = schedule.with_programs(
        [
            [
                cell if len(parts(cell)) > 1 else Action(whole, *parts(cell)[0][1:])
                for cell in program
                if (whole := (kind_of(parts(cell)[0].kind).fuses or (parts(cell)[0].kind,))[-1]) in "FBIW"
            ]
            for program in schedule.programs
        ]
    )
    return plain.with_slots({})


def sequences_of(instance: Instance, schedule: Schedule, pairs: bool = False) -> Sequences:
    """Return the schedule's sequences, with micro-batches renumbered in the order in which each operation type occurs.

    Without `pairs`, every B becomes an I and a W, and every pair its actions; where pairs do not gain, this makes no schedule
    longer. With `pairs`, a W is separated from its pair or B, and directly follows it, if both together take no longer than
    before. This is never worse, except that a pair may free memory earlier with its W: a sequence that would exceed the memory
    limit keeps its pairs and Bs.
    """
    entries = [
        [[(action.kind, action.stage) for action in parts(cell)] for cell in program] for program in schedule.programs
    ]
    sequences = instance.numbered(entries, together=pairs)
    if not pairs:
        return sequences
    apart = [
        [part for operation in sequence for part in _weight_grad_apart(instance, operation)] for sequence in sequences
    ]
    return [
        shorter if instance.peak(shorter) <= instance.memory_limit + TIME_TOLERANCE else sequence
        for shorter, sequence in zip(apart, sequences, strict=True)
    ]


def _weight_grad_apart(instance: Instance, operation: int) -> tuple[int, ...]:
    """Return the operation, with its W split off to follow it if that takes no longer."""
    table = instance.table
    nodes = table.nodes[operation]
    if len(nodes) == 1 or nodes[-1] < 2 * table.stride:
        return (operation,)
    rest, weight = table.operation(*nodes[:-1]), nodes[-1]
    longer = table.time[rest] + table.time[weight] > table.time[operation] + TIME_TOLERANCE
    return (operation,) if longer else (rest, weight)


def list_scheduled(
    instance: Instance, first_rule: bool = False, fused: bool = False
) -> Iterator[tuple[Sequences, str]]:
    """Yield list schedules (sequences and origin) by all rules, or only the first, under several limits per stage.

    Those that deadlock are left out. Micro-batches are treated as equal.
    """
    instance = instance.even
    memory_limits = [instance.memory_limit] * instance.ranks
    rules = list(
        product((False, True), (True, False) if instance.stages > instance.ranks else (True,), (0.0, 0.5, 1.0))
    )
    for caps in _caps(instance):
        problem = single_route(instance.placement, instance.microbatches, instance.costs, memory_limits, caps)
        for turns, late, patience in rules[:1] if first_rule else rules:
            try:
                programs = programs_of(replace(problem, fused=fused), PriorityRule(turns, late, patience))
            except MemoryDeadlock:
                continue
            yield instance.numbered([[[a[:2]] for a in program] for program in programs]), "list scheduling"


def plain_orders(instance: Instance, starts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield orders without what recomputes or copies, each once: those of starts, of families, and for few micro-batches alive.

    The last are list schedules of whole backwards with at most 1, 2, … alive on a rank. They serve memory limits below those of
    the families, where what every micro-batch keeps counts although it is recomputed or copied.
    """
    families = family_schedules(instance.placement, instance.microbatches, instance.costs, math.inf)
    largest = max(instance.costs.per_stage("activation", instance.stages))
    few = (
        merge_backward(instance.even.schedule_of(sequences, origin))
        for alive in range(1, instance.stages + 1)
        for sequences, origin in list_scheduled(replace(instance, memory_limit=alive * largest), fused=True)
    )
    programs = set[tuple[tuple[int, ...], ...]]()
    for schedule in chain(map(plain_order, chain(starts, families)), few):
        if schedule.placement == instance.placement and schedule.codes not in programs:
            programs.add(schedule.codes)
            yield schedule


def interleaved_rounds(instance: Instance, patience: Sequence[float] = (1.0, 0.5)) -> Iterator[tuple[Sequences, str]]:
    """Yield schedules (sequences and origin) on a loop placement with interleaved's order of F and I, and W in gaps.

    Their warm-up is limited by memory; W are also placed where they free it.

    They serve memory limits between those of the families. An order that deadlocks yields nothing.
    """
    instance = instance.even
    p, m, chunks = instance.ranks, instance.microbatches, instance.stages // instance.ranks
    if chunks < 2 or list(instance.placement) != loop(p, chunks):
        return
    sizes = round_sizes(p, m)
    largest = max(instance.costs.per_stage("activation", instance.stages))
    for slope, share in product((1, 2), patience):
        # only as much as the warm-up needs, so that weight gradients are not all deferred to the end
        memory_limit = min(instance.memory_limit, largest * (slope * (p - 1) + (chunks - 1) * max(sizes) + 1))
        problem = single_route(instance.placement, m, instance.costs, [memory_limit] * p)
        sequences = round_sequences(p, chunks, sizes, slope)
        try:
            programs = programs_along(problem, sequences, share)
        except MemoryDeadlock:
            continue
        yield instance.numbered([[[a[:2]] for a in program] for program in programs]), "interleaved rounds"


def reduced_instances(instance: Instance) -> Iterator[tuple[Instance, Sequences, str]]:
    """Yield, for large sizes, instances with fewer micro-batches, sequences for them, and the name of their method.

    The methods are families in rounds of p, whose sections of p micro-batches repeat, and list scheduling. The number of missing
    micro-batches is a multiple of p, or of twelve, which is divisible by several lengths of a period.
    """
    base, p, m = instance.even, instance.ranks, instance.microbatches
    rounds = replace(base, microbatches=min(m, 3 * p + m % p))
    if rounds.nodes <= LARGEST_REDUCED:
        for sequences, origin in interleaved_rounds(rounds, (1.0,)):
            yield rounds, sequences, origin
        for schedule in family_schedules(rounds.placement, rounds.microbatches, base.costs, base.memory_limit, ROUNDS):
            yield rounds, sequences_of(rounds, schedule), schedule.name
    some = LARGEST_REDUCED // (6 * instance.stages)
    few = replace(
        base, microbatches=m - max(0, -(-(m - some) // 12) * 12) if m > 12 and some > 12 else min(m, some + 1)
    )
    for sequences, origin in list_scheduled(few, first_rule=True):
        yield few, sequences, origin


def _caps(instance: Instance) -> list[tuple[float, ...]]:
    """Return limits on the micro-batches alive per stage, each a tuple over the stages.

    No limit; as many as leave a place free for each later stage of the rank; in proportion to how long a stage holds them; one.
    """
    place, stages = instance.placement, instance.stages
    none = (math.inf,) * stages
    if stages == instance.ranks or instance.memory_limit == math.inf:
        return [none]
    places = math.floor(instance.memory_limit / max(instance.costs.per_stage("activation", stages)) + TIME_TOLERANCE)
    later = [sum(1 for other in range(stage + 1, stages) if place[other] == place[stage]) for stage in range(stages)]
    by_free_places = tuple(max(1.0, places - count) for count in later)
    life = [stages - stage for stage in range(stages)]
    whole = [sum(life[other] for other in range(stages) if place[other] == place[stage]) for stage in range(stages)]
    shared = tuple(
        max(1.0, float(round(places * held_time / all_))) for held_time, all_ in zip(life, whole, strict=True)
    )
    single = (1.0,) * stages  # fits whenever any schedule does, and cannot deadlock
    return list(dict.fromkeys([none, by_free_places, shared, single]))


@dataclass(frozen=True)
class PairingRule:
    """Rule by which `with_pairs` decides.

    Attributes:
        patience: how long an action waits for its other half, as a share of the time that the pair saves.
        ahead: the number of input gradients that a forward may overtake when it runs alone.
        late: the share of its time by which a weight gradient may delay the next action.
    """

    patience: float
    ahead: int
    late: float


FIRST_RULES = (PairingRule(0.0, 2, 0.0), PairingRule(1.0, 2, 1.0))
OTHER_RULES = tuple(
    rule
    for rule in (
        PairingRule(patience, ahead, late) for patience in (0.0, 1.0) for ahead in (0, 2) for late in (0.0, 1.0)
    )
    if rule not in FIRST_RULES
)


def with_pairs(instance: Instance, sequences: Sequences, rule: PairingRule) -> Sequences | None:
    """Follow the sequences' orders of forwards and of input gradients side by side, and form pairs where both can start.

    Returns None if the memory limit leads to a deadlock.
    """
    return _Pairing(instance, sequences, rule).run()


@dataclass
class _Side:
    """The state of one rank: its two orders with the position in each, queued weight gradients, clock and memory."""

    forwards: list[int]
    backwards: list[int]
    before: list[int]
    at: list[int] = field(default_factory=lambda: [0, 0])
    weights: deque[int] = field(default_factory=deque)
    sequence: list[int] = field(default_factory=list)
    free: float = 0.0
    level: float = 0.0


class _Pairing:
    def __init__(self, instance: Instance, sequences: Sequences, rule: PairingRule) -> None:
        self.table, self.rule, self.memory_limit = instance.table, rule, instance.memory_limit + TIME_TOLERANCE
        self.end = [UNREACHED] * (self.table.none + 2)
        self.end[self.table.none] = 0.0
        self.sides = [self._side(sequence) for sequence in sequences]
        self.heap = [(0.0, rank) for rank in range(len(sequences))]

    def _side(self, sequence: list[int]) -> _Side:
        side, stride = _Side([], [], []), self.table.stride
        for operation in sequence:
            for node in self.table.nodes[operation]:
                if node < stride:
                    side.forwards.append(node)
                    side.before.append(len(side.backwards))
                elif node < 2 * stride:
                    side.backwards.append(node)
        return side

    def run(self) -> Sequences | None:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            side = self.sides[rank]
            if now < side.free - TIME_TOLERANCE:
                continue  # another event follows when the rank is free
            operation = self._choose(side, now, rank)
            if operation is not None:
                self._do(side, operation, now, rank)
        done = all(s.at == [len(s.forwards), len(s.backwards)] for s in self.sides)
        return [side.sequence + list(side.weights) for side in self.sides] if done else None

    def _arrival(self, node: int) -> float:
        """Return the arrival time of the node's message; infinite if its sender has not started."""
        end = self.end[self.table.predecessor[node]]
        return end + self.table.hop[node] if end >= 0 else float("inf")

    def _choose(self, side: _Side, now: float, rank: int) -> int | None:
        """Return the operation to start now, or None to wait for the rank's next event."""
        table = self.table
        forward = side.forwards[side.at[0]] if side.at[0] < len(side.forwards) else None
        backward = side.backwards[side.at[1]] if side.at[1] < len(side.backwards) else None
        if forward is not None and side.level + table.rise[forward] > self.memory_limit:
            if side.weights:
                return side.weights.popleft()
            forward = None
        times = [self._arrival(node) if node is not None else float("inf") for node in (forward, backward)]
        here = [time <= now + TIME_TOLERANCE for time in times]
        if forward is not None and backward is not None:
            pair = table.pair(forward, backward, False)
            saved = table.time[forward] + table.time[backward] - table.time[pair]
            if all(here) and saved > -TIME_TOLERANCE:
                return pair
            if saved > TIME_TOLERANCE and max(times) <= now + self.rule.patience * saved + TIME_TOLERANCE:
                return self._weight_before(side, now, max(times), rank)
        if here[1]:
            return backward
        if here[0] and forward is not None and side.before[side.at[0]] <= side.at[1] + self.rule.ahead:
            return forward
        return self._weight_before(side, now, min(times), rank)

    def _weight_before(self, side: _Side, now: float, until: float, rank: int) -> int | None:
        """Return a weight gradient that fits before `until`; else None, with an event scheduled for that time."""
        if side.weights and now + (1 - self.rule.late) * self.table.time[side.weights[0]] <= until + TIME_TOLERANCE:
            return side.weights.popleft()
        if until > now + TIME_TOLERANCE and until < float("inf"):
            self._call(rank, until)
        return None

    def _call(self, rank: int, at: float) -> None:
        heapq.heappush(self.heap, (at, rank))

    def _do(self, side: _Side, operation: int, now: float, rank: int) -> None:
        table = self.table
        side.sequence.append(operation)
        side.free = now + table.time[operation]
        side.level += table.change[operation]
        for node in table.nodes[operation]:
            if node < table.stride:
                side.at[0] += 1
            elif node < 2 * table.stride:
                side.at[1] += 1
                side.weights.append(node + table.stride)
        self._call(rank, side.free)
        for node, successor, hop in (
            (table.first[operation], table.successor[operation], table.successor_hop[operation]),
            (table.second[operation], table.successor2[operation], table.successor2_hop[operation]),
        ):
            self.end[node] = side.free
            if successor != table.none:
                self._call(table.rank[successor], side.free + hop)
