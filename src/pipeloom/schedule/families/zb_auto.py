"""The automatic zero-bubble schedule (Qi et al., arXiv 2401.10241, section 3.1) from costs and a memory limit.

The rule, for one stage per rank: fill the time before the first backward with forwards; then, round by round, one F and one I on
each rank. A weight gradient is computed in a wait that is long enough for it, in a shorter one if waiting would make this rank
the one with the most idle time, and wherever memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from pipeloom.errors import CapacityError
from pipeloom.limits import MOST_PLANNED_CELLS, require_positive
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.schedule.families.construct.layout import Planned, encoded, family, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import PriorityRule, programs_of, single_route
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
        yield _Alternation(*sizes, costs, memory_limit, _RoundRules(*flags)).programs()
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


@dataclass
class _AlternatingRank:
    clock: float = 0.0
    memory: float = 0.0
    idle: float = 0.0
    done: dict[KindName, int] = field(default_factory=lambda: {"F": 0, "I": 0, "W": 0})
    ends: dict[KindName, list[float]] = field(default_factory=lambda: {"F": [], "I": [], "W": []})
    program: list[Planned] = field(default_factory=list)


class _Alternation:
    """Construction of all ranks' programs, round by round."""

    def __init__(self, ranks: int, microbatches: int, costs: Costs, memory_limit: float, rules: _RoundRules) -> None:
        self.microbatches, self.costs, self.memory_limit, self.rules = microbatches, costs, memory_limit + 1e-9, rules
        self.time = StageCosts(costs, ranks).by_letter("FIW")
        self.activation = costs.per_stage("activation", ranks)
        self.held = costs.per_stage("held", ranks)
        self.ranks = [_AlternatingRank() for _ in range(ranks)]

    def programs(self) -> list[list[Planned]]:
        """rank -> its (kind, stage, micro-batch), complete."""
        count = len(self.ranks)
        for at in range(count):
            self._put("F", at)
        self._warm_up()
        for mb in range(self.microbatches):
            if mb:
                for at in self._forwards_of_round():
                    self._ready_for("F", at)
                    self._put("F", at)
            for at in reversed(range(count)):
                if mb:
                    self._ready_for("I", at)
                self._put("I", at)
        for at, rank in enumerate(self.ranks):
            while rank.done["W"] < self.microbatches:
                self._put("W", at)
        return [rank.program for rank in self.ranks]

    def _put(self, kind: KindName, at: int) -> None:
        rank = self.ranks[at]
        start = max(rank.clock, self._arrival(kind, at))
        if rank.program:
            rank.idle += start - rank.clock
        rank.clock = start + self.time[kind][at]
        rank.ends[kind].append(rank.clock)
        rank.program.append((kind, at, rank.done[kind]))
        rank.done[kind] += 1
        share = {"F": 1.0, "I": self.held[at] - 1.0, "W": -self.held[at]}[kind]
        rank.memory += share * self.activation[at]

    def _arrival(self, kind: KindName, at: int) -> float:
        """Return the time at which the next `kind` of rank `at` has its input from its neighbour; 0 if it needs none."""
        origin = at - 1 if kind == "F" else at + 1
        if kind == "W" or not 0 <= origin < len(self.ranks):
            return 0.0
        return self.ranks[origin].ends[kind][self.ranks[at].done[kind]] + self.costs.hop(origin, at)

    def _warm_up(self) -> None:
        """Run forwards up to the first input gradient of each rank, as far as memory allows."""
        last = len(self.ranks) - 1
        first_grad = self.ranks[last].clock + self.time["I"][last]
        wanted = [0] * (last + 1)
        for at in reversed(range(last)):
            rank, arrival = self.ranks[at], first_grad + self.costs.hop(at + 1, at)
            clock, memory, step = rank.clock, rank.memory + self.activation[at], self.time["F"][at]
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
                self._put("F", at)

    def _forwards_of_round(self) -> list[int]:
        """The ranks that run a forward this round. A rank runs one only if all later ranks with forwards left do, too."""
        wanted = []
        for at in reversed(range(len(self.ranks))):
            rank = self.ranks[at]
            if rank.done["F"] == self.microbatches:
                continue
            alive = rank.done["F"] - rank.done["I"]
            if (alive + 1) * self.activation[at] > self.memory_limit or self._may_skip(at):
                break
            wanted.append(at)
        return wanted[::-1]

    def _may_skip(self, at: int) -> bool:
        """Return whether rank `at`, two forwards ahead, can leave one out without more idle time than the worst rank has."""
        if not self.rules.skip or at + 1 == len(self.ranks):
            return False
        rank, following = self.ranks[at], self.ranks[at + 1]
        if rank.done["F"] < following.done["F"] + 2:
            return False
        gradient = following.clock + self.time["F"][at + 1] + self.time["I"][at + 1] + self.costs.hop(at + 1, at)
        if rank.clock >= gradient:
            return True
        memory, first = rank.memory + self.activation[at], rank.clock + self.time["F"][at]
        pending = rank.done["I"] - rank.done["W"]
        while memory > self.memory_limit and pending:
            memory -= self.held[at] * self.activation[at]
            first += self.time["W"][at]
            pending -= 1
        return first > gradient and gradient - rank.clock <= self._worst_idle() - rank.idle

    def _worst_idle(self) -> float:
        return max(rank.idle for rank in self.ranks)

    def _ready_for(self, kind: KindName, at: int) -> None:
        """Run weight gradients before the next `kind`: first to free memory, then to fill the time until its input arrives."""
        rank, step = self.ranks[at], self.time["W"][at]
        need = self.activation[at] if kind == "F" else 0.0
        while rank.memory + need > self.memory_limit and rank.done["W"] < rank.done["I"]:
            self._put("W", at)
        arrival = self._arrival(kind, at)
        while rank.done["W"] < rank.done["I"] and rank.clock + step <= arrival:
            self._put("W", at)
        if rank.done["W"] < rank.done["I"] and rank.clock < arrival:
            more = arrival - rank.clock > self._worst_idle() - rank.idle
            if more or self.rules.eager:
                self._put("W", at)
        if kind == "I" and at == 0 and rank.done["F"] == self.microbatches:
            # Nothing waits for the first rank's input gradients: its weight gradients cannot come too early.
            while rank.done["W"] < rank.done["I"]:
                self._put("W", at)
