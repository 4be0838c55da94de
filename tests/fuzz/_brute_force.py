"""The least makespan or largest span of any schedule of a small instance, by enumeration: B and I + W, pairs, every order.

States are sets of (stage, micro-batch) progress; for each, every pattern of clocks that no other pattern makes useless is kept.
Nothing is assumed about the order of micro-batches, so that the first-in-first-out lemma of the solver is tested too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fuzz._simulator import Times, actions_of
from pipeloom.schedule import Action, Costs, Pair, Schedule

NONE, FORWARD, INPUT, DONE = range(4)
AFTER = {"F": FORWARD, "I": INPUT, "B": DONE, "W": DONE}
State = tuple[int, ...]  # stage * m + micro-batch -> its progress
Clocks = tuple[float, ...]  # when each rank is free; when each (stage, micro-batch) sent its last message; first starts


def least(
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    memory: float,
    objective: str = "makespan",
    *,
    pairs: bool = True,
    overlap_p2p: bool = True,
) -> float:
    """The optimum over one route through all stages in order; infinity where nothing fits the memory."""
    return Enumeration(placement, microbatches, costs, memory, objective == "span", pairs, overlap_p2p).least()


@dataclass(frozen=True)
class Enumeration:
    """One instance; `span`: the objective is the largest span."""

    placement: tuple[int, ...]
    m: int
    costs: Costs
    memory: float
    span: bool
    pairs: bool
    overlap_p2p: bool

    @cached_property
    def times(self) -> Times:
        empty = Schedule.of([[]] * self.ranks, placement=self.placement, microbatches=self.m, name="empty")
        return Times(empty, self.costs)

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def count(self) -> int:
        return self.stages * self.m

    def least(self) -> float:
        ranks, count = self.ranks, self.count
        levels: list[dict[State, set[Clocks]]] = [{} for _ in range(3 * count + 1)]  # by the sum of all progress
        levels[0][(NONE,) * count] = {(0.0,) * (ranks + count) + (-1.0,) * ranks}
        for states in levels[:-1]:
            for state, patterns in states.items():
                kept = pruned(patterns, ranks + count, self.span)
                for cell in self.moves(state):
                    after = self.after(state, cell)
                    for clocks in kept if after is not None else ():
                        where, pattern = self.canonical(after, self.without_past(after, self.advanced(clocks, cell)))
                        levels[sum(after)].setdefault(where, set()).add(pattern)
            states.clear()
        finished = levels[-1].get((DONE,) * count, set())
        if not finished:
            return float("inf")
        if self.span:
            return min(max(clocks[r] - clocks[ranks + count + r] for r in range(ranks)) for clocks in finished)
        return min(max(clocks[:ranks]) for clocks in finished)

    def moves(self, state: State) -> list[Action | Pair]:
        """Every entry that could run next on some rank."""
        found: list[Action] = []
        for at, progress in enumerate(state):
            stage, microbatch = divmod(at, self.m)
            if progress == NONE and (stage == 0 or state[at - self.m] != NONE):
                found.append(Action("F", stage, microbatch))
            if progress == FORWARD and (stage == self.stages - 1 or state[at + self.m] >= INPUT):
                found.append(Action("I", stage, microbatch))
                if self.costs.backward is not None or self.pairs:  # else a B is an I and a W at once
                    found.append(Action("B", stage, microbatch))
            if progress == INPUT:
                found.append(Action("W", stage, microbatch))
        cells: list[Action | Pair] = list(found)
        if self.pairs:
            backwards = [action for action in found if action.kind in "IB"]
            cells += [
                Pair(one, other)
                for one in found
                for other in backwards
                if one.kind == "F" and self.placement[one.stage] == self.placement[other.stage]
            ]
        return cells

    def after(self, state: State, cell: Action | Pair) -> State | None:
        """The state after the entry; None where it does not fit the memory."""
        new = list(state)
        turns = self.times.in_turns(cell)
        for kind, stage, microbatch, _ in actions_of(cell):
            new[stage * self.m + microbatch] = AFTER[kind]
            if kind != ("F" if turns else "W") and self.level(new, self.placement[stage]) > self.memory + 1e-9:
                return None
        return tuple(new)

    def level(self, state: list[int], rank: int) -> float:
        """The memory that is taken on the rank."""
        total = 0.0
        for at, progress in enumerate(state):
            stage, microbatch = divmod(at, self.m)
            if self.placement[stage] == rank and progress in (FORWARD, INPUT):
                share = 1.0 if progress == FORWARD else self.times.of_stage("held", stage)
                total += self.times.factor(microbatch) * self.times.of_stage("activation", stage) * share
        return total

    def advanced(self, clocks: Clocks, cell: Action | Pair) -> Clocks:
        """The clocks after the entry, run as early as it can."""
        ranks, rank = self.ranks, self.placement[actions_of(cell)[0].stage]
        new: list[Any] = list(clocks)
        starts = [clocks[rank]]
        for action in actions_of(cell):
            for origin, _ in self.times.origins(action):
                sent = clocks[ranks + origin[1] * self.m + origin[2]]
                hop = self.times.hop(origin, action.stage)
                starts.append(sent + hop if self.overlap_p2p else max(sent, clocks[rank]) + hop)
        start = max(starts)
        new[rank] = round(start + self.times.duration(cell), 9)
        for action in actions_of(cell):
            # one slot for F's and I's ends suffices: F's is read before I runs, by the next stage or by the last stage's own I
            if action.kind != "W":
                new[ranks + action.stage * self.m + action.microbatch] = new[rank]
        if new[ranks + self.count + rank] < 0:
            new[ranks + self.count + rank] = start
        return tuple(new)

    def without_past(self, state: State, clocks: Clocks) -> Clocks:
        """Messages that were read, or that are there before their reader is free, count as sent at 0."""
        new = list(clocks)
        for at, progress in enumerate(state):
            stage, microbatch = divmod(at, self.m)
            reader = None
            if progress == FORWARD and stage + 1 < self.stages and state[at + self.m] == NONE:
                reader = stage + 1
            if progress in (INPUT, DONE) and stage and state[at - self.m] == FORWARD:
                reader = stage - 1
            if reader is not None:
                hop = self.times.hop(("F", stage, microbatch), reader) if self.overlap_p2p else 0.0
                if clocks[self.ranks + at] + hop > clocks[self.placement[reader]]:
                    continue
            new[self.ranks + at] = 0.0
        return tuple(new)

    def canonical(self, state: State, clocks: Clocks) -> tuple[State, Clocks]:
        """Micro-batches that are alike, in an order of their own: which is which makes no difference."""
        if len(set(self.costs.microbatch)) > 1:
            return state, clocks
        m, ranks, count = self.m, self.ranks, self.count
        progress = (state[at : at + m] for at in range(0, count, m))
        sent = (clocks[at : at + m] for at in range(ranks, ranks + count, m))
        rows = list(zip(*sorted(zip(*progress, *sent, strict=True)), strict=True))
        places = tuple(int(value) for row in rows[: self.stages] for value in row)
        times = tuple(value for row in rows[self.stages :] for value in row)
        return places, clocks[:ranks] + times + clocks[ranks + count :]


def pruned(patterns: set[Clocks], width: int, span: bool) -> list[Clocks]:
    """Those that no other makes useless: as early in every clock and, for spans, all ranks begun and none earlier."""
    keys = []
    for clocks in patterns:
        firsts = clocks[width:]
        if span and min(firsts) < 0:
            return list(patterns)  # an earlier message could begin a rank's span earlier: nothing is useless
        keys.append((clocks[:width] + tuple(-first for first in firsts) if span else clocks[:width], clocks))
    kept: list[tuple[Clocks, Clocks]] = []
    for key, clocks in sorted(keys):
        if not any(all(a <= b for a, b in zip(other, key, strict=True)) for other, _ in kept):
            kept.append((key, clocks))
    return [clocks for _, clocks in kept]
