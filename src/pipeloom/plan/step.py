"""A plan for one step from the lengths of its sequences: replicas, micro-batches, their order, and a schedule for their costs.

Reinforcement learning, instruction tuning and mixtures of long and short texts have sequences of very different lengths. Padding
or packing them to equal micro-batches wastes time in a pipeline; here micro-batches differ, and the schedule knows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from random import Random

from pipeloom.errors import ArgumentError, CapacityError, UsageError
from pipeloom.limits import of_annotated_types, require_positive, require_types, require_whole, whole_numbers
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.families import FAMILIES, build

FAMILIES_OF_STEPS = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2))
_SHARES = (1.0, 1.15, 1.35, 1.6, 2.0, 2.6, 3.5)  # times the fewest micro-batches that hold a replica's tokens
_WARM = 3  # ways of packing that a plan takes over from the last one
_FEW = 6  # sequences of a step, of which every way to pack them is improved
_TRIES, _WARM_TRIES = 1500, 8  # simulated replicas while a plan is improved
_TRIES_PER_SEQUENCE = 60  # at most
_HEATS = (0.0, 0.03)  # shares by which a change may make a step longer at first
_Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SequenceTime:
    """Time of a micro-batch on 1/p of the model: fixed + the sum over its sequences of (each + linear n + square n^2), n tokens.

    Attributes:
        fixed: of a micro-batch, whatever it holds.
        linear: of a token.
        square: of a pair of tokens, of attention.
        each: of a sequence, whatever its length: where layers compute packed sequences one by one.
    """

    fixed: float = 0.0
    linear: float = 1.0
    square: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        require_types(SequenceTime, vars(self))
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ArgumentError(name, f" is {value}; it must be a number of at least 0")

    def of(self, length: int) -> float:
        """The time of one sequence."""
        return self.each + self.linear * length + self.square * length**2


@dataclass(frozen=True)
class ReplicaPlan:
    """The micro-batches of one replica in their order, each of numbers of sequences, and the simulated step."""

    microbatches: _Batches
    tokens: tuple[int, ...]
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


@dataclass(frozen=True)
class StepPlan:
    """A step of all replicas.

    Attributes:
        replicas: each with its micro-batches and its schedule.
        makespan: of the slowest replica, with which the step ends.
        bound: no plan is shorter: the work of a rank and its way in, or the longest sequence on its way there and back.
        family: of the schedules, and chunks of a rank.
        packings: replica -> (micro-batches over the fewest that hold its tokens, number of their order), for the next plan.
    """

    replicas: tuple[ReplicaPlan, ...]
    makespan: float
    bound: float
    family: tuple[str, int]
    packings: tuple[tuple[float, int], ...]

    @property
    def gap(self) -> float:
        """The share by which the step is longer than the bound."""
        return self.makespan / self.bound - 1

    def __str__(self) -> str:
        name, chunks = self.family
        lines = [
            f"{name}{f' of {chunks} chunks' if chunks > 1 else ''}: makespan {self.makespan:.6g}, "
            f"{100 * self.gap:.1f} % above the bound {self.bound:.6g}"
        ]
        for at, each in enumerate(self.replicas):
            tokens = f"{min(each.tokens)} to {max(each.tokens)} tokens"
            lines.append(
                f"replica {at}: {len(each.tokens)} micro-batches of {tokens}, makespan {each.timeline.makespan:.6g}"
            )
        return "\n".join(lines)


@of_annotated_types
def plan_step(
    lengths: Sequence[int],
    ranks: int,
    replicas: int = 1,
    *,
    tokens: int,
    time: SequenceTime = SequenceTime(),
    costs: Costs | None = None,
    memory: float = math.inf,
    families: Iterable[tuple[str, int]] = FAMILIES_OF_STEPS,
    last: StepPlan | None = None,
) -> StepPlan:
    """Divide the sequences of one step among replicas and micro-batches, and choose a schedule for exactly these.

    Pure and deterministic: every rank that knows the lengths computes the same plan. Without `last` never longer than sequences
    packed in the order given or balanced by tokens, with each of `families`.

    >>> import pipeloom as pl
    >>> plan = pl.plan_step([900, 80, 70, 60, 500, 400, 30, 20], ranks=2, tokens=1000)
    >>> sorted(number for batch in plan.replicas[0].microbatches for number in batch)
    [0, 1, 2, 3, 4, 5, 6, 7]

    Args:
        lengths: tokens of each sequence of the global batch.
        ranks: of the pipeline.
        replicas: of the data-parallel axis.
        tokens: the most of a micro-batch.
        time: of a micro-batch by its sequences' lengths; F, I and W share it as `costs` say.
        costs: of 1/p of the model, for a micro-batch whose time is 1; default: 1 for F, I and W.
        memory: the most tokens whose activations a rank may hold, of 1/p of the model.
        families: (name, chunks of a rank) of the schedules to try.
        last: the plan of an earlier step of the same kind, whose family and ways of packing are tried alone, as far as they
            serve.

    Raises:
        UsageError: no sequences, fewer than replicas, one that is longer than `tokens`; no time, or no known family.
        CapacityError: no plan keeps `memory`.
    """
    families = tuple(families)
    pairs = all(isinstance(each, (tuple, list)) and [*map(type, each)] == [str, int] for each in families)
    if not families or not pairs or not all(name in FAMILIES and chunks >= 1 for name, chunks in families):
        raise UsageError(f"families={families}: give (name, chunks) of known ones; nearest: {FAMILIES_OF_STEPS[0]}")
    families = tuple((name, chunks) for name, chunks in families)  # lists, of JSON
    _require(lengths, ranks, replicas, tokens)
    require_positive("memory", memory)
    if time.fixed + time.of(1) <= 0:
        raise UsageError(f"time={time}: a micro-batch takes no time; nearest: {SequenceTime()}")
    most = max(chunks for _, chunks in families)
    step = _StepQuestion(
        tuple(lengths), ranks, replicas, tokens, time, costs if costs is not None else Costs(), memory, most
    )
    packings = (
        list(product(_SHARES, range(3 if memory == math.inf else 4)))
        if last is None
        else list(dict.fromkeys(last.packings))[:_WARM]
    )
    best: StepPlan | None = None
    for family in families if last is None else (last.family,):
        plan = step.planned(family, [step.packed_in_all_ways(mine, packings) for mine in step.spread()])
        if plan is not None:  # what a replica waits is work that others can take over
            waits = [each.timeline.makespan - max(each.timeline.busy) for each in plan.replicas]
            divided = step.spread([wait / step.unit for wait in waits])
            again = step.planned(family, [step.packed_in_all_ways(mine, packings) for mine in divided])
            plan = min((each for each in (plan, again) if each is not None), key=lambda each: each.makespan)
        plans = [plan]
        if last is None:
            plans += [step.planned(family, [[each] for each in packing]) for packing in step.simple_packings()]
        if last is None and len(lengths) <= _FEW:
            ways = zip(*(step.packed_in_all_ways(mine, packings) for mine in step.spread()), strict=True)
            different = {tuple(pack.batches for pack in way): way for way in ways}.values()
            alike = (step.planned(family, [[pack] for pack in way]) for way in different)
            plans += [step.improved(each, _TRIES) for each in alike if each is not None]
        best = min((each for each in (best, *plans) if each is not None), key=lambda each: each.makespan, default=None)
    if best is None and last is not None:  # its ways of packing serve none of these
        return plan_step(
            lengths, ranks, replicas, tokens=tokens, time=time, costs=costs, memory=memory, families=families
        )
    if best is None:
        raise CapacityError(
            f"no plan of {len(lengths)} sequences keeps {memory:g} tokens on a rank; the longest has {max(lengths)}"
        )
    if last is not None:
        return step.improved(best, _WARM_TRIES)
    return min((step.improved(best, _TRIES, heat) for heat in _HEATS), key=lambda each: each.makespan)


def simple_plans(
    lengths: Sequence[int],
    ranks: int,
    replicas: int = 1,
    *,
    tokens: int,
    time: SequenceTime = SequenceTime(),
    costs: Costs = Costs(),
) -> list[tuple[str, StepPlan]]:
    """Return plans of two packings, "as they come" and "by tokens", with 1F1B and interleaving; arguments as of `plan_step`."""
    _require(lengths, ranks, replicas, tokens)
    step = _StepQuestion(tuple(lengths), ranks, replicas, tokens, time, costs, math.inf, 2)
    packings = zip(("as they come", "by tokens"), step.simple_packings(), strict=True)
    plans = [
        (words, step.planned(family, [[each] for each in packing]))
        for words, packing in packings
        for family in (("1f1b", 1), ("interleaved", 2))
    ]
    return [(words, plan) for words, plan in plans if plan is not None]


def _require(lengths: Sequence[int], ranks: int, replicas: int, tokens: int) -> None:
    if not whole_numbers("lengths", lengths, 1):
        raise UsageError("lengths: give the tokens of each sequence, at least 1 each")
    require_whole("ranks", ranks)
    require_whole("replicas", replicas)
    require_whole("tokens", tokens)
    if len(lengths) < replicas:
        raise UsageError(
            f"{len(lengths)} sequences for {replicas} replicas: each needs one; nearest: replicas={len(lengths)}"
        )
    if max(lengths) > tokens:
        at = max(range(len(lengths)), key=lengths.__getitem__)
        raise UsageError(f"tokens={tokens}: sequence {at} has {lengths[at]}; nearest: tokens={lengths[at]}")


@dataclass(frozen=True)
class _Packed:
    """Micro-batches of a replica in their order, and how they came about."""

    batches: _Batches
    way: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True)
class _StepQuestion:
    """The question for one step."""

    lengths: tuple[int, ...]
    ranks: int
    replicas: int
    tokens: int
    time: SequenceTime
    costs: Costs
    memory: float
    chunks: int  # the most of a rank

    @cached_property
    def times(self) -> list[float]:
        """Sequence -> its time."""
        return [self.time.of(n) for n in self.lengths]

    @property
    def unit(self) -> float:
        """The time of F, I and W of a micro-batch whose time is 1."""
        return sum(max(self.costs.per_stage(name, self.ranks)) for name in ("forward", "input_grad", "weight_grad"))

    def spread(self, begun: Sequence[float] = (), weights: Sequence[float] = ()) -> list[list[int]]:
        """Replica -> its sequences, of nearly equal time: the longest first, each to the replica with the least (LPT).

        Args:
            begun: replica -> time that it has without sequences.
            weights: sequence -> what is balanced; default: its time.
        """
        weights = weights or self.times
        members: list[list[int]] = [[] for _ in range(self.replicas)]
        sums = list(begun) or [0.0] * self.replicas
        longest = sorted(range(len(self.lengths)), key=lambda at: (-weights[at], at))
        for count, sequence in enumerate(longest):
            # the first go one to each, so that none is empty and waits stay with the sequences that cause them
            lightest = count if count < self.replicas else min(range(self.replicas), key=lambda at: (sums[at], at))
            members[lightest].append(sequence)
            sums[lightest] += weights[sequence]
        return members

    def simple_packings(self) -> Iterator[list[_Packed]]:
        """Yield replica -> micro-batches: sequences in turn, packed as they come; and balanced by tokens."""
        in_turn = [list(range(at, len(self.lengths), self.replicas)) for at in range(self.replicas)]
        yield [_Packed(tuple(map(tuple, self.first_fit(mine)))) for mine in in_turn]
        by_tokens = self.spread(weights=self.lengths)
        yield [_Packed(tuple(map(tuple, self.packed(mine, self.fewest(mine), self.lengths)))) for mine in by_tokens]

    def packed_in_all_ways(self, sequences: Sequence[int], ways: Sequence[tuple[float, int]]) -> list[_Packed]:
        """The micro-batches of a replica for each (share of the fewest, number of the order)."""
        packs: list[_Packed] = []
        known: dict[float, list[list[tuple[int, ...]]]] = {}
        for share, order in ways:
            if share not in known:
                batches = self.packed(sequences, math.ceil(share * self.fewest(sequences)), self.times)
                known[share] = _orders([tuple(batch) for batch in batches], [self.seconds(batch) for batch in batches])
            packs.append(_Packed(tuple(known[share][order]), (share, order)))
        return packs

    def first_fit(self, sequences: Sequence[int]) -> list[list[int]]:
        """Micro-batches as they come: the next sequence that does not fit begins another."""
        batches: list[list[int]] = [[]]
        for sequence in sequences:
            if sum(self.lengths[at] for at in batches[-1]) + self.lengths[sequence] > self.tokens:
                batches.append([])
            batches[-1].append(sequence)
        return batches

    def fewest(self, sequences: Sequence[int]) -> int:
        return -(-sum(self.lengths[at] for at in sequences) // self.tokens)

    def packed(self, sequences: Sequence[int], count: int, weights: Sequence[float]) -> list[list[int]]:
        """About so many micro-batches of nearly equal weight within the limit of tokens, more where they do not fit."""
        batches: list[list[int]] = [[] for _ in range(max(1, min(count, len(sequences))))]
        sums, room = [0.0] * len(batches), [self.tokens] * len(batches)
        for sequence in sorted(sequences, key=lambda at: (-weights[at], at)):
            fitting = [at for at in range(len(batches)) if room[at] >= self.lengths[sequence]]
            if not fitting:
                fitting = [len(batches)]
                batches.append([])
                sums.append(0.0)
                room.append(self.tokens)
            lightest = min(fitting, key=lambda at: (sums[at], at))
            batches[lightest].append(sequence)
            sums[lightest] += weights[sequence]
            room[lightest] -= self.lengths[sequence]
        return [batch for batch in batches if batch]

    def planned(self, family: tuple[str, int], choices: Sequence[Sequence[_Packed]]) -> StepPlan | None:
        """The plan with this family and the best choice of each replica; None where one has none within the memory."""
        plans: list[ReplicaPlan] = []
        ways: list[tuple[float, int]] = []
        for packs in choices:
            runs = [(run, pack.way) for pack in packs if (run := self.replica(family, pack.batches)) is not None]
            if not runs:
                return None
            run, way = min(runs, key=lambda each: each[0].timeline.makespan)
            plans.append(run)
            ways.append(way)
        return StepPlan(tuple(plans), max(each.timeline.makespan for each in plans), self.bound, family, tuple(ways))

    def seconds(self, batch: Sequence[int]) -> float:
        """The time of a micro-batch."""
        return self.time.fixed + sum(self.times[at] for at in batch)

    def replica(self, family: tuple[str, int], order: Sequence[tuple[int, ...]]) -> ReplicaPlan | None:
        """A replica's step with micro-batches in this order; None where the family has no such size, or memory lacks."""
        name, chunks = family
        schedule = _schedule(name, self.ranks, len(order), chunks)
        if schedule is None:
            return None
        tokens = tuple(sum(self.lengths[at] for at in batch) for batch in order)
        shared = self.costs.resized(1 / chunks)
        if math.isfinite(self.memory):
            held = simulate(schedule, replace(Costs(activation=1 / chunks), microbatch=tuple(map(float, tokens))))
            if max(held.peak_memory) > self.memory:
                return None
        times = tuple(self.seconds(batch) for batch in order)
        return ReplicaPlan(tuple(order), tokens, simulate(schedule, replace(shared, microbatch=times)))

    def improved(self, plan: StepPlan, tries: int, heat: float = 0.0) -> StepPlan:
        """The shortest plan in so many random changes of the slowest replica, without those that make it too long.

        A change may make it longer by the share `heat` at first, and by less and less (threshold accepting).
        """
        draw, plans, best = Random(0), list(plan.replicas), plan
        tries = min(tries, _TRIES_PER_SEQUENCE * len(self.lengths))
        for done in range(tries):
            slowest = max(range(len(plans)), key=lambda at: plans[at].timeline.makespan)
            changes = self.changed(draw, plans, slowest)
            runs = {at: self.replica(plan.family, order) for at, order in changes.items()}
            longest = max((math.inf if run is None else run.timeline.makespan for run in runs.values()), default=0.0)
            if longest <= plans[slowest].timeline.makespan * (1 + heat * (1 - done / tries) ** 3):
                plans = [runs.get(at) or each for at, each in enumerate(plans)]
                makespan = max(each.timeline.makespan for each in plans)
                if makespan <= best.makespan:
                    best = replace(plan, replicas=tuple(plans), makespan=makespan)
        return best

    def changed(self, draw: Random, plans: Sequence[ReplicaPlan], slowest: int) -> dict[int, _Batches]:
        """Replica -> its micro-batches after a random change: one moves or two exchange places; or a sequence moves, to one of
        its own too, or changes places with another, of this replica or of others. {}: the limit of tokens forbids it."""
        mine, kind = [list(batch) for batch in plans[slowest].microbatches], draw.randrange(4)
        if kind < 2:
            first, second = draw.randrange(len(mine)), draw.randrange(len(mine))
            if kind == 0:
                mine.insert(second, mine.pop(first))
            else:
                mine[first], mine[second] = mine[second], mine[first]
            return {slowest: _kept(mine)}
        other = draw.randrange(len(plans)) if kind == 2 else slowest
        theirs = mine if other == slowest else [list(batch) for batch in plans[other].microbatches]
        source = draw.choice(mine)
        sequence = source.pop(draw.randrange(len(source)))
        to = draw.randrange(len(theirs) + 1)
        if to == len(theirs):
            to = draw.randrange(len(theirs) + 1)
            theirs.insert(to, [])
        elif theirs[to] and draw.random() < 0.5:
            source.append(theirs[to].pop(draw.randrange(len(theirs[to]))))
        theirs[to].append(sequence)
        after = {slowest: _kept(mine), other: _kept(theirs)}
        sizes = [sum(self.lengths[at] for at in batch) for batches in after.values() for batch in batches]
        return after if all(after.values()) and max(sizes) <= self.tokens else {}

    @cached_property
    def bound(self) -> float:
        """As `StepPlan.bound`."""
        forward, input_grad, weight_grad = (
            min(self.costs.per_stage(name, self.ranks)) for name in ("forward", "input_grad", "weight_grad")
        )
        work = (
            (sum(self.times) + self.time.fixed * self.replicas) / self.replicas * (forward + input_grad + weight_grad)
        )
        first = (self.time.fixed + min(self.times)) * forward * (self.ranks - 1) / self.chunks
        longest = (self.time.fixed + max(self.times)) * (
            self.ranks * (forward + input_grad) + weight_grad / self.chunks
        )
        return max(work + first, longest)


def _kept(batches: Iterable[Sequence[int]]) -> _Batches:
    return tuple(tuple(batch) for batch in batches if batch)


def _orders(batches: list[tuple[int, ...]], times: Sequence[float]) -> list[list[tuple[int, ...]]]:
    """Orders to try: the shortest at both ends of the step, where the pipeline fills and drains; falling; rising; and long beside
    short ones, which a rank holds at the same time."""
    rising = [batches[at] for at in sorted(range(len(batches)), key=lambda at: (times[at], at))]
    half = len(rising) // 2
    mixed = [each for pair in zip_longest(rising[: len(rising) - half], rising[::-1][:half]) for each in pair if each]
    return [[*rising[::2], *rising[1::2][::-1]], rising[::-1], rising, mixed]


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    try:
        return build(name, ranks, microbatches, chunks if chunks > 1 and name != "zbv" else None)
    except UsageError:
        return None
