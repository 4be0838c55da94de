"""Sequences for many micro-batches from those for a few: a part that holds every operation type equally often is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.cyclic.period import PeriodicSchedule
from pipeloom.solver.instance import Instance, Sequences


@dataclass(frozen=True)
class UnrollParameters:
    """Choice of the parts of a schedule that are tried for repetition."""

    # The most micro-batches of a part, and the most nodes for which its interval is computed: longer parts repeat
    # more schedules, and cost more to measure.
    longest_part: int = 12
    most_nodes: int = 5000
    # A part within this factor of its busiest rank's work is taken at once: no other can gain more.
    close: float = 1.01


UNROLLING = UnrollParameters()


def repeat_period(small: Instance, sequences: Sequences, instance: Instance) -> Sequences | None:
    """Return `sequences` of `small` extended to all micro-batches of `instance`; None if no stretch of them can be repeated
    within the memory limit.

    Of the stretches tried, the one whose repetition takes the least time per micro-batch is used.
    """
    p, missing = instance.ranks, instance.microbatches - small.microbatches
    shortest, least = None, float("inf")
    for per_period in range(
        1, min(UNROLLING.longest_part, UNROLLING.most_nodes // (3 * instance.stages), small.microbatches // 2) + 1
    ):
        if missing % per_period:
            continue
        part = periodic_part(small, sequences, per_period)
        if part is None or not part.fits or not part.measure(least * per_period):
            continue
        if part.interval / per_period < least - TIME_TOLERANCE:
            shortest, least = per_period, part.interval / per_period
        if part.interval <= UNROLLING.close * part.work:
            return with_repeated_part(small, sequences, per_period, instance)
    if (
        missing % p == 0 and 2 * p <= small.microbatches
    ):  # a round, as in interleaved schedules; too long to be measured
        part = periodic_part(small, sequences, p)
        if part is not None and part.fits:
            return with_repeated_part(small, sequences, p, instance)
    return None if shortest is None else with_repeated_part(small, sequences, shortest, instance)


def periodic_part(instance: Instance, sequences: Sequences, per_period: int) -> PeriodicSchedule | None:
    """Return the middle part of the sequences with every operation type `per_period` times; None if there is none."""
    m = instance.microbatches
    part = replace(instance.even, microbatches=per_period)
    shift = [0] * part.table.none
    part_sequences = []
    for sequence in sequences:
        first = balanced_window([node // m for node in sequence], per_period)
        if first is None:
            return None
        line = []
        for node in sequence[first : first + per_period * (len(sequence) // m)]:
            operation_type, microbatch = divmod(node, m)
            node_of_period = operation_type * per_period + microbatch % per_period
            shift[node_of_period] = microbatch // per_period
            line.append(node_of_period)
        part_sequences.append(line)
    return PeriodicSchedule(part, part_sequences, shift)


def with_repeated_part(small: Instance, sequences: Sequences, per_period: int, instance: Instance) -> Sequences | None:
    """Return `sequences` of `small`, with a stretch of `per_period` micro-batches repeated to give as many as `instance` has.

    None if a rank has no such stretch. The number of missing micro-batches must be a multiple of `per_period`. The operations
    before and after the stretch stay, so the result may be longer or hold more memory than expected: the caller checks.
    """
    m, more = small.microbatches, (instance.microbatches - small.microbatches) // per_period
    result = []
    for sequence in sequences:
        operation_types = [node // m for node in sequence]
        first = balanced_window(operation_types, per_period)
        if first is None:
            return None
        last = first + per_period * (len(sequence) // m)
        done = dict.fromkeys(operation_types, 0)
        line = []
        for operation_type in [*operation_types[:last], *operation_types[first:last] * more, *operation_types[last:]]:
            line.append(operation_type * instance.microbatches + done[operation_type])
            done[operation_type] += 1
        result.append(line)
    return result


def balanced_window(operation_types: Sequence[int], times: int) -> int | None:
    """Return the start of the window nearest to the middle with every operation type `times` times; None if there is none."""
    count = dict.fromkeys(operation_types, 0)
    size = times * len(count)
    even = 0
    best, nearest = None, len(operation_types) + 1
    for at, operation_type in enumerate(operation_types):
        even -= count[operation_type] == times
        count[operation_type] += 1
        even += count[operation_type] == times
        if at >= size:
            gone = operation_types[at - size]
            even -= count[gone] == times
            count[gone] -= 1
            even += count[gone] == times
        first = at + 1 - size
        if even == len(count) and abs(2 * first + size - len(operation_types)) < nearest:
            best, nearest = first, abs(2 * first + size - len(operation_types))
    return best
