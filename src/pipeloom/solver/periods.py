"""The searches for one period of a search's instances, run in slices between the turns of its walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.solver.budget import Budget
from pipeloom.solver.cyclic.search import PeriodSearch
from pipeloom.solver.incumbent import Incumbent
from pipeloom.solver.instance import Instance, Sequences

PERIODIC_ORIGIN = "one period"


@dataclass(frozen=True)
class PeriodShareParameters:
    """Share of the effort for the search for a period."""

    # Operations evaluated, as a share of those that the walks evaluate, and the m / p from which on it is all of that share.
    # A shorter period gains about m / p times; a pipeline that is rarely full depends on its warm-up and cool-down instead.
    share: float = 0.5
    full_pipeline: float = 4.0
    # A placement is dropped when its best period is worse than the incumbent by this factor.
    hopeless: float = 1.03
    # Turns into which the effort is divided where the instances are too large for walks.
    turns_alone: int = 16
    # Sequences per placement whose periods are annealed: more diversify, fewer get more moves.
    seeds: int = 6


PERIOD_SHARE = PeriodShareParameters()


class PeriodSearches:
    """One `PeriodSearch` for each instance, which take turns.

    Args:
        seeds: instance -> (value, instance, sequences), in which a period that can be repeated is looked for.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        seeds: Mapping[Instance, list[tuple[float, Instance, Sequences]]],
        budget: Budget,
        incumbent: Incumbent,
        random: Random,
    ) -> None:
        self.budget, self.incumbent = budget, incumbent
        self.running = [
            PeriodSearch(instance, random, distinct_seeds(seeds.get(instance, ())))
            for instance in instances
            if incumbent.can_improve(instance)
        ]
        self._given: dict[Instance, float] = {}

    def advance(self, moves: int) -> None:
        """Divide the work that goes with this number of moves among the searches."""
        for search in self.running:
            if self.incumbent.proved or not self.budget.in_time:
                return
            full = search.instance.microbatches / (PERIOD_SHARE.full_pipeline * search.instance.ranks)
            work = moves * PERIOD_SHARE.share * min(1.0, full) * search.instance.nodes
            self._advance(search, search.work + work / len(self.running))

    def _advance(self, search: PeriodSearch, until: float) -> None:
        def carry_on() -> bool:
            if search.best is not None and self.incumbent.improves(search.value):
                self.incumbent.offer(search.value, PERIODIC_ORIGIN, search.instance, search.best)
            self.incumbent.report()
            return search.work < until and self.budget.in_time

        search.run(carry_on)

    def run_alone(self, moves: int) -> None:
        """Search for as long as this number of moves would give time for, where the instances are too large for moves."""
        turn = max(1, moves // PERIOD_SHARE.turns_alone)
        for _ in range(0, moves, turn):
            if not self.running or self.incumbent.proved or not self.budget.in_time:
                return
            self.advance(turn)
            self.drop_worst()

    def improved(self) -> list[tuple[Instance, Sequences]]:
        """Return the best sequences of each search that are better than those returned before."""
        better = [search for search in self.running if search.value < self._given.get(search.instance, float("inf"))]
        self._given.update((search.instance, search.value) for search in better)
        return [(search.instance, search.best) for search in better if search.best is not None]

    def drop_worst(self) -> None:
        """Drop the worst search, unless it is the only one, and all that cannot improve on the incumbent."""
        best = sorted(self.running, key=lambda search: search.value)[: max(1, len(self.running) - 1)]
        most = PERIOD_SHARE.hopeless * self.incumbent.value
        self.running = [
            search for search in best if self.incumbent.can_improve(search.instance) and search.value < most
        ]


def distinct_seeds(seeds: Sequence[tuple[float, Instance, Sequences]]) -> list[tuple[Instance, Sequences]]:
    """Return the best sequences to look for periods in; of equal values only the first."""
    by_value: dict[float, tuple[Instance, Sequences]] = {}
    for value, small, sequences in sorted(seeds, key=lambda seed: seed[0]):
        by_value.setdefault(round(value, 9), (small, sequences))
    return list(by_value.values())[: PERIOD_SHARE.seeds]
