"""Merge I and W of a micro-batch into one B, or into their pair, where the value does not suffer.

A B may be cheaper than I and W apart (`Costs.backward`) and frees its memory earlier, but the gradient reaches the stage before
later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.model import parts
from pipeloom.schedule.timeline import Objective
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences


@dataclass(frozen=True)
class MergeParameters:
    """Effort spent on merging I and W."""

    # Operations evaluated; what is left after that stays split. More finds the last few merges; this many take half a second.
    work: int = 1_000_000


MERGING = MergeParameters()


def merge_backwards(
    schedule: Schedule, costs: Costs, objective: Objective = "makespan", *, overlap_p2p: bool = True
) -> Schedule:
    """`schedule`, of one route, with as many of its split backwards written as one B as make the objective no longer.

    Pairs are taken apart. Micro-batches go through all stages in the order in which they go through the first.
    """
    programs = [[action for cell in program for action in parts(cell)] for program in schedule.programs]
    order = tuple(
        action.microbatch for action in programs[schedule.placement[0]] if action.kind == "F" and not action.stage
    )
    instance = Instance(schedule.placement, schedule.microbatches, costs, float("inf"), objective, order, overlap_p2p)
    entries = [[[(action.kind, action.stage)] for action in program] for program in programs]
    sequences = merge_weight_grads(instance, instance.numbered(entries, together=True))
    return replace(schedule, codes=instance.schedule_of(sequences).codes)


def merge_weight_grads(instance: Instance, sequences: Sequences, work: int = MERGING.work) -> Sequences:
    """The sequences with as many W merged into the operation of their I as make the value no larger.

    W goes to where its I is, so that no rank holds more. Groups are tried whole, then halved, the larger first, until `work`
    operations have been evaluated.
    """
    table = instance.table
    evaluation = evaluate(instance, sequences)
    apart = range(table.stride, 2 * table.stride)
    split = [
        table.nodes[operation][-1]
        for sequence in sequences
        for operation in sequence
        if table.nodes[operation][-1] in apart
    ]
    if evaluation is None or not split:
        return sequences
    best, value, groups = sequences, evaluation.value, deque([split])
    for _ in range(max(1, work // max(1, sum(map(len, sequences))))):
        if not groups:
            break
        group = groups.popleft()
        merged = _merged(instance, best, set(group))
        evaluation = evaluate(instance, merged)
        if evaluation is not None and evaluation.value <= value + TIME_TOLERANCE:
            best, value = merged, evaluation.value
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return best


def _merged(instance: Instance, sequences: Sequences, input_grads: set[int]) -> Sequences:
    """The sequences with the weight gradients of these nodes in the operations of their input gradients."""
    table = instance.table
    merged = []
    for sequence in sequences:
        operations = []
        for operation in sequence:
            nodes = table.nodes[operation]
            if nodes[-1] in input_grads:
                operations.append(table.operation(*nodes, nodes[-1] + table.stride))
            elif nodes[-1] - table.stride not in input_grads:
                operations.append(operation)
        merged.append(operations)
    return merged
