"""The automatic zero-bubble schedule (Qi et al., arXiv 2401.10241, section 3.1) from costs and a memory limit.

The rule, for one stage per rank: fill the time before the first backward with forwards; then, round by round, one F and one I on
each rank. A weight gradient is computed in a wait that is long enough for it, in a shorter one if waiting would make this rank
the one with the most idle time, and wherever memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from pipeloom.errors import CapacityError
from pipeloom.limits import MOST_PLANNED_CELLS, require_positive
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.families.construct.layout import Planned, encoded, family, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import PriorityRule, programs_of, single_route
from pipeloom.schedule.families.construct.rounds import RoundConstruction
from pipeloom.schedule.families.construct.steady import plan
from pipeloom.schedule.families.zb_h import zb_h1, zb_h2
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Objective


@family("zb-auto", placement="linear", order=70)
def zb_auto(
    ranks: int,
    microbatches: int,
    memory: float | None = None,
    costs: Costs | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """The best variant of the paper's heuristic that fits `memory`; never longer than zb-h1 and zb-h2 where they fit it.

    One stage per rank. As many forwards as fit before the first backward, then one forward and one input gradient in turn;
    weight gradients fill gaps and make room. Below the default memory, plain list scheduling is tried too: the rule collapses
    below 1F1B's. Any m >= 1.

    Args:
        memory: the largest peak memory of a rank, in the units of `Costs.activation`; from I until W only the share `Costs.held`
            counts. Default: 2p times the largest activation.
        costs: default 1, 1, 1, 0.
        objective: "makespan", for a step that ends in a barrier, or "span", the largest span of a rank, for one that does not.

    Raises:
        CapacityError: the memory does not hold one micro-batch.
        UsageError: another objective, or a memory that is not a number above 0.
    """
    require_sizes(MOST_PLANNED_CELLS, ranks=ranks, microbatches=microbatches)
    cost_model = costs if costs is not None else Costs()
    cost_model.check_links(ranks)
    largest = max(cost_model.per_stage("activation", ranks))
    memory_limit = 2 * ranks * largest if memory is None else memory
    if memory is not None:
        require_positive("memory", memory)
    if memory_limit < largest:
        raise CapacityError(f"memory is {memory:g}; one micro-batch's activations take {largest:g}")
    options: dict[str, object] = {} if memory is None else {"memory": memory}
    options |= {} if objective == "makespan" else {"objective": objective}

    def candidates(planned: int) -> Iterator[Schedule]:
        for programs in _programs((ranks, planned), cost_model, memory_limit):
            codes = encoded(programs, ranks, planned)
            yield Schedule.of(codes, placement=range(ranks), microbatches=planned, name="zb-auto", options=options)
        for schedule in (zb_h1(ranks, planned), zb_h2(ranks, planned)):
            peak = max(simulate(schedule, replace(cost_model, microbatch=())).peak_memory)
            if peak <= memory_limit + TIME_TOLERANCE:
                yield replace(schedule, name="zb-auto", options=tuple(sorted(options.items())))

    return plan((ranks, microbatches), cost_model, objective, candidates)


def _programs(sizes: tuple[int, int], costs: Costs, memory_limit: float) -> Iterator[list[list[Planned]]]:
    """Programs by the paper's rule with all its choices, and where memory is short, of list scheduling."""
    ranks, _ = sizes
    for flags in sorted(set(product((True, False), repeat=3))):
        yield _Alternation(*sizes, costs, memory_limit, _RoundRules(*flags)).run()
    if memory_limit < 2 * ranks * max(costs.per_stage("activation", ranks)):
        problem = single_route(range(ranks), sizes[1], costs, [memory_limit] * ranks)
        for share in (0.0, 1.0):
            yield programs_of(problem, PriorityRule(patience=share))


@dataclass(frozen=True)
class _RoundRules:
    """Choices that the rule leaves open; the family tries all combinations.

    Attributes:
        overrun: a warm-up forward may end after the first backward could have started.
        skip: a rank that is two forwards ahead of the next one may leave a round's forward out.
        eager: a weight gradient is computed in a short wait even if another rank has more idle time.
    """

    overrun: bool
    skip: bool
    eager: bool


class _Alternation(RoundConstruction):
    """Construction of all ranks' programs, round by round."""

    def __init__(self, ranks: int, microbatches: int, costs: Costs, memory_limit: float, rules: _RoundRules) -> None:
        super().__init__(range(ranks), microbatches, costs, memory_limit + 1e-9)
        self.rules = rules

    def run(self) -> list[list[Planned]]:
        """rank -> its (kind, stage, micro-batch), complete."""
        count = len(self.placement)
        for at in range(count):
            self.put("F", at)
        self._warm_up()
        for mb in range(self.microbatches):
            if mb:
                for at in self._forwards_of_round():
                    self._ready_for("F", at)
                    self.put("F", at)
            for at in reversed(range(count)):
                if mb:
                    self._ready_for("I", at)
                self.put("I", at)
        for at, pending in enumerate(self.pending):
            while pending:
                self.put_weight(at)
        return self.programs

    def _warm_up(self) -> None:
        """Run forwards up to the first input gradient of each rank, as far as memory allows."""
        last = len(self.placement) - 1
        first_grad = self.clock[last] + self.time["I"][last]
        wanted = [0] * (last + 1)
        for at in reversed(range(last)):
            arrival, step = first_grad + self.costs.hop(at + 1, at), self.time["F"][at]
            clock, memory = self.clock[at], self.memory[at] + self.activation[at]
            while wanted[at] + 1 < self.microbatches and memory <= self.memory_limit:
                if clock >= arrival or (not self.rules.overrun and clock + step > arrival):
                    break
                wanted[at] += 1
                clock, memory = clock + step, memory + self.activation[at]
            first_grad = max(clock, arrival) + self.time["I"][at]
        for at in range(1, last + 1):
            # In the rounds a rank needs a predecessor that is one forward ahead of it; where the warm-up of both holds all
            # forwards, no forward is left for the rounds.
            behind = (
                min(wanted[at - 1], self.microbatches - 1)
                if wanted[at] + 1 == self.microbatches
                else wanted[at - 1] - 1
            )
            wanted[at] = min(wanted[at], max(0, behind))
        for at, count in enumerate(wanted):
            for _ in range(count):
                self.put("F", at)

    def _forwards_of_round(self) -> list[int]:
        """The ranks that run a forward this round. A rank runs one only if all later ranks with forwards left do, too."""
        wanted = []
        for at in reversed(range(len(self.placement))):
            if self.done("F", at) == self.microbatches:
                continue
            alive = self.done("F", at) - self.done("I", at)
            if (alive + 1) * self.activation[at] > self.memory_limit or self._may_skip(at):
                break
            wanted.append(at)
        return wanted[::-1]

    def _may_skip(self, at: int) -> bool:
        """Return whether rank `at`, two forwards ahead, can leave one out without more idle time than the worst rank has."""
        if not self.rules.skip or at + 1 == len(self.placement) or self.done("F", at) < self.done("F", at + 1) + 2:
            return False
        gradient = self.clock[at + 1] + self.time["F"][at + 1] + self.time["I"][at + 1] + self.costs.hop(at + 1, at)
        if self.clock[at] >= gradient:
            return True
        memory, first = self.memory[at] + self.activation[at], self.clock[at] + self.time["F"][at]
        pending = len(self.pending[at])
        while memory > self.memory_limit and pending:
            memory -= self.held[at] * self.activation[at]
            first += self.time["W"][at]
            pending -= 1
        return first > gradient and gradient - self.clock[at] <= max(self.idle) - self.idle[at]

    def _ready_for(self, kind: KindName, at: int) -> None:
        """Run weight gradients before the next `kind`: first to free memory, then to fill the time until its input arrives."""
        pending, step = self.pending[at], self.time["W"][at]
        need = self.activation[at] if kind == "F" else 0.0
        while self.memory[at] + need > self.memory_limit and pending:
            self.put_weight(at)
        arrival = self.arrival(kind, at) or 0.0
        while pending and self.clock[at] + step <= arrival:
            self.put_weight(at)
        if pending and self.clock[at] < arrival:
            more = arrival - self.clock[at] > max(self.idle) - self.idle[at]
            if more or self.rules.eager:
                self.put_weight(at)
        if kind == "I" and at == 0 and self.done("F", at) == self.microbatches:
            # Nothing waits for the first rank's input gradients: its weight gradients cannot come too early.
            while pending:
                self.put_weight(at)
