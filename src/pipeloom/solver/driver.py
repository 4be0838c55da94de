"""The driver of a search: warm starts, the search for a period, tabu search from several starts, and a proof.

The walks of tabu search form a portfolio that shares one incumbent: warm starts first, then restarts from serial sequences. Its
rounds follow one another as the instances and the seed determine, whatever the budget: a search with more moves or seconds
continues one with fewer, and is never worse. In a round, walks race: after each turn the better half continues, twice as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from pipeloom.errors import CapacityError
from pipeloom.schedule import Schedule
from pipeloom.schedule.costs import Sends
from pipeloom.solver.bounds import bound_of, pairs_gain
from pipeloom.solver.construct import (
    CHEAP,
    FIRST_RULES,
    LARGEST_WALKED,
    OTHER_RULES,
    PairingRule,
    family_schedules,
    interleaved_rounds,
    list_scheduled,
    plain_order,
    reduced_instances,
    sequences_of,
    with_pairs,
)
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.exact import certify
from pipeloom.solver.incumbent import Budget, Incumbent, Progress, Solution
from pipeloom.solver.instance import Instance, Sequences
from pipeloom.solver.merge_backward import merge_weight_grads
from pipeloom.solver.period_search import PERIODIC_ORIGIN, PeriodSearches, modulo_starts
from pipeloom.solver.periodic import repeat_period
from pipeloom.solver.tabu import WITH_PAIRS, WITH_WHOLE, WITHOUT_PAIRS, TabuSearch

# Division of a search's effort between warm starts, the search for a period and tabu search.
# Warm starts from list scheduling that are tried however long they take.
FEWEST_STARTS = 8
# The share of the time after which no more warm starts are constructed, and the same for large instances, for which no tabu
# search follows.
STARTS_SHARE = 0.3
LARGE_STARTS_SHARE = 0.5
# With pairs: list schedules per placement taken as warm starts, and warm starts tried with all pairing rules. More diversify,
# and take the time from tabu search.
LIST_SCHEDULES = 3
STARTS_WITH_ALL_RULES = 3
# With pairs: the share of the time after which no more warm starts are constructed.
PAIR_STARTS_SHARE = 1 / 3
PAIRED = ("1f1b-overlap", "interleaved-overlap", "dualpipev")


class SearchDriver:
    """One search: warm starts, the search for a period, tabu search from several starts in turn, and a proof.

    Args:
        instances: one per placement and order of micro-batches.
        pairs: whether overlapped pairs are searched over. If so, pairs are formed in the warm starts, no period is searched for,
            and the budget must not include a proof.
        given: schedules to start from, beside the families.
        sends: how long senders wait; the costs of the instances are those without it.

    Attributes:
        incumbent: the best schedule so far.
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        budget: Budget,
        random: Random,
        progress: Callable[[Progress], None] | None,
        pairs: bool = False,
        given: Sequence[Schedule] = (),
        sends: Sends = "free",
    ) -> None:
        self.given = [plain_order(schedule) for schedule in given]
        self.instances, self.budget, self.random, self.pairs = instances, budget, random, pairs
        self.objective = instances[0].objective
        bounds = {instance: bound_of(instance, pairs) for instance in instances}
        self.incumbent = Incumbent(bounds, budget, progress, sends)
        self.interrupted = False
        self._merged: Solution | None = None  # the incumbent after its last merge
        # instance -> (value, instance, sequences), in which a period that can be repeated is looked for
        self.seeds: dict[Instance, list[tuple[float, Instance, Sequences]]] = {}

    def run(self) -> None:
        """Search until the budget is spent, the bound is reached, or Ctrl-C is pressed after a first solution.

        Raises CapacityError if no start fits the memory, and KeyboardInterrupt for Ctrl-C before the first solution.
        """
        for phase in (self._search, self._merge_at_end):
            try:
                phase()
            except KeyboardInterrupt:
                if self.incumbent.best is None:
                    raise
                self.interrupted = True
        if self.incumbent.best is None:
            raise CapacityError(
                f"memory is {self.instances[0].memory_limit:g}; no schedule was found that fits it: "
                "give more memory or fewer chunks"
            )

    def _search(self) -> None:
        starts = self._paired_starts() if self.pairs else self._starts()
        self.merge_backwards()
        self._improve(starts)
        if self.budget.proof_end:
            self.merge_backwards()
            self._prove()

    def merge_backwards(self) -> None:
        """Merge I and W of the incumbent where that costs nothing, if pairs are searched over or `Costs.backward` is set."""
        best = self.incumbent.best
        if best is None or best is self._merged or (best.instance.costs.backward is None and not self.pairs):
            return
        instance, sequences = best.instance, best.sequences
        if instance.nodes > LARGEST_WALKED and not self.budget.in_time:
            return  # the tables of such an instance alone take seconds
        if sequences is None:
            sequences = sequences_of(instance, best.schedule, pairs=True)
        merged = merge_weight_grads(instance, sequences)
        evaluation = evaluate(instance, merged)
        if evaluation is not None and instance.fits(merged):
            self.incumbent.offer(evaluation.value, best.origin, instance, merged, replace=True)
        self._merged = self.incumbent.best

    def _merge_at_end(self) -> None:
        """Merge once more, unless the number of moves ended the search.

        A search with more moves passes the ends of turns, at which the incumbent was merged, but not this point: what is gained
        here it might not find, and more moves would be worse.
        """
        if self.interrupted or not self.budget.in_time or self.budget.used < self.budget.allowed:
            self.merge_backwards()

    def _starts(self) -> list[WarmStart]:
        """Return warm starts without pairs that fit the memory, the best first; the incumbent becomes the best schedule found."""
        starts: list[WarmStart] = []
        groups: dict[tuple[int, ...], list[Instance]] = {}
        for instance in self.instances:
            groups.setdefault(instance.placement, []).append(instance)
        for group in groups.values():
            self._family_starts(starts, group)
            if self._families_are_due():
                break
        for group in groups.values():
            if self.incumbent.proved:
                return []
            if not self.budget.in_time and self.incumbent.best is not None:
                break
            if group[0].nodes <= LARGEST_WALKED:
                self._list_scheduled_starts(starts, group)
            else:
                self._large_starts(group[0])
        return best_of(starts)

    def _family_starts(self, starts: list[WarmStart], group: list[Instance]) -> None:
        """Offer the families as they are, and add their sequences as warm starts, for every order of the micro-batches."""
        first = group[0]
        for schedule in self._families(first):
            self.incumbent.offer_fitting(first, schedule, schedule.name)
            if self._families_are_due():
                return
            if first.nodes <= LARGEST_WALKED:
                sequences = sequences_of(first, schedule)
                for instance in group:
                    self._start(starts, instance, sequences, schedule.name)

    def _families(self, instance: Instance) -> Iterator[Schedule]:
        sizes = instance.placement, instance.microbatches
        yield from (schedule for schedule in self.given if schedule.placement == instance.placement)
        only = (*CHEAP, *PAIRED * self.pairs) if instance.nodes > LARGEST_WALKED else ()
        yield from family_schedules(*sizes, instance.costs, instance.memory_limit, only)
        if instance.costs.uneven:  # families made for a memory limit assume equal micro-batches
            yield from family_schedules(*sizes, instance.even.costs, instance.memory_limit, only)

    def _list_scheduled_starts(self, starts: list[WarmStart], group: list[Instance]) -> None:
        for count, seed in enumerate(chain(interleaved_rounds(group[0]), list_scheduled(group[0]))):
            if count >= FEWEST_STARTS and self._starts_are_due():
                return
            for instance in group:
                self._start(starts, instance, *seed)

    def _large_starts(self, instance: Instance) -> None:
        """For large sizes: offer schedules of some of the micro-batches, with a stretch repeated for the others."""
        if self.incumbent.best is None:
            for start in modulo_starts(instance):
                self._start([], instance, start.unrolled(instance), PERIODIC_ORIGIN)
                break
        if self._starts_are_due(LARGE_STARTS_SHARE):
            return
        best = math.inf
        for small, sequences, origin in reduced_instances(instance):
            evaluation = evaluate(small, sequences)
            if evaluation is not None and small.fits(sequences) and evaluation.value < best * small.microbatches:
                best = evaluation.value / small.microbatches
                self.seeds.setdefault(instance, []).append((evaluation.value, small, sequences))
                longer = repeat_period(small, sequences, instance)
                if longer is not None:
                    self._start([], instance, longer, f"{origin} of {small.microbatches} micro-batches, repeated")
            if self._starts_are_due(LARGE_STARTS_SHARE) or self.incumbent.proved:
                return

    def _starts_are_due(self, share: float = STARTS_SHARE) -> bool:
        """Return whether to end the construction of starts: this share of the time is spent, and there is an incumbent."""
        return self.incumbent.best is not None and self.budget.spent > share

    def _families_are_due(self) -> bool:
        """Return the same for families; at large sizes also without an incumbent, as a packed period is one soon."""
        return self._starts_are_due() or (self.instances[0].nodes > LARGEST_WALKED and self.budget.spent > STARTS_SHARE)

    def _start(self, starts: list[WarmStart], instance: Instance, sequences: Sequences, origin: str) -> None:
        """Add sequences to the warm starts and offer them, if they can run and fit the memory."""
        start = warm_start(instance, sequences, origin)
        if start is None:
            return
        starts.append(start)
        if instance.nodes <= LARGEST_WALKED and not self.pairs:
            self.seeds.setdefault(instance, []).append((start.value, instance, sequences))
        self.incumbent.offer(start.value, origin, instance, start.sequences)

    def _improve(self, starts: list[WarmStart]) -> None:
        """Improve the starts, search for a period, and restart, until the budget is spent or the bound reached."""
        instances = sorted(self.instances, key=lambda instance: self.incumbent.bounds[instance])
        searches = [] if self.pairs else instances
        periods = PeriodSearches(searches, self.seeds, self.budget, self.incumbent, self.random)
        if instances[0].nodes > LARGEST_WALKED:
            periods.run_alone(self.budget.allowed)
            return
        Portfolio(starts, instances, periods, self).run()

    def _prove(self) -> None:
        """Raise the bound of every placement by constraint programming, and offer the better sequences that the solver finds."""
        incumbent = self.incumbent
        assert incumbent.best is not None
        placement = incumbent.best.schedule.placement
        for instance in sorted(self.instances, key=lambda instance: instance.placement != placement):
            best, left = incumbent.best, self.budget.proof_end - time.monotonic()
            if (
                not incumbent.can_improve(instance)
                or left <= 0
                or instance.nodes > LARGEST_WALKED
                or pairs_gain(instance)
            ):
                continue  # the solver does not model pairs: where they gain, only bounds by formula hold
            same = instance.placement == best.schedule.placement and not best.schedule.has_pairs
            certificate = certify(instance, best.value, left, sequences_of(instance, best.schedule) if same else None)
            incumbent.bounds[instance] = max(incumbent.bounds[instance], certificate.bound)
            if certificate.sequences is not None:
                incumbent.offer(certificate.value, "constraint programming", instance, certificate.sequences)
                self.merge_backwards()
            incumbent.report()

    def _paired_starts(self) -> list[WarmStart]:
        """Return warm starts with pairs that fit the memory, the best first; the incumbent becomes the best schedule found."""
        starts: list[WarmStart] = []
        seeds: list[tuple[float, int, Instance, Sequences, str]] = []
        for instance in sorted(self.instances, key=lambda instance: self.incumbent.bounds[instance]):
            if not self.incumbent.can_improve(instance) or self._starts_are_due(PAIR_STARTS_SHARE):
                break
            for schedule in self._schedules(instance):
                if instance.nodes > LARGEST_WALKED and self._starts_are_due(PAIR_STARTS_SHARE):
                    break  # the tables of such an instance alone take seconds
                first = len(starts)
                sequences = sequences_of(instance, schedule, pairs=True)
                self._start(starts, instance, sequences, schedule.name)
                self._paired(starts, instance, sequences, schedule.name, FIRST_RULES)
                value = min((start.value for start in starts[first:]), default=math.inf)
                seeds.append((value, len(seeds), instance, sequences, schedule.name))
                if self._starts_are_due(PAIR_STARTS_SHARE) or self.incumbent.proved:
                    break
        for _, _, instance, sequences, origin in sorted(seeds, key=lambda seed: seed[:2])[:STARTS_WITH_ALL_RULES]:
            if self._starts_are_due(PAIR_STARTS_SHARE) or self.incumbent.proved:
                break
            self._paired(starts, instance, sequences, origin, OTHER_RULES)
        return best_of(starts)

    def _paired(
        self,
        starts: list[WarmStart],
        instance: Instance,
        sequences: Sequences,
        origin: str,
        rules: Sequence[PairingRule],
    ) -> None:
        """Add the sequences with pairs formed by each rule to the warm starts."""
        for rule in rules:
            paired = with_pairs(instance, sequences, rule)
            if paired is not None:
                self._start(starts, instance, paired, origin)

    def _schedules(self, instance: Instance) -> Iterator[Schedule]:
        """Yield every one-route family on the placement, including those that exceed the memory, and the best list schedules."""
        for schedule in self._families(instance):
            self.incumbent.offer_fitting(instance, schedule, schedule.name)
            yield schedule
        if instance.nodes > LARGEST_WALKED or not self.incumbent.can_improve(instance):
            return
        listed = []
        for at, (sequences, origin) in enumerate(list_scheduled(instance)):
            evaluation = evaluate(instance, sequences)
            if evaluation is not None:
                listed.append((evaluation.value, at, instance.schedule_of(sequences, origin)))
            if self._starts_are_due(PAIR_STARTS_SHARE):
                break
        for _, _, schedule in sorted(listed, key=lambda one: one[:2])[:LIST_SCHEDULES]:
            yield schedule


def best_of(starts: list[WarmStart]) -> list[WarmStart]:
    """Return the starts sorted by value; of those of one instance with equal values, only the first."""
    best: dict[tuple[float, tuple[int, ...], tuple[int, ...]], WarmStart] = {}
    for start in starts:
        best.setdefault((round(start.value, 9), start.instance.placement, start.instance.order), start)
    return sorted(best.values(), key=lambda start: start.value)


# Lengths of turns and number of walks.
# Walks that a round begins with: more of them find more basins, and get fewer moves each.
WALKS = 4
# Moves of each walk's turn at the beginning of the first round, and of the longest rounds, per node of the instance.
FIRST_TURN = 0.125
LONGEST_TURN = 2.0
# The least moves per node from which on restarts from serial sequences take part: with fewer they stay far behind.
RESTART_TURN = 0.5
# Most operations evaluated in the first turn: large instances get fewer moves.
TURN_WORK = 250_000
# Turns of a round's length that the best walk so far gets after each round.
BEST_TURNS = 4
# Turns of a round's length in a round: of four, then of two twice and one four times as long, and of the best.
ROUND_TURNS = 16


@dataclass
class WarmStart:
    """Sequences to improve.

    Attributes:
        value: the best value so far.
        origin: the family or the rule that constructed them.
        search: the tabu search that improves them; None before its first turn.
    """

    value: float
    instance: Instance
    sequences: Sequences
    origin: str
    search: TabuSearch | None = None

    def tabu(self, random: Random, pairs: bool = False) -> TabuSearch:
        """Return the tabu search that improves these sequences."""
        if self.search is None:
            alone = WITH_WHOLE if self.instance.table.saved else WITHOUT_PAIRS
            self.search = TabuSearch(self.instance, self.sequences, random, WITH_PAIRS if pairs else alone)
        return self.search


class Portfolio:
    """The walks of one search.

    Args:
        waiting: warm starts that have not run, the best first; they take part in the first rounds.
        instances: those that restarts take turns in.
        periods: searches for a period, which run between the turns.
        driver: the search. Its incumbent is merged after every turn that is made in full, whatever the budget: what that gains,
            more moves gain too.

    Attributes:
        best: the best walk so far.
        restarts: walks from serial sequences so far.
    """

    def __init__(
        self, waiting: list[WarmStart], instances: Sequence[Instance], periods: PeriodSearches, driver: SearchDriver
    ) -> None:
        self.waiting, self.instances, self.periods, self.driver = waiting, instances, periods, driver
        self.budget, self.incumbent = driver.budget, driver.incumbent
        self.best: WarmStart | None = None
        self.restarts = 0

    @property
    def over(self) -> bool:
        return self.budget.over or self.incumbent.proved

    def run(self) -> None:
        """Run rounds until the budget is spent or the bound reached."""
        nodes = self.instances[0].nodes
        turn = max(1, int(min(FIRST_TURN * nodes, TURN_WORK / nodes)))
        longest = max(turn, int(LONGEST_TURN * nodes))
        while not self.over:
            self._round(turn)
            turn = min(2 * turn, longest)
            self.periods.drop_worst()

    def _round(self, turn: int) -> None:
        self.periods.advance(ROUND_TURNS * turn)
        walks, length = self._entrants(turn), turn
        while walks:
            for walk in walks:
                self._walk(walk, length)
            walks.sort(key=lambda walk: walk.value)
            if self.best is None or walks[0].value < self.best.value:
                self.best = walks[0]
            walks, length = walks[: len(walks) // 2], 2 * length
        if self.best is not None:
            self._walk(self.best, BEST_TURNS * turn)

    def _entrants(self, turn: int) -> list[WarmStart]:
        """Return warm starts that have not run, and serial sequences if the turns are long enough to improve those."""
        better = (warm_start(*solution, PERIODIC_ORIGIN) for solution in self.periods.improved())
        self.waiting = [start for start in better if start is not None] + self.waiting
        self.waiting = [start for start in self.waiting if self.incumbent.can_improve(start.instance)]
        entrants = self.waiting[:WALKS]
        del self.waiting[:WALKS]
        open_ = [instance for instance in self.instances if self.incumbent.can_improve(instance)]
        while len(entrants) < WALKS and open_ and turn >= RESTART_TURN * open_[0].nodes:
            entrants.append(serial_start(open_[self.restarts % len(open_)]))
            self.restarts += 1
        return entrants

    def _walk(self, start: WarmStart, moves: int) -> None:
        budget, before = self.budget, self.budget.used
        whole, moves = moves, min(moves, budget.allowed - before)
        if moves <= 0 or self.over or not self.incumbent.can_improve(start.instance):
            return

        def carry_on(sequences: Sequences, value: float, done: int) -> bool:
            budget.used = before + done
            if not self.incumbent.improves(value):
                self.incumbent.report()
            else:
                self.incumbent.offer(value, start.origin, start.instance, sequences)
            return budget.in_time

        search = start.tabu(self.driver.random, self.driver.pairs)
        search.walk(moves, self.incumbent.bounds[start.instance], carry_on)
        start.value = search.value
        if moves == whole:
            self.driver.merge_backwards()


def warm_start(instance: Instance, sequences: Sequences, origin: str) -> WarmStart | None:
    """Return a start with these sequences, all I and W in one B if that is no longer; None if they have a cycle or do not fit."""
    if instance.table.saved:
        sequences = merge_weight_grads(instance, sequences, work=1)
    evaluation = evaluate(instance, sequences)
    if evaluation is None or not instance.fits(sequences):
        return None
    return WarmStart(evaluation.value, instance, sequences, origin)


def serial_start(instance: Instance) -> WarmStart:
    """Return the sequences that run one micro-batch after the other. They fit whenever any do, and lead to every other order."""
    stages, m, stride = instance.stages, instance.microbatches, instance.table.stride
    sequences: Sequences = [[] for _ in range(instance.ranks)]
    for microbatch in range(m):
        for stage, rank in enumerate(instance.placement):
            sequences[rank].append(stage * m + microbatch)
        for stage in reversed(range(stages)):
            node = stride + stage * m + microbatch
            sequences[instance.placement[stage]] += [node, node + stride]
    return WarmStart(float("inf"), instance, sequences, "restart")
