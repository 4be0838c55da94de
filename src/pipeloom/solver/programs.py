"""The search over whole programs of small instances: order, recomputation and copies together, where the other searches fix some.

A state is every rank's program with its copies, the way of each micro-batch through each stage, and the number of slots. A random
change moves an entry, gives a micro-batch another way, splits or merges a backward, or changes the slots, and simulated annealing
decides whether it stays. Times follow the rules of `graph.entry_waits` in one pass: apart from messages, an entry on any queue
waits for entries before it in its program alone. Memory above the limit costs time. What gains is simulated before it is offered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import NamedTuple

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Schedule, check
from pipeloom.schedule.actions import SAVED, Action, kind_of
from pipeloom.schedule.costs import TIME_TOLERANCE, StageCosts
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import recompute
from pipeloom.solver.construct import family_schedules, sequences_of
from pipeloom.solver.copies import COPIED_PARTS
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.incumbent import Budget, Incumbent
from pipeloom.solver.instance import Instance, Recomputation
from pipeloom.solver.recompute import choices_of

# Nodes of the largest instance that is searched: an evaluation takes about 10 microseconds a node with copies in four parts.
LARGEST_ANNEALED = 200
# Evaluations from the first temperature to the last: with more of them fewer starts are tried.
COOLING = 2000
# The first and the last temperature, in units of the mean time of a forward.
HOTTEST, COLDEST = 0.5, 0.02
# The time that as much memory above the limit as the limit costs, in units of the bound: with 0.5 a third as many starts succeed.
EXCESS = 2.0

# Kinds of entries, in the order in which those of one micro-batch of a stage stand in a program.
LETTERS = "FOLIW"
F, OUT, BACK, I, W = range(5)  # noqa: E741
STUCK = math.inf, math.inf
_NONE = 0.0, 0.0, 0.0, 0.0  # of a recomputation: its time and sizes

Way = Recomputation | int  # recomputed, or copied in so many parts; 0: neither


class ProgramEntry(NamedTuple):
    """Attributes: node: stage * m + micro-batch. part: of a copy; of an I, 1 if its W is in it, which makes it a B."""

    kind: int
    node: int
    part: int = 0


ProgramRow = tuple[ProgramEntry, ...]


@dataclass(frozen=True)
class ProgramState:
    """Attributes: rows: rank -> its program. ways: by node. slots: of what forwards save, as `Schedule.slots`."""

    rows: tuple[ProgramRow, ...]
    ways: tuple[Way, ...]
    slots: float = math.inf

    def with_row(self, rank: int, row: Sequence[ProgramEntry]) -> ProgramState:
        return replace(self, rows=(*self.rows[:rank], tuple(row), *self.rows[rank + 1 :]))


def search_programs(
    instances: Sequence[Instance], incumbent: Incumbent, budget: Budget, random: Random, recomputes: bool, copies: bool
) -> None:
    """Offer programs to `incumbent` until the budget is spent: in turn near the best, and from a family's order."""
    starts: list[Callable[[], tuple[ProgramTable, ProgramState]]] = []
    tables: dict[tuple[int, ...], ProgramTable] = {}
    for instance in instances:
        if instance.nodes > LARGEST_ANNEALED or instance.objective != "makespan" or not instance.overlap_p2p:
            continue
        table = tables[instance.placement] = ProgramTable(instance, recomputes, copies)
        for schedule in family_schedules(instance.placement, instance.microbatches, instance.costs, math.inf):
            starts.append(partial(table.start, schedule, random))
    while starts and not (budget.over or incumbent.proved):
        for start in random.choice(starts), None:
            best = incumbent.best
            if start is not None:
                _anneal(*start(), incumbent, budget, random)
            elif best is not None and best.schedule.placement in tables:
                table = tables[best.schedule.placement]
                state = table.state_of(best.schedule)
                if state is not None:
                    _anneal(table, state, incumbent, budget, random)


def _anneal(table: ProgramTable, state: ProgramState, incumbent: Incumbent, budget: Budget, random: Random) -> None:
    instance = table.instance
    penalty = EXCESS * incumbent.bounds[instance] / instance.memory_limit
    unit = sum(table.time[F]) / len(table.time[F])
    value, excess = table.evaluate(state)
    cost = value + penalty * excess
    for step in range(COOLING):
        if budget.over or incumbent.proved:
            return
        budget.used += 1
        temperature = unit * HOTTEST * (COLDEST / HOTTEST) ** (step / COOLING)
        other = table.changed(state, random)
        value, excess = table.evaluate(other)
        new = value + penalty * excess
        if new < cost or random.random() < math.exp((cost - new) / temperature):
            state, cost = other, new
            if excess <= 0 and incumbent.improves(value):
                _offer(table, state, incumbent)


def _offer(table: ProgramTable, state: ProgramState, incumbent: Incumbent) -> None:
    instance, schedule = table.instance, table.schedule_of(state)
    try:
        check(schedule)
    except ScheduleError:
        return  # messages that pass each other
    incumbent.offer_fitting(instance, schedule, "annealed programs")


class ProgramTable:
    """Times and sizes by node, and the ways of a micro-batch through each stage."""

    def __init__(self, instance: Instance, recomputes: bool, copies: bool) -> None:
        self.instance = instance
        costs, stages, place = instance.costs, instance.stages, instance.placement
        spread, factors = StageCosts(costs, stages), costs.factors(instance.microbatches)

        def by_node(values: Sequence[float]) -> list[float]:
            return [value * factor for value in values for factor in factors]

        def hops(step: int) -> list[float]:
            at = [s + step if 0 <= s + step < stages else s for s in range(stages)]
            return [costs.hop(place[at[s]], place[s], factor) for s in range(stages) for factor in factors]

        activation, held, inputs = (costs.per_stage(name, stages) for name in ("activation", "held", "kept"))
        sizes = list(zip(activation, held, inputs, strict=True))
        self.time = {F: by_node(spread.forward), I: by_node(spread.input_grad), W: by_node(spread.weight_grad)}
        self.backward = by_node(spread.backward)
        self.copy = by_node(spread.copy if copies else [0.0] * stages)
        self.size = by_node(activation)
        self.saved = by_node([size * (1 - share) for size, _, share in sizes])
        self.pending = by_node([size * late for size, late, _ in sizes])
        self.factors = factors * stages
        self.hops = {F: hops(-1), I: hops(1)}
        choices = choices_of(costs, stages) if recomputes else []
        self.ways: list[list[Way]] = [
            [0, *(COPIED_PARTS if copies else ()), *dict.fromkeys(way for choice in choices for way in choice[s])]
            for s in range(stages)
        ]
        count, least = max(COPIED_PARTS), min((size for size in self.saved if size > 0), default=math.inf)
        most = math.floor(instance.memory_limit / least * count) if copies else 0
        self.slots = [math.inf, *(slots / count for slots in range(count, most + 1))]

    def evaluate(self, state: ProgramState) -> tuple[float, float]:
        """Return (makespan, by how much the ranks exceed the memory limit together); `STUCK` for programs that do not end."""
        end = [-1.0] * (2 * len(self.size))  # of F, then of I
        waiting: dict[int, int] = {}
        ready = list(range(len(state.rows)))
        ends: list[tuple[float, float]] = []
        walks = [self._walk(rank, state, end, waiting, ready, ends) for rank in ready]
        while ready:
            next(walks[ready.pop()], None)
        if len(ends) < len(state.rows):
            return STUCK
        limit = self.instance.memory_limit + TIME_TOLERANCE
        return max(clock for clock, _ in ends), sum(max(0.0, peak - limit) for _, peak in ends)

    def _walk(
        self,
        rank: int,
        state: ProgramState,
        end: list[float],
        waiting: dict[int, int],
        ready: list[int],
        ends: list[tuple[float, float]],
    ) -> Iterator[None]:
        """Run a rank's program as far as messages allow, yield to wait for the next, and add (end, peak memory) at the end.

        It ends without where a claim would wait for an entry that comes later.
        """
        m, nodes, slots = self.instance.microbatches, len(self.size), state.slots + TIME_TOLERANCE
        clock = begun = out_free = back_free = claimed = 0.0
        releases = deque[tuple[float, float]]()  # (end, how much) of entries that free slots
        started: dict[int, float] = {}  # node -> start of its F
        there: dict[tuple[int, int], float] = {}  # part of a node -> end of its copy out, then of its copy back
        moments: list[tuple[float, float]] = []  # (time, change of memory)
        for kind, node, part in state.rows[rank]:
            way = state.ways[node]
            again, count = (way, 0) if isinstance(way, Recomputation) else (None, way)
            apart = again is not None and bool(again.letters)  # R is an action before the backward
            whole = again is not None and again.letters in ((), ("R",))
            claim = {F: float(not whole), I: float(whole), BACK: 1 / max(count, 1)}.get(kind, 0.0)
            room = 0.0  # when the slots are free
            claimed += claim
            while claim and claimed > slots:
                if not releases:
                    return
                room, amount = releases.popleft()
                claimed -= amount
            if kind == OUT:
                part_there = started[node] + part / count * self.time[F][node]
                out_free = there[node, part] = max(out_free, begun, part_there) + self.copy[node] / count
                releases.append((out_free, 1 / count))
                moments.append((out_free, -self.saved[node] / count))
                continue
            if kind == BACK:
                start = max(back_free, begun, room, there[node, part])
                back_free = there[node, part] = start + self.copy[node] / count
                moments.append((start, self.saved[node] / count))
                continue
            if kind == W:
                begun, clock = clock, clock + self.time[W][node]
                moments.append((clock, -self.pending[node]))
                continue
            arrival, event = 0.0, node - m if kind == F else node + nodes + m
            if event >= 2 * nodes:
                event = node  # of the last stage, its own F
            if event >= 0:
                while end[event] < 0:
                    waiting[event] = rank
                    yield
                arrival = end[event] + self.hops[kind][node]
            recompute, freed, held, unsaved = (
                _NONE if again is None else (self.factors[node] * each for each in again[1:])
            )
            clock = max(clock, room)
            if kind == F:
                started[node] = begun = max(clock, arrival)
                clock = begun + self.time[F][node]
                moments += [(begun, self.size[node] - freed + unsaved), (clock, -unsaved)]
                event = node
            else:
                time = self.backward[node] if part else self.time[I][node]
                change = (0.0 if part else self.pending[node]) - self.size[node] + freed
                first = clock if apart else max(clock, arrival)  # R may run while the message is on its way
                begun = max(first + recompute, arrival) if apart else first
                clock = begun if apart else begun + recompute
                for piece in range(count, 0, -1):
                    clock = max(clock, there[node, piece]) + time / count
                clock += 0.0 if count else time
                rise = max(0.0, change, held)
                moments += [(first, rise), (clock, change - rise)]
                releases.append((clock, 1.0))
                event = node + nodes
            end[event] = clock
            if event in waiting:
                ready.append(waiting.pop(event))
        moments.sort()
        level = peak = 0.0
        for _, change in moments:
            level += change
            peak = max(peak, level)
        ends.append((clock, peak))

    def changed(self, state: ProgramState, random: Random) -> ProgramState:
        """Return a state beside this one, or the same where the change would be out of order."""
        draw, m = random.random(), self.instance.microbatches
        if draw < 0.1:
            return replace(state, slots=random.choice(self.slots))
        if draw < 0.35:
            node = random.randrange(len(self.size))
            return self._turned(state, node, random.choice(self.ways[node // m]), random)
        rank = random.randrange(len(state.rows))
        row = list(state.rows[rank])
        at = random.randrange(len(row))
        entry = row.pop(at)
        if entry.kind == I and random.random() < 0.5:
            row.insert(at, ProgramEntry(I, entry.node, 1 - entry.part))
            weight_grad = ProgramEntry(W, entry.node)
            if entry.part:
                row.insert(at + 1, weight_grad)
            else:
                row.remove(weight_grad)
            return state.with_row(rank, row)
        to = at + random.choice((-1, 1)) * (1 + int(random.expovariate(0.6)))
        row.insert(max(0, to), entry)
        kinds = [other.kind for other in row if other.node == entry.node]
        return state.with_row(rank, row) if kinds == sorted(kinds) else state

    def _turned(self, state: ProgramState, node: int, way: Way, random: Random | None = None) -> ProgramState:
        """Return the state with another way of a node: copied back at random, or directly before it is needed."""
        rank = self.instance.placement[node // self.instance.microbatches]
        row = [entry for entry in state.rows[rank] if entry.node != node or entry.kind not in (OUT, BACK)]
        if isinstance(way, int):
            behind = 1 + row.index(ProgramEntry(F, node))
            need = next(at for at, entry in enumerate(row) if entry[:2] == (I, node))
            back = random.randint(behind, need) if random is not None else need
            row[back:back] = [ProgramEntry(BACK, node, part) for part in range(way, 0, -1)]
            row[behind:behind] = [ProgramEntry(OUT, node, part) for part in range(1, way + 1)]
        ways = (*state.ways[:node], way, *state.ways[node + 1 :])
        return replace(state, ways=ways).with_row(rank, row)

    def start(self, schedule: Schedule, random: Random) -> tuple[ProgramTable, ProgramState]:
        """Return the order of a schedule, with one way at random for what is idle for long enough, and random slots."""
        sequences, nodes, m = sequences_of(self.instance, schedule), len(self.size), self.instance.microbatches
        rows = tuple(tuple(ProgramEntry((F, I, W)[n // nodes], n % nodes) for n in row) for row in sequences)
        state = ProgramState(rows, (0,) * nodes, random.choice(self.slots))
        timing, number = evaluate(self.instance, sequences), random.randrange(len(self.ways[0]))
        for node in range(nodes):
            if timing is not None and timing.start[nodes + node] - timing.end[node] >= 2 * self.copy[node]:
                state = self._turned(state, node, self.ways[node // m][number])
        return self, state

    def schedule_of(self, state: ProgramState) -> Schedule:
        """Return the state as a Schedule."""
        m = self.instance.microbatches

        def action(entry: ProgramEntry) -> Action:
            letter, count = LETTERS[entry.kind], state.ways[entry.node]
            if entry.kind == I and entry.part:
                letter = "B"
            elif entry.kind in (OUT, BACK) and count != 1:
                letter += f":{entry.part}/{count}"
            return Action(letter, *divmod(entry.node, m))

        programs = [[action(entry) for entry in row] for row in state.rows]
        schedule = Schedule.of(programs, placement=self.instance.placement, microbatches=m, name="search")
        groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for node, way in enumerate(state.ways):
            if isinstance(way, Recomputation):
                groups.setdefault(way.letters, []).append(divmod(node, m))
        for letters, places in groups.items():
            for letter in letters or ("",):
                schedule = recompute(schedule, letter == "R", places, letter.partition(":")[2])
        return schedule.with_slots({SAVED: state.slots} if state.slots < math.inf else {})

    def state_of(self, schedule: Schedule) -> ProgramState | None:
        """Return a Schedule as a state; None for one with other entries or ways than are searched."""
        m, rows = self.instance.microbatches, []
        letters: dict[int, tuple[str, ...]] = {}
        counts: list[Way] = [0] * len(self.size)
        for program in schedule.programs:
            row = []
            for cell in program:
                action, *others = parts(cell)
                node = action.stage * m + action.microbatch
                word, _, part = action.kind.partition(":")
                if word == "R":
                    letters[node] = (*letters.get(node, ()), action.kind)
                    continue
                fused = kind_of(action.kind).fuses
                if fused:
                    letters[node], word = (), fused[-1]
                if others or word not in (*LETTERS, "B"):
                    return None
                number, _, count = (part or "1/1").partition("/") if word in "OL" else (str(int(word == "B")), "", "")
                if count:
                    counts[node] = int(count)
                row.append(ProgramEntry(LETTERS.index("I" if word == "B" else word), node, int(number)))
            rows.append(tuple(row))
        for node, names in letters.items():
            same = [way for way in self.ways[node // m] if isinstance(way, Recomputation) and way.letters == names]
            if not same or counts[node]:
                return None
            counts[node] = same[0]
        return ProgramState(tuple(rows), tuple(counts), dict(schedule.slots).get(SAVED, math.inf))
