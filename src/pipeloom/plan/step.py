"""A plan for one step from the lengths of its sequences: replicas, micro-batches, their order, and a schedule for their costs.

Reinforcement learning, instruction tuning and mixtures of long and short texts have sequences of very different lengths. Padding
or packing them to equal micro-batches wastes time in a pipeline; here micro-batches differ, and the schedule knows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from random import Random
from typing import Any

from pipeloom.errors import ArgumentError, CapacityError, UsageError
from pipeloom.limits import of_annotated_types, require_positive, require_types, require_whole, whole_numbers
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.simulate import SIMULATED, Makespans

FAMILIES_OF_STEPS = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2))
# Times the fewest micro-batches that hold a replica's tokens.
_SHARES = (1.0, 1.15, 1.35, 1.6, 2.0, 2.6, 3.5, 5.0, 7.0, 10.0)
_WARM = 3  # ways of packing that a plan takes over from the last one
_FEW = 6  # sequences of a step, of which every way to pack them is improved
SEARCH_ROUNDS = (20, 300_000), (6, 1_200_000), (3, 4_000_000)  # plans that are improved, and the work on each
WARM_ROUNDS = ((1, 60_000),)
_MANY = 96  # sequences; with fewer there is less to do
_CHANGE = 100  # work of making a change, in entries of a makespan
_MAKING = 30  # work of building an entry of a schedule, in the same
HEAT = 0.002  # share by which a change may at first make a step longer, in the mean
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
    step = StepQuestion(
        tuple(lengths), ranks, replicas, tokens, time, costs if costs is not None else Costs(), memory, most
    )
    orders = range(3 if memory == math.inf else 4)
    groups: Iterable[Sequence[tuple[float, int]]]
    if last is not None:
        families, groups = (last.family,), [list(dict.fromkeys(last.packings))[:_WARM]]
    elif len(lengths) <= _FEW:
        groups = [[way] for way in product(_SHARES, orders)]
    else:
        groups = [*([(share, order) for order in orders] for share in _SHARES), list(product(_SHARES, orders))]
    starts = [draft for family in families for ways in groups for draft in step.starts(family, ways)]
    if last is None:
        choices = [[[each] for each in packing] for packing in step.simple_packings()]
        simple = (step.drafted(family, packs) for family in families for packs in choices)
        starts += [draft for draft in simple if draft is not None]
    if not starts and last is not None:  # its ways of packing serve none of these
        return plan_step(
            lengths, ranks, replicas, tokens=tokens, time=time, costs=costs, memory=memory, families=families
        )
    if not starts:
        raise CapacityError(
            f"no plan of {len(lengths)} sequences keeps {memory:g} tokens on a rank; the longest has {max(lengths)}"
        )
    if last is not None:
        return step.plan(step.searched(starts, WARM_ROUNDS))
    return step.plan(step.with_its_packings(step.searched(starts, SEARCH_ROUNDS)))


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
    step = StepQuestion(tuple(lengths), ranks, replicas, tokens, time, costs, math.inf, 2)
    packings = zip(("as they come", "by tokens"), step.simple_packings(), strict=True)
    drafts = [
        (words, step.drafted(family, [[each] for each in packing]))
        for words, packing in packings
        for family in (("1f1b", 1), ("interleaved", 2))
    ]
    return [(words, step.plan(draft)) for words, draft in drafts if draft is not None]


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
class _Draft:
    """A plan before its schedules are simulated in full; attributes as of `StepPlan`, replica -> its micro-batches."""

    makespan: float
    family: tuple[str, int]
    replicas: tuple[_Batches, ...]
    packings: tuple[tuple[float, int], ...]


@dataclass
class StepQuestion:
    """The question for one step."""

    lengths: tuple[int, ...]
    ranks: int
    replicas: int
    tokens: int
    time: SequenceTime
    costs: Costs
    memory: float
    chunks: int  # the most of a rank
    work: int = 0  # done for makespans so far (`Makespans.work`)

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

    def starts(self, family: tuple[str, int], ways: Sequence[tuple[float, int]]) -> Iterator[_Draft]:
        """Yield plans of these ways of packing: of replicas of equal time, and then with what a replica waits counted, too."""
        draft = self.drafted(family, [self.packed_in_all_ways(mine, ways) for mine in self.spread()])
        if draft is not None:
            yield draft
            # the time in which a rank waits is work that others can take over
            waits = [self.span(family, each) / self.unit - sum(map(self.seconds, each)) for each in draft.replicas]
            again = self.drafted(family, [self.packed_in_all_ways(mine, ways) for mine in self.spread(waits)])
            if again is not None:
                yield again

    def drafted(self, family: tuple[str, int], choices: Sequence[Sequence[_Packed]]) -> _Draft | None:
        """The plan with this family and the best choice of each replica; None where one has none within the memory."""
        choice: list[_Packed] = []
        longest = 0.0
        for packs in choices:
            least = math.inf
            for pack in packs:
                span = self.span(family, pack.batches, least)
                if span < least:
                    least, best = span, pack
            if least == math.inf:
                return None
            choice.append(best)
            longest = max(longest, least)
        return _Draft(longest, family, tuple(each.batches for each in choice), tuple(each.way for each in choice))

    def seconds(self, batch: Sequence[int]) -> float:
        """The time of a micro-batch."""
        return self.time.fixed + sum(map(self.times.__getitem__, batch))

    def sizes(self, batches: _Batches) -> tuple[int, ...]:
        """The tokens of each micro-batch."""
        return tuple(sum(map(self.lengths.__getitem__, batch)) for batch in batches)

    @cached_property
    def makespans(self) -> dict[tuple[tuple[str, int], int], Makespans | None]:
        """(family, micro-batches) -> makespans of its schedule, None where it has no such size; of those asked for so far."""
        return {}

    def span(self, family: tuple[str, int], batches: _Batches, limit: float = math.inf) -> float:
        """The time of a replica's step; infinite above the limit, where the family has no such size, and where memory lacks."""
        key = family, len(batches)
        if key not in self.makespans:
            self.makespans[key] = makespans = _makespans(*family, self.ranks, len(batches), self.costs)
            self.work += _MAKING * makespans.work if makespans is not None else 0
        makespans = self.makespans[key]
        if makespans is None:
            return math.inf
        makespan = makespans.of([self.seconds(batch) for batch in batches], limit)
        self.work += makespans.work
        if makespan < math.inf and self.memory < math.inf:
            self.work += SIMULATED * makespans.work
            held = replace(Costs(activation=1 / family[1]), microbatch=tuple(map(float, self.sizes(batches))))
            if max(simulate(makespans.schedule, held).peak_memory) > self.memory:
                return math.inf
        return makespan

    def timeline(self, family: tuple[str, int], batches: _Batches) -> Timeline:
        """A replica's step in full."""
        makespans = self.makespans[family, len(batches)]
        assert makespans is not None
        return makespans.timeline([self.seconds(batch) for batch in batches])

    def plan(self, draft: _Draft) -> StepPlan:
        replicas = tuple(
            ReplicaPlan(batches, self.sizes(batches), self.timeline(draft.family, batches))
            for batches in draft.replicas
        )
        longest = max(each.timeline.makespan for each in replicas)
        return StepPlan(replicas, longest, self.bound, draft.family, draft.packings)

    def with_its_packings(self, draft: _Draft) -> _Draft:
        """The draft with the micro-batches that it has, over the fewest, and no longer those that it began with."""
        packings = [
            ((len(batches) - 0.5) / self.fewest([at for batch in batches for at in batch]), order)
            for batches, (_, order) in zip(draft.replicas, draft.packings, strict=True)
        ]
        return replace(draft, packings=tuple(packings))

    def searched(self, starts: Iterable[_Draft], rounds: Iterable[tuple[int, int]]) -> _Draft:
        """The shortest plan that changes make of these; each round does more work on fewer of them (successive halving)."""
        share = min(1.0, len(self.lengths) / _MANY)
        drafts = list({(draft.family, draft.replicas): draft for draft in starts}.values())
        for count, work in rounds:
            shortest = sorted(drafts, key=lambda draft: draft.makespan)[:count]
            drafts = [self.improved(draft, share * work) for draft in shortest]
        return min(drafts, key=lambda draft: draft.makespan)

    def improved(self, draft: _Draft, work: float) -> _Draft:
        """The shortest plan that random changes of the slowest replica lead to while so much work is done (`Makespans.work`).

        A change may make the step longer, by the share `HEAT` in the mean at first, and by less and less (simulated annealing).
        """
        draw, replicas, best = Random(0).random, list(draft.replicas), draft
        spans = [self.span(draft.family, batches) for batches in replicas]
        begun = self.work
        while (done := (self.work - begun) / work) < 1:
            longest = max(spans)
            slowest = spans.index(longest)
            limit = longest * (1 - HEAT * (1 - done) * math.log(1 - draw()))
            changes, after = self.changed(draw, replicas, slowest), {}
            self.work += _CHANGE
            for at, batches in changes.items():
                after[at] = self.span(draft.family, batches, limit)
                if after[at] == math.inf:
                    break
            else:
                for at, batches in changes.items():
                    replicas[at], spans[at] = batches, after[at]
                if max(spans) < best.makespan:
                    best = replace(draft, replicas=tuple(replicas), makespan=max(spans))
        return best

    def changed(self, draw: Callable[[], float], replicas: Sequence[_Batches], slowest: int) -> dict[int, _Batches]:
        """Replica -> its micro-batches after a random change: one moves or two exchange places; or a sequence moves, to one of
        its own too, or changes places with another, of this replica or of others. {}: it changes nothing,
        or the limit of tokens forbids it."""
        mine: list[Any] = list(replicas[slowest])
        kind = int(4 * draw())
        if kind < 2:
            first, second = int(len(mine) * draw()), int(len(mine) * draw())
            if kind == 0:
                mine.insert(second, mine.pop(first))
            else:
                mine[first], mine[second] = mine[second], mine[first]
            return {slowest: tuple(mine)} if first != second else {}
        other = int(len(replicas) * draw()) if kind == 2 else slowest
        theirs: list[Any] = mine if other == slowest else list(replicas[other])
        at, to = int(len(mine) * draw()), int((len(theirs) + 1) * draw())
        source = list(mine[at])
        sequence = source.pop(int(len(source) * draw()))
        mine[at] = source
        if to == len(theirs):
            theirs.insert(int((len(theirs) + 1) * draw()), target := [])
        elif theirs is mine and to == at:
            return {}
        else:
            theirs[to] = target = list(theirs[to])
            if draw() < 0.5:
                source.append(target.pop(int(len(target) * draw())))
        target.append(sequence)
        if max(sum(map(self.lengths.__getitem__, batch)) for batch in (source, target)) > self.tokens:
            return {}
        after = (slowest, mine), (other, theirs)
        return {at: tuple(tuple(batch) for batch in batches if batch) for at, batches in after}

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


def _orders(batches: list[tuple[int, ...]], times: Sequence[float]) -> list[list[tuple[int, ...]]]:
    """Orders to try: the shortest at both ends of the step, where the pipeline fills and drains; falling; rising; and long beside
    short ones, which a rank holds at the same time."""
    rising = [batches[at] for at in sorted(range(len(batches)), key=lambda at: (times[at], at))]
    half = len(rising) // 2
    mixed = [each for pair in zip_longest(rising[: len(rising) - half], rising[::-1][:half]) for each in pair if each]
    return [[*rising[::2], *rising[1::2][::-1]], rising[::-1], rising, mixed]


@lru_cache(maxsize=128)
def _makespans(name: str, chunks: int, ranks: int, microbatches: int, costs: Costs) -> Makespans | None:
    """Of a family's schedule, with costs of 1/p of the model; None where it has no such size."""
    try:
        schedule = build(name, ranks, microbatches, chunks if chunks > 1 and name != "zbv" else None)
    except UsageError:
        return None
    return Makespans(schedule, costs.resized(1 / chunks))
