"""Merge I and W of a micro-batch into one B, or W into the pair of its I, where the value does not increase.

A B may be cheaper than separate I and W (`Costs.backward`) and frees memory earlier, but the previous stage receives its gradient
later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.model import parts
from pipeloom.schedule.timeline import Objective
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences

# Effort spent on merging I and W.
# Operations to evaluate; backwards not tried by then stay split. More would find the last few merges; these take 0.5 s.
MERGE_WORK = 1_000_000


def merge_backwards(
    schedule: Schedule, costs: Costs, objective: Objective = "makespan", *, overlap_p2p: bool = True
) -> Schedule:
    """Return `schedule`, of one route, with split backwards merged into B where that does not increase the objective.

    Pairs are split into their actions. Micro-batches visit all stages in the order in which they visit the first.
    """
    programs = [[action for cell in program for action in parts(cell)] for program in schedule.programs]
    order = tuple(
        action.microbatch for action in programs[schedule.placement[0]] if action.kind == "F" and not action.stage
    )
    instance = Instance(schedule.placement, schedule.microbatches, costs, float("inf"), objective, order, overlap_p2p)
    entries = [[[(action.kind, action.stage)] for action in program] for program in programs]
    sequences = merge_weight_grads(instance, instance.numbered(entries, together=True))
    return replace(schedule, codes=instance.schedule_of(sequences).codes)


def merge_weight_grads(instance: Instance, sequences: Sequences, work: int = MERGE_WORK) -> Sequences:
    """Return the sequences with W merged into the operation of its I where that does not increase the value.

    W moves forward to its I, so no rank needs more memory. Groups of W are tried whole, then in halves, larger groups first,
    until `work` operations have been evaluated.
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
    """Return the sequences with the weight gradients of these input gradients merged into their operations."""
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
