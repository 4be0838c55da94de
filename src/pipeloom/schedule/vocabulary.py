"""`vocabulary` and `embedding`: the transforms that spread the output layer and the input embedding over the pipeline (arXiv
2411.05288).

Every rank holds a share of the vocabulary. The last stage's output is broadcast, S computes the scores of a share, a reduction
sums them over the ranks, and T computes the gradients of the share. The backward of the last stage waits for the sum of the
input gradients: with one reduction S computes a share of those, too, with two T does, and a second reduction follows it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, product
from typing import Any, NamedTuple

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import COLLECTIVE, INPUT_GRADIENT, Cell, kind_number
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.graph import NEVER, Graph
from pipeloom.schedule.model import Schedule, of_schedule, parts, unit_action
from pipeloom.schedule.simulate import simulate, weights_of

_SHORTER = 1e-3  # of the step, by which a placement whose T waits longer, and holds more, must be shorter
_ONE, _TWO = ("REDUCE",), ("REDUCE_SUM", "REDUCE_INPUT")


class _Policy(NamedTuple):
    """Rules by which a rank takes one of several entries that could run.

    Attributes:
        ahead: how many forwards of stages more than before come ahead of each backward.
        scores_first: whether S comes before what the schedule has next.
        waiting: the most T that wait while other work is there, those of the last micro-batches not counted.
        late: of how many of the last units T waits until there is no other work.
        fit: the share of a T that must fit into a wait for it to be computed there.
    """

    ahead: int
    scores_first: bool
    waiting: int
    late: int
    fit: float


@of_schedule
def vocabulary(schedule: Schedule, form: str = "fused", costs: Costs | None = None) -> Schedule:
    """Return `schedule` with the output layer spread over the ranks, in one stage more on each.

    The order of the schedule's own actions on a rank stays, but forwards move ahead of backwards, which wait for the reductions.
    S, T and the forwards' lead are those of the shortest of several placements. Memory: with one reduction at most one
    micro-batch per rank more than before, with two at most two; of sequences in slices, so many slices. There each slice has
    group entries, S and T of its own.

    Args:
        form: `"fused"`: S computes the input gradient of its share, too, and one reduction follows it; `"two"`: T does.
        costs: per stage, of the schedule's own stages or also of the vocabulary's; default: 1, 1, 1, and 0.5 for S and for T.

    Raises UsageError for a schedule of two routes, with pairs, with entries on other queues, with named tensors or with a spread
    vocabulary.
    """
    return _placed(schedule, form, costs).schedule_of()


def with_shares(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with `vocabulary`, in one reduction, and then `embedding`."""
    placing = _placed(schedule, "fused", costs)
    return _with_embedding(placing.schedule_of(), placing.starts, placing.work.duration)


def _placed(schedule: Schedule, form: str, costs: Costs | None) -> _Placing:
    """Return the shortest placement of S, T and the forwards' lead."""
    if form not in ("fused", "two"):
        raise UsageError(f"vocabulary: {form!r:.200} is neither fused (one reduction) nor two")
    problems = {
        "is spread over the ranks already": schedule.vocabulary,
        "has two routes": len(schedule.routes) > 1,
        "has overlapped pairs (the transform unpair takes them apart)": schedule.has_pairs,
        "has entries beside the computation, which are added afterwards": schedule.has_queues or schedule.stage_actions,
        "passes tensors by name": schedule.tensors,
    }
    for words, holds in problems.items():
        if holds:
            raise UsageError(f"vocabulary: schedule {schedule.name} {words}")
    spread = replace(
        schedule,
        placement=(*schedule.placement, *range(schedule.ranks)),
        codes=((),) * schedule.ranks,
        options=tuple(sorted({**dict(schedule.options), "vocabulary": form}.items())),
    )
    cost_model = costs_of_all(costs if costs is not None else Costs(), spread)
    groups = _ONE if form == "fused" else _TWO
    work = _Entries(schedule, spread, cost_model, groups)
    best: tuple[float, _Placing] | None = None
    for policy in _policies(schedule, groups):
        placing = _Placing(work, policy)
        limit = (1 - _SHORTER) * best[0] if best is not None else NEVER
        if (makespan := placing.run(limit)) < limit:
            best = makespan, placing
    assert best is not None
    assert best[0] < NEVER
    return best[1]


def _policies(schedule: Schedule, groups: tuple[str, ...]) -> list[_Policy]:
    """Return the policies to try, those first whose T wait least.

    With one reduction these of all 24 for each lead of the forwards: over 660 schedules of six families, 2 to 8 ranks and shares
    of a tenth to twice a stage the best of them is in the mean as short as the best of all, and 0.5 % longer at most.
    """
    most, few, many = len(groups) * schedule.chunks, schedule.ranks, 2 * schedule.ranks
    if groups is _TWO:
        return [_Policy(ahead, first, 0, 0, 0.0) for ahead, first in product(range(most + 1), (True, False))]
    lead = -(-most // 2)
    policies = [_Policy(0, True, 0, late, 0.0) for late in (0, few)] + [_Policy(most, True, 0, few, 1.0)]
    for ahead, first, waiting, fit in (
        *((ahead, True, *patience) for ahead in (lead, most) for patience in ((1, 0.5), (2, 0.0))),
        *((most, False, *patience) for patience in ((0, 1.0), (1, 0.5), (2, 0.0))),
    ):
        policies.append(_Policy(ahead, first, waiting, many, fit))
    return list(dict.fromkeys(policies))


@of_schedule
def embedding(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule`, whose vocabulary is spread, with the input embedding in the same shares.

    EMBED of a unit begins with the first stage's F of the second unit before it, EMBED_GRAD when its B or I ends; each stands
    on a rank behind what runs there then. Memory: the rows of two units more on the first stage's rank.

    Args:
        costs: as of `vocabulary`.

    Raises UsageError for a schedule whose vocabulary is not spread, or whose embedding is.
    """
    if not schedule.vocabulary or schedule._spreads_embedding:
        words = "is spread over the ranks already" if schedule.vocabulary else "has no shares of the vocabulary"
        raise UsageError(f"embedding: schedule {schedule.name} {words}")
    run = simulate(schedule, costs_of_all(costs if costs is not None else Costs(), schedule))
    return _with_embedding(schedule, run.starts, weights_of(schedule, run.costs).duration)


def _with_embedding(schedule: Schedule, started: Sequence[Sequence[float]], duration: Sequence[float]) -> Schedule:
    """As `embedding`: rank -> the starts of its entries, and code -> its time."""
    first, begun, moments = schedule.routes[0][0], list[tuple[float, int]](), list[tuple[float, str, int]]()
    rank = schedule.placement[first]
    for code, start in zip(schedule.codes[rank], started[rank], strict=True):
        number, place = divmod(code, schedule._kind_stride)
        if place // schedule.units == first and schedule.kinds[number].is_forward:
            begun.append((start, place % schedule.units))
        elif place // schedule.units == first and INPUT_GRADIENT in schedule.kinds[number].makes:
            moments.append((start + duration[code], "EMBED_GRAD", place % schedule.units))
    for at, (_, unit) in enumerate(begun):
        moments.append((begun[at - _AHEAD][0] if at >= _AHEAD else -1.0, "EMBED", unit))
    moments.sort()
    programs = [_with_moments(schedule, rank, started[rank], moments) for rank in range(schedule.ranks)]
    return schedule.with_programs(programs)


_AHEAD = 2  # units; with one, a rank that is late with its part would hold up the first stage at once


def _with_moments(
    schedule: Schedule, rank: int, starts: Sequence[float], moments: Sequence[tuple[float, str, int]]
) -> list[Cell]:
    """Return a rank's program with group entries that start at the `moments`, in the order in which all ranks have them."""
    program, entries = schedule.programs[rank], list(schedule.queues[rank].get(COLLECTIVE, ()))
    earliest = list(accumulate(reversed(starts), min))[::-1]  # start of what comes at a position or behind it
    in_turn = [starts[at] for at in entries]
    behind: dict[int, list[Cell]] = defaultdict(list)
    for moment, letter, unit in moments:
        following = bisect_right(in_turn, moment)
        before = entries[following] if following < len(entries) else len(starts)
        at = min(bisect_right(earliest, moment), before) - 1
        behind[at].append(unit_action(schedule, letter, schedule.vocabulary[rank], unit))
    return [*behind[-1], *(each for at, cell in enumerate(program) for each in (cell, *behind[at]))]


def layers_alone(schedule: Schedule) -> Schedule:
    """Return `schedule` without a spread vocabulary: its stages of layers, whose last one puts out what the shares take."""
    if not schedule.vocabulary:
        return schedule
    stages = schedule.vocabulary.start
    programs = [
        [cell for cell in program if all(action.stage < stages for action in parts(cell))]
        for program in schedule.programs
    ]
    placement = schedule.placement[:stages]
    return replace(schedule, placement=placement, codes=((),) * schedule.ranks).with_programs(programs)


def costs_of_all(costs: Costs, schedule: Schedule) -> Costs:
    """Return `costs` for all stages of `schedule`: those given for its stages of layers alone are 0 on the vocabulary's."""
    layers, shares = schedule.vocabulary.start, len(schedule.vocabulary)

    def longer(name: str, value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != layers:
            return value
        if isinstance(value[0], tuple):  # the times of pairs
            return (*(longer(name, row) for row in value), *((0.0,) * (layers + shares),) * shares)
        return (*value, *(0.0,) * shares)

    return costs.changed(longer)


class _Entries:
    """The entries of a schedule as codes, their times, and what they wait for: what all placements share.

    Attributes:
        programs: rank -> the entries of the schedule.
        left: rank -> the time of its entries, S and T included.
        forwards: the codes of forwards; `last`: those of the last stage.
        shares: letter of an entry of the vocabulary -> rank -> its code for unit 0; those of the other units follow.
        end: code -> the number of the event at which the entry ends.
    """

    def __init__(self, schedule: Schedule, spread: Schedule, costs: Costs, groups: tuple[str, ...]) -> None:
        self.schedule, self.groups, self.units = spread, groups, spread.units
        letters = ("S", "T", "BROADCAST", *groups)
        some = unit_action(spread, "REDUCE_INPUT", spread.vocabulary.start, 0)
        probe = spread.with_programs([(some, *schedule.programs[0]), *schedule.programs[1:]])
        self.programs = [probe.codes[0][1:], *probe.codes[1:]]
        weights, graph = weights_of(probe, costs), Graph.of(probe, full=True)
        self.needs, self.duration, self.hop = graph.needs, weights.duration, weights.hop
        self.end_of = [NEVER] * graph.always + [0.0, 0.0]
        self.end = graph.event if graph.event is not None else range(len(graph.needs))
        stride, first = spread._kind_stride, [stage * spread.units for stage in spread.vocabulary]
        self.shares = {letter: [kind_number(letter) * stride + stage for stage in first] for letter in letters}
        ahead = {at for at, kind in enumerate(spread.kinds) if kind.is_forward}
        self.forwards = {code for program in self.programs for code in program if code // stride in ahead}
        self.last = {code for code in self.forwards if code % stride // spread.units == spread.routes[0][-1]}
        self.left = []
        for rank, program in enumerate(self.programs):
            ranges = [range(self.shares[letter][rank], self.shares[letter][rank] + self.units) for letter in "ST"]
            self.left.append(sum(self.duration[code] for code in chain(program, *ranges)))


@dataclass
class _PlacedRank:
    """One rank while its program is placed.

    Attributes:
        rest: the entries of the schedule that have not run, next one first.
        left: the time of what has not run.
        cells: (start, entry) of those that have, S and T included, in order.
        free: when the last one ends.
        scores: the unit of its next S.
        grads: the units whose T can run.
    """

    rest: deque[int]
    left: float
    cells: list[tuple[float, int]] = field(default_factory=list)
    free: float = 0.0
    scores: int = 0
    grads: deque[int] = field(default_factory=deque)


class _Placing:
    """One placement: ranks and group entries run from one moment to the next, and each rank follows the policy."""

    def __init__(self, work: _Entries, policy: _Policy) -> None:
        self.work, self.policy = work, policy
        self.end_of = list(work.end_of)
        leading = [_with_lead(program, work.forwards, policy.ahead) for program in work.programs]
        self.ranks = [_PlacedRank(deque(program), left) for program, left in zip(leading, work.left, strict=True)]
        self.started: list[tuple[float, str, int]] = []  # the group entries, in order
        self.due: list[tuple[float, str, int]] = []  # those that are known to start, by the moment at which they could
        self.collective_free = 0.0
        self.shared: dict[tuple[str, int], list[float]] = {}  # (kind, unit) -> ends of what its group waits for
        self.there: dict[tuple[str, int], float] = {}  # (kind, unit) of a group -> its end
        self.moments = [0.0]

    def run(self, limit: float = NEVER) -> float:
        """Place all entries and return the makespan; NEVER if the ranks cannot run to their ends, or not before `limit`."""
        while self.moments:
            now = heapq.heappop(self.moments)
            while self.moments and self.moments[0] <= now + TIME_TOLERANCE:  # one moment, whatever the rounding
                now = heapq.heappop(self.moments)
            while self.due and self.due[0][0] <= now:
                self._start_group(*heapq.heappop(self.due))
            for rank, each in enumerate(self.ranks):
                while each.free <= now and self._start_next(rank, now):
                    pass
                if max(now, each.free) + each.left > limit:
                    return NEVER
        if any(rank.rest or rank.grads or rank.scores < self.work.units for rank in self.ranks):
            return NEVER
        return max(self.collective_free, *(rank.free for rank in self.ranks))

    def schedule_of(self) -> Schedule:
        """Return the schedule with all entries as they are placed."""
        return self.work.schedule.with_programs([[code for _, code in program] for program in self.programs])

    @property
    def starts(self) -> list[list[float]]:
        """Rank -> the starts of its entries."""
        return [[start for start, _ in program] for program in self.programs]

    @cached_property
    def programs(self) -> list[list[tuple[float, int]]]:
        """Rank -> (start, code) of its entries."""
        return [self._program(rank) for rank in range(len(self.ranks))]

    def _ready(self, code: int) -> float:
        """Return when what an entry of the schedule waits for is there; NEVER if that is not known yet."""
        hop = self.work.hop
        return self.end_of[self.work.needs[code]] + (hop[code] if hop is not None else 0.0)

    def _start_next(self, rank: int, now: float) -> bool:
        """Start what the policy says on a rank that is free; return whether there is something."""
        each, policy, work, two = self.ranks[rank], self.policy, self.work, len(self.work.groups) > 1
        ready = self._ready(each.rest[0]) if each.rest else NEVER
        following = each.rest[0] if ready <= now else None
        grads, early = None, 0
        for unit in each.grads:  # in the order in which their groups end
            if self.there[work.groups[0], unit] > now:
                break
            grads = work.shares["T"][rank] + each.grads[0]
            early += unit < work.units - policy.late
        code: int | None
        if early > policy.waiting + 1:  # or they wait to the end, where the rank never does
            code = grads
        elif following is not None and not policy.scores_first:
            code = following
        elif grads is not None and two:
            code = grads
        elif self.there.get(("BROADCAST", each.scores), NEVER) <= now:
            code = work.shares["S"][rank] + each.scores
        elif grads is not None and early > policy.waiting:
            code = grads
        else:
            code = following
        fits = grads is not None and now + policy.fit * work.duration[grads] <= ready + TIME_TOLERANCE
        if code is None and fits:  # before what comes next, of which nothing may be known yet
            code = grads
        if code is None:
            if ready < NEVER:
                heapq.heappush(self.moments, ready)
            return False
        self._start(rank, code, now, following)
        return True

    def _start(self, rank: int, code: int, now: float, following: int | None) -> None:
        each, work, unit = self.ranks[rank], self.work, code % self.work.units
        each.free = end = now + work.duration[code]
        each.left -= work.duration[code]
        each.cells.append((now, code))
        self.end_of[work.end[code]] = end
        heapq.heappush(self.moments, end)
        if code == following:
            each.rest.popleft()
            if code in work.last:
                self._arrive("BROADCAST", unit, end, 1)
        elif code == work.shares["S"][rank] + unit:
            each.scores += 1
            self._arrive(work.groups[0], unit, end, len(self.ranks))
        else:
            each.grads.popleft()
            if len(work.groups) > 1:
                self._arrive(work.groups[1], unit, end, len(self.ranks))

    def _arrive(self, letter: str, unit: int, end: float, count: int) -> None:
        """Note that one of `count` entries for which a group waits ends then."""
        ends = self.shared.setdefault((letter, unit), [])
        ends.append(end)
        if len(ends) == count:
            heapq.heappush(self.due, (max(ends), letter, unit))

    def _start_group(self, ready: float, letter: str, unit: int) -> None:
        start = max(ready, self.collective_free)
        self.started.append((start, letter, unit))
        end = 0.0
        for first in self.work.shares[letter]:
            end = start + self.work.duration[first + unit]
            self.end_of[self.work.end[first + unit]] = end
        self.collective_free = self.there[letter, unit] = end
        heapq.heappush(self.moments, end)
        if letter == self.work.groups[0]:
            for each in self.ranks:
                each.grads.append(unit)

    def _program(self, rank: int) -> list[tuple[float, int]]:
        """Return (start, code) of a rank's entries: one of a group is behind the computation that runs when it starts."""
        cells, shares = self.ranks[rank].cells, self.work.shares
        place = {code: at for at, (_, code) in enumerate(cells)}
        needed = {"REDUCE": "S", "REDUCE_SUM": "S", "REDUCE_INPUT": "T"}
        behind: dict[int, list[tuple[float, int]]] = defaultdict(list)
        at, starts = -1, [start for start, _ in cells]
        for start, letter, unit in self.started:
            at = max(at, bisect_right(starts, start - TIME_TOLERANCE) - 1)
            if letter in needed:
                at = max(at, place[shares[needed[letter]][rank] + unit])
            behind[at].append((start, shares[letter][rank] + unit))
        return [*behind[-1], *(each for at, cell in enumerate(cells) for each in (cell, *behind[at]))]


def _with_lead(program: Sequence[int], is_forward: Collection[int], ahead: int) -> list[int]:
    """Return the program with so many forwards more ahead of each of its other entries."""
    forwards = deque(code for code in program if code in is_forward)
    order: list[int] = []
    lead = ahead
    for code in program:
        if code in is_forward:
            lead += 1
            continue
        for _ in range(min(lead, len(forwards))):
            order.append(forwards.popleft())
        lead = 0
        order.append(code)
    return [*order, *forwards]
