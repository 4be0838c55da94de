"""One backward and one forward per round on every rank of a V placement, with the weight gradients where they cost least.

The rule of the zero-bubble paper (arXiv 2401.10241, section 6) for two stages per rank: fill the time before the first backward
with forwards, as memory allows; then, round by round, one I and one F on each rank, of the half of the V that comes second as
soon as its input is known, else of the other. A weight gradient fills a wait that is long enough, a shorter one if waiting
would make this rank the one with the most idle time, and runs wherever memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.schedule.families.greedy import MemoryDeadlock, Planned

DOWN, UP = 0, 1  # the half of the V that runs from rank 0 to the last, and the half that runs back


@dataclass
class _RoundsRank:
    stages: tuple[int, int]
    clock: float = 0.0
    alive: int = 0
    idle: float = 0.0
    pending: deque[Planned] = field(default_factory=deque)
    program: list[Planned] = field(default_factory=list)


def round_programs(ranks: int, microbatches: int, costs: Costs, memory_limit: int) -> list[list[list[Planned]]]:
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
            idle = [rank.idle for rank in rounds.ranks]
            if allowed is not None and max(idle) >= max(allowed) - TIME_TOLERANCE:
                break
            complete.append([rank.program for rank in rounds.ranks])
            allowed = idle
    return complete


class _Rounds:
    def __init__(
        self,
        ranks: int,
        microbatches: int,
        costs: Costs,
        memory_limit: int,
        before: tuple[bool, bool],
        allowed: Sequence[float] | None,
    ) -> None:
        self.microbatches, self.costs, self.memory_limit = microbatches, costs, memory_limit
        self.before_backwards, self.before_forwards = before
        spread = StageCosts.of(costs, 2 * ranks)
        self.time = {"F": spread.forward, "I": spread.input_grad, "W": spread.weight_grad}
        self.ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(2 * ranks)] for kind in ("F", "I")}
        self.ranks = [_RoundsRank((rank, 2 * ranks - 1 - rank)) for rank in range(ranks)]
        # The least idle time of the worst rank that each rank assumes: the slack that it had in the construction before.
        self.slack = [max(allowed) - idle for idle in allowed] if allowed is not None else [0.0] * ranks

    def run(self) -> None:
        """Construct all programs. Raises MemoryDeadlock."""
        self._warm_up()
        for _ in range(2 * self.microbatches):
            self._backwards()
            self._forwards()
        for at, rank in enumerate(self.ranks):
            while rank.pending:
                self._weight(at)

    def _done(self, kind: str, at: int, half: int) -> int:
        return len(self.ends[kind][self.ranks[at].stages[half]])

    def _ready(self, kind: str, at: int, half: int) -> int:
        """Return the number of `kind` of `half` whose input from this rank itself is computed."""
        if half == UP:
            return self._done("F", at, DOWN if kind == "F" else UP)
        return self.microbatches if kind == "F" else self._done("I", at, UP)

    def _arrival(self, kind: str, at: int, half: int) -> float | None:
        """Return the arrival time of the next `kind`'s input from another rank; 0 if it needs none, None if not known yet."""
        stage = self.ranks[at].stages[half]
        index, origin = len(self.ends[kind][stage]), stage + (-1 if kind == "F" else 1)
        neighbour = at - 1 if (half == DOWN) == (kind == "F") else at + 1
        if not 0 <= neighbour < len(self.ranks):
            return 0.0
        ends = self.ends[kind][origin]
        return ends[index] + self.costs.hop(neighbour, at) if index < len(ends) else None

    def _put(self, kind: KindName, at: int, half: int) -> None:
        rank = self.ranks[at]
        stage, index, arrival = rank.stages[half], self._done(kind, at, half), self._arrival(kind, at, half)
        if index >= self.microbatches or arrival is None or (kind == "F" and rank.alive >= self.memory_limit):
            raise MemoryDeadlock
        if index >= self._ready(kind, at, half):
            raise MemoryDeadlock
        start = max(rank.clock, arrival or 0.0)
        if rank.program:
            rank.idle += start - rank.clock
        rank.clock = start + self.time[kind][stage]
        self.ends[kind][stage].append(rank.clock)
        rank.program.append((kind, stage, index))
        if kind == "I":
            rank.pending.append(("W", stage, index))
        else:
            rank.alive += 1

    def _weight(self, at: int) -> None:
        rank = self.ranks[at]
        if not rank.pending:
            raise MemoryDeadlock
        action = rank.pending.popleft()
        rank.program.append(action)
        rank.clock += self.time["W"][action[1]]
        rank.alive -= 1

    def _warm_up(self) -> None:
        count, microbatches = len(self.ranks), self.microbatches
        for at in range(count):
            self._put("F", at, DOWN)
        for at in reversed(range(count)):
            rank = self.ranks[at]
            while at + 1 < count and self._done("F", at, DOWN) < microbatches:
                arrival = self._arrival("F", at, UP) or 0.0
                late = rank.clock + self.time["F"][rank.stages[DOWN]] > arrival
                if late or rank.alive + 2 * (at + 1) > self.memory_limit:
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
        halves = [self._next_backward(at) for at in range(len(self.ranks))]
        for at in reversed(range(len(self.ranks))):
            if halves[at] == DOWN:
                self._fill("I", at, DOWN, True)
                self._put("I", at, DOWN)
        for at in range(len(self.ranks)):
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
        for at in range(len(self.ranks)):
            if self._done("F", at, UP) >= self.microbatches:
                continue
            half = self._next_forward(at)
            if half is None:
                continue
            while self.ranks[at].alive >= self.memory_limit:
                self._weight(at)
            self._fill("F", at, half, self.before_forwards)
            self._put("F", at, half)

    def _next_forward(self, at: int) -> int | None:
        if self._done("F", at, UP) >= self._done("F", at, DOWN):
            return DOWN
        if at + 1 == len(self.ranks) or self._arrival("F", at, UP) is not None:
            return UP
        if self._done("F", at, DOWN) < self.microbatches and self._arrival("F", at, DOWN) is not None:
            return DOWN
        return None

    def _fill(self, kind: KindName, at: int, half: int, short: bool) -> None:
        """Run weight gradients in the time until the next `kind` of `half` can start."""
        rank, arrival = self.ranks[at], self._arrival(kind, at, half)
        if arrival is None:
            raise MemoryDeadlock
        while rank.pending and arrival >= rank.clock + self.time["W"][rank.pending[0][1]]:
            self._weight(at)
        worst = max(max(other.idle for other in self.ranks), self.slack[at])
        if short and rank.pending and arrival - rank.clock > worst - rank.idle:
            self._weight(at)
