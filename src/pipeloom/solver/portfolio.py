"""A portfolio of walks that share one incumbent: warm starts first, then restarts from serial sequences.

Rounds follow one another as the instances and the seed determine, whatever the budget: a search with more moves or seconds
continues one with fewer, and is never worse. In a round, walks race: after each turn the better half continues, twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.solver.budget import Budget
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.incumbent import Incumbent
from pipeloom.solver.instance import Instance, Sequences
from pipeloom.solver.merge_backward import merge_weight_grads
from pipeloom.solver.periods import PERIODIC_ORIGIN, PeriodSearches
from pipeloom.solver.tabu import TabuParameters, TabuSearch


@dataclass(frozen=True)
class PortfolioParameters:
    """Lengths of turns and number of walks."""

    # Walks that a round begins with: more of them find more basins, and get fewer moves each.
    walks: int = 4
    # Moves of each walk's turn at the beginning of the first round, and of the longest rounds, per node of the instance.
    first_turn: float = 0.125
    longest_turn: float = 2.0
    # The least moves per node from which on restarts from serial sequences take part: with fewer they stay far behind.
    restart_turn: float = 0.5
    # Most operations evaluated in the first turn: large instances get fewer moves.
    turn_work: int = 250_000
    # Turns of a round's length that the best walk so far gets after each round.
    best_turns: int = 4
    # Turns of a round's length in a round: of four, then of two twice and one four times as long, and of the best.
    round_turns: int = 16


PORTFOLIO = PortfolioParameters()


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


class Portfolio:
    """The walks of one search.

    Args:
        starts: warm starts, the best first; they take part in the first rounds.
        instances: those that restarts take turns in.
        periods: searches for a period, which run between the turns.
        parameters: instance -> parameters of its tabu search.
    """

    def __init__(
        self,
        starts: Sequence[WarmStart],
        instances: Sequence[Instance],
        budget: Budget,
        incumbent: Incumbent,
        random: Random,
        periods: PeriodSearches,
        parameters: Callable[[Instance], TabuParameters],
    ) -> None:
        self.waiting, self.instances = list(starts), instances
        self.budget, self.incumbent, self.random = budget, incumbent, random
        self._parameters, self.periods = parameters, periods
        self.best: WarmStart | None = None
        self._restarts = 0

    @property
    def over(self) -> bool:
        return self.budget.over or self.incumbent.proved

    def run(self) -> None:
        """Run rounds until the budget is spent or the bound reached."""
        nodes = self.instances[0].nodes
        turn = max(1, int(min(PORTFOLIO.first_turn * nodes, PORTFOLIO.turn_work / nodes)))
        longest = max(turn, int(PORTFOLIO.longest_turn * nodes))
        while not self.over:
            self._round(turn)
            turn = min(2 * turn, longest)
            self.periods.drop_worst()

    def _round(self, turn: int) -> None:
        self.periods.advance(PORTFOLIO.round_turns * turn)
        walks, length = self._entrants(turn), turn
        while walks:
            for walk in walks:
                self._walk(walk, length)
            walks.sort(key=lambda walk: walk.value)
            if self.best is None or walks[0].value < self.best.value:
                self.best = walks[0]
            walks, length = walks[: len(walks) // 2], 2 * length
        if self.best is not None:
            self._walk(self.best, PORTFOLIO.best_turns * turn)

    def _entrants(self, turn: int) -> list[WarmStart]:
        """Return warm starts that have not run, and serial sequences if the turns are long enough to improve those."""
        better = (warm_start(*solution, PERIODIC_ORIGIN) for solution in self.periods.improved())
        self.waiting = [start for start in better if start is not None] + self.waiting
        self.waiting = [start for start in self.waiting if self.incumbent.can_improve(start.instance)]
        entrants = self.waiting[: PORTFOLIO.walks]
        del self.waiting[: PORTFOLIO.walks]
        open_ = [instance for instance in self.instances if self.incumbent.can_improve(instance)]
        while len(entrants) < PORTFOLIO.walks and open_ and turn >= PORTFOLIO.restart_turn * open_[0].nodes:
            entrants.append(serial_start(open_[self._restarts % len(open_)]))
            self._restarts += 1
        return entrants

    def _walk(self, start: WarmStart, moves: int) -> None:
        budget, before = self.budget, self.budget.used
        moves = min(moves, budget.allowed - before)
        if moves <= 0 or self.over or not self.incumbent.can_improve(start.instance):
            return

        def carry_on(sequences: Sequences, value: float, done: int) -> bool:
            budget.used = before + done
            if not self.incumbent.improves(value):
                self.incumbent.report()
            else:
                self.incumbent.offer(value, start.origin, start.instance, sequences)
            return budget.in_time

        if start.search is None:
            start.search = TabuSearch(start.instance, start.sequences, self.random, self._parameters(start.instance))
        start.search.walk(moves, self.incumbent.bounds[start.instance], carry_on)
        start.value = start.search.value


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
