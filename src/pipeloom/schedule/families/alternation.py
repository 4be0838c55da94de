"""One forward and one input gradient in turn on every rank, with the weight gradients where they cost least.

The rule of the zero-bubble paper (arXiv 2401.10241, section 3.1), for one stage per rank: fill the time before the first
backward with forwards; then, round by round, one F and one I on each rank. A weight gradient is computed in a wait that is long
enough for it, in a shorter one if waiting would make this rank the one with the most idle time, and wherever memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs, StageCosts
from pipeloom.schedule.families.greedy import Planned


@dataclass(frozen=True)
class RoundRules:
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


class Alternation:
    """Construction of all ranks' programs, round by round."""

    def __init__(self, ranks: int, microbatches: int, costs: Costs, memory_limit: float, rules: RoundRules) -> None:
        self.microbatches, self.costs, self.memory_limit, self.rules = microbatches, costs, memory_limit + 1e-9, rules
        spread = StageCosts.of(costs, ranks)
        self.time: dict[KindName, tuple[float, ...]] = {
            "F": spread.forward,
            "I": spread.input_grad,
            "W": spread.weight_grad,
        }
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
