"""ZB-V (Qi et al., arXiv 2401.10241, section 6), V-Half and V-Min (Qi et al., arXiv 2405.15362): split backwards on a V.

The best order of the families' building blocks for given costs, and for ZB-V a construction round by round, by the rule of the
zero-bubble paper for two stages per rank: fill the time before the first backward with forwards, as memory allows; then, round
by round, one I and one F on each rank, of the half of the V that comes second as soon as its input is known, else of the other.
A weight gradient fills a wait that is long enough, a shorter one if waiting would make this rank the one with the most idle time,
and runs wherever memory is short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from pipeloom.limits import MOST_PLANNED_CELLS
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.families.construct.building_block import BuildingBlock, repeated_programs, sequences_of_block
from pipeloom.schedule.families.construct.layout import Planned, encoded, family, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import (
    MemoryDeadlock,
    PriorityRule,
    programs_along,
    programs_of,
    single_route,
)
from pipeloom.schedule.families.construct.rounds import RoundConstruction
from pipeloom.schedule.families.construct.steady import plan
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee
from pipeloom.schedule.timeline import Objective

FIT_SHARES = (0.5, 0.75, 1.0)
SHY = 1.05  # A W planned 5 % too long, with hops 10 % too long, is not placed in gaps that it would only just fit.
# Largest p m, of the micro-batches planned, for which every rule is tried; above it, those of the first block that fits.
MOST_CELLS_WITH_ALL_RULES = 1_500

Programs = list[list[Planned]]
DOWN, UP = 0, 1  # the half of the V that runs from rank 0 to the last, and the half that runs back


@family("zbv", "zbvzerobubble", placement="vee", baseline=True, order=90)
def zbv(ranks: int, microbatches: int, costs: Costs | None = None, objective: Objective = "makespan") -> Schedule:
    """Stages r and 2p-1-r on rank r, B split: zero bubble inside every span at f = b = w for m >= 2p-1.

    Makespan bubble at unit costs: p-1 in stage units, (p-1)/2 in full-rank units. Peak activations: 2p of a stage at most, as
    much as 1F1B's p on rank 0. Any m >= 1.

    Args:
        costs: the costs that the schedule is planned for; default 1, 1, 1, 0.
        objective: "makespan", for a step that ends in a barrier, or "span", the largest span of a rank, for one that does not.

    Raises:
        UsageError: another objective.
    """
    blocks = [BuildingBlock((3, 3, 3, 3), (0, 0, 0)), BuildingBlock((3, 3, 3, 3), (1, 0, 0))]
    options = {} if objective == "makespan" else {"objective": objective}
    return _v_schedule("zbv", (ranks, microbatches), costs, blocks, 2 * ranks, objective, rounds=True, options=options)


@family("v-half", placement="vee", baseline=True, order=100)
def v_half(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Half of 1F1B's activations on a V placement, for a larger bubble.

    Makespan bubble at unit costs, even p >= 4 and m = 3p: (3p-7)/2 in full-rank units (a fit). Peak activations: p+2 of a
    stage at most for even p, (p+2)/2 full-rank, and p+1 for odd p. Any m >= 1. `costs` place the weight gradients; default
    1, 1, 1, 0.
    """
    blocks = [BuildingBlock((2, 1, 2, 1), turns) for turns in ((0, 3, 1), (1, 3, 0), (0, 1, 0), (0, 0, 1))]
    return _v_schedule("v-half", (ranks, microbatches), costs, blocks, 2 * (ranks // 2) + 2)


@family("v-min", placement="vee", baseline=True, order=110)
def v_min(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """A third of 1F1B's activations on a V placement, for a bubble that can exceed 1F1B's.

    Makespan bubble at unit costs, even p and m = 3p, in full-rank units: at most 2p-2.5 (2p-3.5 when 6 divides p;
    a fit, tested for p up to 16). Peak activations: 2 floor((p+4)/3) of a stage at most. Any m >= 1. `costs` place the
    weight gradients; default 1, 1, 1, 0.
    """
    blocks = [BuildingBlock((1, 1, 1, 1), turns) for turns in ((0, 0, 0), (0, 2, 0), (0, 4, 0))]
    return _v_schedule("v-min", (ranks, microbatches), costs, blocks, 2 * ((ranks + 4) // 3))


def _v_schedule(
    name: str,
    sizes: tuple[int, int],
    costs: Costs | None,
    blocks: Sequence[BuildingBlock],
    memory_limit: int,
    objective: Objective = "makespan",
    rounds: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The shortest schedule of `sizes` (p, m) at these costs with at most `memory_limit` stage-micro-batches on a rank.

    The building blocks give the order of F and I; the weight gradients are placed for the costs, in several ways. With `rounds`
    the programs of `_round_programs` are candidates too, where p m is at most `MOST_CELLS_WITH_ALL_RULES`.
    """
    ranks, microbatches = sizes
    require_sizes(MOST_PLANNED_CELLS, ranks=ranks, microbatches=microbatches)
    cost_model = costs if costs is not None else Costs()

    def candidates(planned: int) -> Iterator[Schedule]:
        for programs in _programs((ranks, planned), cost_model, blocks, memory_limit, rounds):
            codes = encoded(programs, 2 * ranks, planned)
            yield Schedule.of(codes, placement=vee(ranks), microbatches=planned, name=name, options=options)

    return plan(sizes, cost_model, objective, candidates)


def _programs(
    sizes: tuple[int, int], costs: Costs, blocks: Sequence[BuildingBlock], memory_limit: int, rounds: bool
) -> Iterator[Programs]:
    """Programs, rank -> (kind, stage, micro-batch), by every rule."""
    ranks, microbatches = sizes
    placement = vee(ranks)
    counted = replace(costs, activation=1.0, held=1.0)
    many = ranks * microbatches > MOST_CELLS_WITH_ALL_RULES
    plans = list(dict.fromkeys(_plans(counted)))[: 1 if many else None]
    fitting = False
    for block in blocks:
        if many and fitting:
            break
        repeated = repeated_programs(block, placement, microbatches, memory_limit)
        yield from repeated[-1:]
        sequences = sequences_of_block(block, placement, microbatches, memory_limit)
        orders = [] if sequences is None else [(sequences, assumed) for assumed in plans]
        if not many:
            orders += [([_without_weights(program) for program in programs], counted) for programs in repeated]
        fitting = fitting or bool(orders or repeated)
        for (order, assumed), patience in product(orders, FIT_SHARES[:: 2 if many else 1]):
            with contextlib.suppress(MemoryDeadlock):
                yield programs_along(
                    single_route(placement, microbatches, assumed, [memory_limit] * ranks), order, patience
                )
    if not fitting or (costs != Costs() and not many):
        # One place is kept free for the second half of the V, without which the first could block it for ever.
        caps = [memory_limit - 1] * ranks + [memory_limit] * ranks
        problem = single_route(placement, microbatches, counted, [memory_limit] * ranks, caps)
        for turns in (True, False):
            yield programs_of(problem, PriorityRule(turns=turns))
    if rounds and not many:
        yield from _round_programs(ranks, microbatches, costs, memory_limit)


def _without_weights(program: list[Planned]) -> list[tuple[KindName, int]]:
    return [what[:2] for what in program if what[0] != "W"]


def _plans(costs: Costs) -> list[Costs]:
    """Costs to plan with: the true ones, ones with a margin (`SHY`), and unit ones."""
    weight, p2p = costs.weight_grad, costs.p2p
    longer = tuple(w * SHY for w in weight) if isinstance(weight, tuple) else weight * SHY
    slower = tuple(tuple(c * SHY**2 for c in row) for row in p2p) if isinstance(p2p, tuple) else p2p * SHY**2
    return [costs, replace(costs, weight_grad=longer, p2p=slower), Costs()]


def _round_programs(ranks: int, microbatches: int, costs: Costs, memory_limit: int) -> list[list[list[Planned]]]:
    """Complete programs, rank -> (kind, stage, micro-batch), at most `memory_limit` stage-micro-batches alive on a rank.

    One for each choice of whether a W that is longer than the wait may precede forwards, and the backwards of the half that
    gradients enter first. Each is constructed again, with the ranks' idle times of the construction before as allowances, as long
    as that shortens the largest idle time. Choices that the rule cannot complete are left out.
    """
    complete = []
    for before_backwards, before_forwards in product((True, False), repeat=2):
        allowed: list[float] | None = None
        while True:
            rounds = _Rounds(ranks, microbatches, costs, memory_limit, (before_backwards, before_forwards), allowed)
            try:
                rounds.run()
            except MemoryDeadlock:
                break
            if allowed is not None and max(rounds.idle) >= max(allowed) - TIME_TOLERANCE:
                break
            complete.append(rounds.programs)
            allowed = rounds.idle
    return complete


class _Rounds(RoundConstruction):
    def __init__(
        self,
        ranks: int,
        microbatches: int,
        costs: Costs,
        memory_limit: int,
        before: tuple[bool, bool],
        allowed: Sequence[float] | None,
    ) -> None:
        super().__init__(vee(ranks), microbatches, replace(costs, activation=1.0, held=1.0), memory_limit)
        self.before_backwards, self.before_forwards = before
        # The least idle time of the worst rank that each rank assumes: the slack that it had in the construction before.
        self.slack = [max(allowed) - idle for idle in allowed] if allowed is not None else [0.0] * ranks

    def run(self) -> None:
        """Construct all programs. Raises MemoryDeadlock."""
        self._warm_up()
        for _ in range(2 * self.microbatches):
            self._backwards()
            self._forwards()
        for at, pending in enumerate(self.pending):
            while pending:
                self.put_weight(at)

    def _stage(self, at: int, half: int) -> int:
        return at if half == DOWN else len(self.placement) - 1 - at

    def _done(self, kind: KindName, at: int, half: int) -> int:
        return self.done(kind, self._stage(at, half))

    def _arrival(self, kind: KindName, at: int, half: int) -> float | None:
        return self.arrival(kind, self._stage(at, half))

    def _ready(self, kind: KindName, at: int, half: int) -> int:
        """Return the number of `kind` of `half` whose input from this rank itself is computed."""
        if half == UP:
            return self._done("F", at, DOWN if kind == "F" else UP)
        return self.microbatches if kind == "F" else self._done("I", at, UP)

    def _put(self, kind: KindName, at: int, half: int) -> None:
        index, arrival = self._done(kind, at, half), self._arrival(kind, at, half)
        full = kind == "F" and self.memory[at] >= self.memory_limit
        if full or arrival is None or index >= min(self.microbatches, self._ready(kind, at, half)):
            raise MemoryDeadlock
        self.put(kind, self._stage(at, half))

    def _weight(self, at: int) -> None:
        if not self.pending[at]:
            raise MemoryDeadlock
        self.put_weight(at)

    def _warm_up(self) -> None:
        count, microbatches = len(self.idle), self.microbatches
        for at in range(count):
            self._put("F", at, DOWN)
        for at in reversed(range(count)):
            while at + 1 < count and self._done("F", at, DOWN) < microbatches:
                arrival = self._arrival("F", at, UP) or 0.0
                late = self.clock[at] + self.time["F"][at] > arrival
                if late or self.memory[at] + 2 * (at + 1) > self.memory_limit:
                    break
                for upstream in range(at + 1):
                    self._put("F", upstream, DOWN)
            self._put("F", at, UP)
        half = DOWN
        for at in range(1, count):
            while self._behind(at):
                runs = [rank for rank in reversed(range(at, count)) if self._done("F", rank, half) < microbatches]
                for rank_index in runs:
                    self._put("F", rank_index, half)
                half = 1 - half

    def _behind(self, at: int) -> bool:
        """Return whether rank `at` still lacks as many forwards as the rank before has run, with one more of the upper half."""
        here, before = ([self._done("F", rank, half) for half in (DOWN, UP)] for rank in (at, at - 1))
        return sum(here) < sum(before) or here[UP] <= before[UP] < self.microbatches

    def _backwards(self) -> None:
        halves = [self._next_backward(at) for at in range(len(self.idle))]
        for at in reversed(range(len(self.idle))):
            if halves[at] == DOWN:
                self._fill("I", at, DOWN, True)
                self._put("I", at, DOWN)
        for at in range(len(self.idle)):
            if halves[at] == UP:
                self._fill("I", at, UP, self.before_backwards)
                self._put("I", at, UP)

    def _next_backward(self, at: int) -> int:
        """Return DOWN where it lags behind UP and its gradient is known; else UP, the half that gradients enter first."""
        done = self._done("I", at, UP)
        if self._done("I", at, DOWN) >= done:
            return UP
        return DOWN if self._arrival("I", at, DOWN) is not None or done >= self.microbatches else UP

    def _forwards(self) -> None:
        for at in range(len(self.idle)):
            if self._done("F", at, UP) >= self.microbatches:
                continue
            half = self._next_forward(at)
            if half is None:
                continue
            while self.memory[at] >= self.memory_limit:
                self._weight(at)
            self._fill("F", at, half, self.before_forwards)
            self._put("F", at, half)

    def _next_forward(self, at: int) -> int | None:
        if self._done("F", at, UP) >= self._done("F", at, DOWN):
            return DOWN
        if at + 1 == len(self.idle) or self._arrival("F", at, UP) is not None:
            return UP
        if self._done("F", at, DOWN) < self.microbatches and self._arrival("F", at, DOWN) is not None:
            return DOWN
        return None

    def _fill(self, kind: KindName, at: int, half: int, short: bool) -> None:
        """Run weight gradients in the time until the next `kind` of `half` can start."""
        pending, arrival = self.pending[at], self._arrival(kind, at, half)
        if arrival is None:
            raise MemoryDeadlock
        while pending and arrival >= self.clock[at] + self.time["W"][pending[0]]:
            self.put_weight(at)
        worst = max(*self.idle, self.slack[at])
        if short and pending and arrival - self.clock[at] > worst - self.idle[at]:
            self.put_weight(at)
