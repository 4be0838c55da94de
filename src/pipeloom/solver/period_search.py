"""The search for one period: periodic schedules are annealed and unrolled to all micro-batches.

Simulated annealing (Kirkpatrick et al. 1983) moves along the cycle that sets the initiation interval. The searches of all
instances run in slices between the turns of the walks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.incumbent import Budget, Incumbent
from pipeloom.solver.instance import Instance, Sequences
from pipeloom.solver.periodic import PeriodicSchedule, modulo_packed, periodic_part

# The constants of simulated annealing; times are shares of the busiest rank's work in one period.
# Moves of one run: longer runs cool slower and find shorter periods, but there are fewer of them.
ANNEALING_STEPS = 3000
# Initial temperatures, drawn at random: a high one leaves the warm start, a low one refines it.
INITIAL_TEMPERATURES = (0.03, 0.1, 0.2)
# Final temperature: small enough that no worse move is accepted at the end.
FINAL_TEMPERATURE = 0.0005
# The share of moves on the critical cycle. Only these can shorten the period, but the others open the way to them.
CRITICAL_SHARE = 0.6
# Time that a unit of memory above the limit costs: low enough to pass through infeasible schedules, high enough to return.
MEMORY_PENALTY = 0.3
# Moves between two polls of the clock.
POLL_INTERVAL = 16


def critical_blocks_of(cyclic: PeriodicSchedule) -> list[list[int]]:
    """Return the runs of two or more nodes of the critical cycle that lie on one rank; empty if the whole cycle lies on one."""
    critical, rank = cyclic.critical, cyclic.instance.table.rank
    breaks = [
        at
        for at, node in enumerate(critical)
        if cyclic.before[node] != critical[at - 1] or rank[critical[at - 1]] != rank[node]
    ]
    runs = []
    for place, at in enumerate(breaks):
        to = breaks[place + 1] if place + 1 < len(breaks) else breaks[0] + len(critical)
        if to - at > 1:
            runs.append([critical[index % len(critical)] for index in range(at, to)])
    return runs


class AnnealingRun:
    """An annealed walk through periodic schedules; memory violations are penalised in the objective.

    Attributes:
        now: the current schedule.
        best: (sequences, shift) of the shortest period that fits the memory limit.
        interval: the length of that period.
        over: the memory of `now` above the limit, summed over the ranks.
    """

    def __init__(self, start: PeriodicSchedule, random: Random, initial_temperature: float) -> None:
        self.now, self.random, self.initial_temperature = start, random, initial_temperature
        self.interval = start.interval
        self.best = [list(sequence) for sequence in start.sequences], list(start.shift)
        self.excess = [
            max(0.0, start.peak(rank) - start.instance.memory_limit - TIME_TOLERANCE)
            for rank in range(start.instance.ranks)
        ]
        self.penalty = MEMORY_PENALTY * start.work

    @property
    def over(self) -> float:
        return sum(self.excess)

    def run(self, steps: int, goal: float, carry_on: Callable[[int], bool] = lambda done: True) -> None:
        """Make `steps` moves at falling temperature; stop early at interval `goal`, or if `carry_on(moves made)` is false."""
        random, now, initial_temperature = self.random, self.now, self.initial_temperature
        for step in range(steps):
            if self.interval <= goal + TIME_TOLERANCE or (step % POLL_INTERVAL == 0 and not carry_on(step)):
                return
            temperature = now.work * initial_temperature * (FINAL_TEMPERATURE / initial_temperature) ** (step / steps)
            self._iterate(now.interval + self.penalty * self.over - temperature * math.log(1.0 - random.random()))

    def _iterate(self, most: float) -> None:
        """Make a random move; undo it unless the interval plus the penalty for memory above the limit is at most `most`."""
        now, random = self.now, self.random
        runs = critical_blocks_of(now) if random.random() < CRITICAL_SHARE else []
        run = random.choice(runs) if runs else []
        rank = now.instance.table.rank[run[0]] if run else random.randrange(now.instance.ranks)
        before = list(now.sequences[rank]), list(now.shift), self.excess[rank]
        state = now.end, now.order, now.critical, now.interval
        if self._move(run, rank) if run else self._swap(rank, random.choice(now.sequences[rank])):
            self.excess[rank] = max(0.0, now.peak(rank) - now.instance.memory_limit - TIME_TOLERANCE)
            left = most - self.penalty * self.over
            if left >= now.work:
                now.link(rank)
                now.end, now.order = list(now.end), list(now.order)
                if now.measure(left):
                    if now.interval < self.interval - TIME_TOLERANCE and not self.over:
                        self.interval = now.interval
                        self.best = [list(sequence) for sequence in now.sequences], list(now.shift)
                    return
        now.sequences[rank], now.shift, self.excess[rank] = before
        now.link(rank)
        now.end, now.order, now.critical, now.interval = state

    def _move(self, run: list[int], rank: int) -> bool:
        """Swap the first or last two nodes of a run, or move a node to its front or end; false if that is not allowed."""
        random = self.random
        kind = random.randrange(4)
        if kind == 0 or len(run) == 2:
            return self._swap(rank, run[0])
        if kind == 1:
            return self._swap(rank, run[-2])
        at = random.randrange(len(run))
        node = run[at]
        if kind == 2:
            return at < len(run) - 1 and all(self._swap(rank, node) for _ in range(len(run) - 1 - at))
        return at > 0 and all(self._swap(rank, other) for other in reversed(run[:at]))

    def _swap(self, rank: int, node: int) -> bool:
        """Swap `node` with the node after it; false if that is not allowed."""
        now = self.now
        sequence, shift, table = now.sequences[rank], now.shift, now.instance.table
        at = sequence.index(node)
        if at == len(sequence) - 1:
            first = sequence.pop(0)  # the same cyclic sequence, cut one node later
            shift[first] += 1
            sequence.append(first)
            at -= 1
        other = sequence[at + 1]
        if node // table.microbatches == other // table.microbatches:
            return False
        if shift[node] == shift[other] and (table.weight_grad_of[node] == other or table.predecessor[other] == node):
            return False
        sequence[at], sequence[at + 1] = other, node
        return True


# The constants of the search for one period.
# Periodic schedules kept to anneal from: more diversify, fewer are refined further.
POOL_SIZE = 6
# The most periods joined into one, and the most nodes of the result: a wider period can be shorter per micro-batch, and is
# slower to anneal.
WIDEST_PERIOD = 8
MOST_PERIOD_NODES = 800
# The most micro-batches in the periodic part of a warm start.
LONGEST_PART = 24
# Modulo scheduling: initiation intervals tried, and the factor from one to the next. A smaller factor packs tighter.
INTERVALS_TRIED = 300
INTERVAL_FACTOR = 1.02
# During a run, schedules whose interval is within this factor of its best are unrolled with this probability, on instances up
# to this many nodes: the shortest period does not always unroll to the shortest schedule.
CLOSE_TO_BEST = 1.004
UNROLL_SHARE = 0.2
LARGEST_UNROLLED = 20_000
# Warm starts whose time per micro-batch is above the shortest by this factor are dropped.
SLOWEST_START = 1.15

Snapshot = tuple[float, float, int, Sequences, list[int]]


class PeriodSearch:
    """Search over periodic schedules of one instance, with its micro-batches treated as equal, and their unrolled sequences.

    Attributes:
        pool: (value, interval, micro-batches of a period, sequences, shift), the best first.
        best: the best unrolled sequences, or None.
        value: the value of `best`; infinite before the first.
        work: nodes visited so far.
    """

    def __init__(self, instance: Instance, random: Random, seeds: Sequence[tuple[Instance, Sequences]]) -> None:
        self.instance, self.random = instance, random
        self.pool: list[Snapshot] = []
        self.best: Sequences | None = None
        self.value = math.inf
        self.work = 0
        self.starts = periodic_starts(instance, seeds)

    def run(self, carry_on: Callable[[], bool]) -> None:
        """Collect the starts, then anneal from the pool, until `carry_on()` returns false."""
        for start in self.starts:
            self.work += len(start.shift)
            if start.interval <= SLOWEST_START * start.instance.microbatches * self._shortest():
                self._add(start)
            if not carry_on():
                return
        while self.pool and carry_on():
            self._walk(carry_on)

    def _shortest(self) -> float:
        """Return the least interval per micro-batch so far."""
        return min((interval / per_period for _, interval, per_period, _, _ in self.pool), default=math.inf)

    def _walk(self, carry_on: Callable[[], bool]) -> None:
        random = self.random
        _, _, per_period, sequences, shift = self.pool[
            min(random.randrange(POOL_SIZE), random.randrange(len(self.pool)))
        ]
        start = PeriodicSchedule(replace(self.instance.even, microbatches=per_period), sequences, shift)
        most = (
            min(WIDEST_PERIOD, self.instance.microbatches // 2, MOST_PERIOD_NODES // (3 * self.instance.stages))
            // per_period
        )
        if most > 1 and random.random() < 0.5:
            start = widened(start, random.randint(2, most))
        start.measure()
        walk = AnnealingRun(start, random, random.choice(INITIAL_TEMPERATURES))
        nodes = len(start.shift)

        def look(done: int) -> bool:
            self.work += POLL_INTERVAL * nodes
            if (
                self.instance.nodes < LARGEST_UNROLLED
                and not walk.over
                and start.interval <= CLOSE_TO_BEST * walk.interval
                and random.random() < UNROLL_SHARE
            ):
                self._add(start)
            return carry_on()

        walk.run(ANNEALING_STEPS, start.work, look)
        best = PeriodicSchedule(start.instance, *walk.best)
        best.interval = walk.interval
        self._add(best)

    def _add(self, cyclic: PeriodicSchedule) -> None:
        """Evaluate the sequences that it unrolls to, and keep it in the pool if it fits and is among the best."""
        sequences = cyclic.unrolled(self.instance)
        self.work += self.instance.nodes
        ended = evaluate(self.instance, sequences)
        if ended is None or not self.instance.fits(sequences):
            return
        if ended.value < self.value - TIME_TOLERANCE:
            self.value, self.best = ended.value, sequences
        per_period = cyclic.instance.microbatches
        if all(abs(ended.value - value) > TIME_TOLERANCE or per_period != other for value, _, other, _, _ in self.pool):
            copy = [list(sequence) for sequence in cyclic.sequences]
            self.pool.append((ended.value, cyclic.interval, per_period, copy, list(cyclic.shift)))
            self.pool.sort(key=lambda entry: entry[0])
            del self.pool[POOL_SIZE:]


def periodic_starts(instance: Instance, seeds: Sequence[tuple[Instance, Sequences]]) -> Iterator[PeriodicSchedule]:
    """Yield periodic schedules that fit the memory: packed periods, and stretches of the seeds in which every operation type
    occurs equally often.
    """
    yield from modulo_starts(instance)
    for per_period in range(1, LONGEST_PART + 1):
        for small, sequences in seeds:
            if 2 * per_period <= small.microbatches:
                part = periodic_part(small, sequences, per_period)
                if part is not None and part.fits and part.measure():
                    yield part


def modulo_starts(instance: Instance) -> Iterator[PeriodicSchedule]:
    """Yield the shortest periods, of those tried, into which a micro-batch can be packed within the memory limit."""
    one = replace(instance.even, microbatches=1)
    if not any(one.table.time):
        return  # a period of length 0 has no places to pack into
    for adjacent in (False, True):
        interval = modulo_packed(one, sum(one.table.time), adjacent).work
        for _ in range(INTERVALS_TRIED):
            packed = modulo_packed(one, interval, adjacent)
            if packed.fits and packed.measure():
                yield packed
                break
            interval *= INTERVAL_FACTOR


def widened(cyclic: PeriodicSchedule, factor: int) -> PeriodicSchedule:
    """Return the same periodic schedule with `factor` periods joined into one."""
    per_period = cyclic.instance.microbatches
    wide = replace(cyclic.instance, microbatches=per_period * factor)
    shift = [0] * wide.table.none
    sequences = []
    for sequence in cyclic.sequences:
        line = []
        for period in range(factor):
            for node in sequence:
                operation_type, j = divmod(node, per_period)
                # the micro-batch of the node in this one of the joined periods, numbered over all of them
                ahead, rest = divmod((period + cyclic.shift[node]) * per_period + j, per_period * factor)
                node_of_period = operation_type * per_period * factor + rest
                shift[node_of_period] = ahead
                line.append(node_of_period)
        sequences.append(line)
    return PeriodicSchedule(wide, sequences, shift)


PERIODIC_ORIGIN = "one period"


# Share of the effort for the search for a period.
# Operations evaluated, as a share of those that the walks evaluate, and the m / p from which on it is all of that share.
# A shorter period gains about m / p times; a pipeline that is rarely full depends on its warm-up and cool-down instead.
PERIOD_EFFORT = 0.5
FULL_PIPELINE = 4.0
# A placement is dropped when its best period is worse than the incumbent by this factor.
HOPELESS = 1.03
# Moves whose time a turn gets where the instances are too large for walks: about one annealing run for each.
MOVES_ALONE = 6
# Sequences per placement whose periods are annealed: more diversify, fewer get more moves.
MOST_SEEDS = 6


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
            full = search.instance.microbatches / (FULL_PIPELINE * search.instance.ranks)
            work = moves * PERIOD_EFFORT * min(1.0, full) * search.instance.nodes
            self._advance(search, search.work + work / len(self.running))

    def _advance(self, search: PeriodSearch, until: float) -> None:
        def carry_on() -> bool:
            if search.best is not None and self.incumbent.improves(search.value):
                self.incumbent.offer(search.value, PERIODIC_ORIGIN, search.instance, search.best)
            self.incumbent.report()
            return search.work < until and self.budget.in_time

        search.run(carry_on)

    def run_alone(self, moves: int) -> None:
        """Search for as long as this number of moves would give time for, where the instances are too large for moves.

        In turns of the same length whatever the number, so that more moves continue what fewer began.
        """
        for _ in range(max(1, moves // MOVES_ALONE) if moves else 0):
            if not self.running or self.incumbent.proved or not self.budget.in_time:
                return
            self.advance(MOVES_ALONE)
            self.drop_worst()

    def improved(self) -> list[tuple[Instance, Sequences]]:
        """Return the best sequences of each search that are better than those returned before."""
        better = [search for search in self.running if search.value < self._given.get(search.instance, float("inf"))]
        self._given.update((search.instance, search.value) for search in better)
        return [(search.instance, search.best) for search in better if search.best is not None]

    def drop_worst(self) -> None:
        """Drop the worst search, unless it is the only one, and all that cannot improve on the incumbent."""
        best = sorted(self.running, key=lambda search: search.value)[: max(1, len(self.running) - 1)]
        most = HOPELESS * self.incumbent.value
        self.running = [
            search for search in best if self.incumbent.can_improve(search.instance) and search.value < most
        ]


def distinct_seeds(seeds: Sequence[tuple[float, Instance, Sequences]]) -> list[tuple[Instance, Sequences]]:
    """Return the best sequences to look for periods in; of equal values only the first."""
    by_value: dict[float, tuple[Instance, Sequences]] = {}
    for value, small, sequences in sorted(seeds, key=lambda seed: seed[0]):
        by_value.setdefault(round(value, 9), (small, sequences))
    return list(by_value.values())[:MOST_SEEDS]
