"""The search for one period: periodic schedules are annealed and unrolled to all micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.cyclic.anneal import ANNEALING, AnnealingRun
from pipeloom.solver.cyclic.modulo import modulo_packed
from pipeloom.solver.cyclic.period import PeriodicSchedule
from pipeloom.solver.cyclic.unroll import periodic_part
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences


@dataclass(frozen=True)
class PeriodParameters:
    """The constants of the search for one period."""

    # Periodic schedules kept to anneal from: more diversify, fewer are refined further.
    pool: int = 6
    # The most periods joined into one, and the most nodes of the result: a wider period can be shorter per micro-batch, and is
    # slower to anneal.
    widest: int = 8
    most_nodes: int = 800
    # The most micro-batches in the periodic part of a warm start.
    longest_part: int = 24
    # Modulo scheduling: initiation intervals tried, and the factor from one to the next. A smaller factor packs tighter.
    intervals: int = 300
    interval_factor: float = 1.02
    # During a run, schedules whose interval is within this factor of its best are unrolled with this probability, on instances up
    # to this many nodes: the shortest period does not always unroll to the shortest schedule.
    close: float = 1.004
    unroll_share: float = 0.2
    largest_unrolled: int = 20_000
    # Warm starts whose time per micro-batch is above the shortest by this factor are dropped.
    slowest: float = 1.15


PERIOD = PeriodParameters()

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
            if start.interval <= PERIOD.slowest * start.instance.microbatches * self._shortest():
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
            min(random.randrange(PERIOD.pool), random.randrange(len(self.pool)))
        ]
        start = PeriodicSchedule(replace(self.instance.even, microbatches=per_period), sequences, shift)
        most = (
            min(PERIOD.widest, self.instance.microbatches // 2, PERIOD.most_nodes // (3 * self.instance.stages))
            // per_period
        )
        if most > 1 and random.random() < 0.5:
            start = widened(start, random.randint(2, most))
        start.measure()
        walk = AnnealingRun(start, random, random.choice(ANNEALING.initial_temperatures))
        nodes = len(start.shift)

        def look(done: int) -> bool:
            self.work += ANNEALING.poll_interval * nodes
            if (
                self.instance.nodes < PERIOD.largest_unrolled
                and not walk.over
                and start.interval <= PERIOD.close * walk.interval
                and random.random() < PERIOD.unroll_share
            ):
                self._add(start)
            return carry_on()

        walk.run(ANNEALING.steps, start.work, look)
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
            self.pool.append(
                (
                    ended.value,
                    cyclic.interval,
                    per_period,
                    [list(sequence) for sequence in cyclic.sequences],
                    list(cyclic.shift),
                )
            )
            self.pool.sort(key=lambda entry: entry[0])
            del self.pool[PERIOD.pool :]


def periodic_starts(instance: Instance, seeds: Sequence[tuple[Instance, Sequences]]) -> Iterator[PeriodicSchedule]:
    """Yield periodic schedules that fit the memory: packed periods, and stretches of the seeds in which every operation type
    occurs equally often.
    """
    yield from modulo_starts(instance)
    for per_period in range(1, PERIOD.longest_part + 1):
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
        for _ in range(PERIOD.intervals):
            packed = modulo_packed(one, interval, adjacent)
            if packed.fits and packed.measure():
                yield packed
                break
            interval *= PERIOD.interval_factor


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
