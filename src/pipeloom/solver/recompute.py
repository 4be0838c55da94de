"""The search for what to recompute, beside the order: under a memory limit, which micro-batches of which stages, and which parts.

For a given order the memory of a rank does not depend on times, so what must be recomputed follows from the order alone: where a
rank would exceed its limit, the micro-batch whose backward is farthest away is recomputed (of intervals of one size this removes
the fewest). Orders are `plain_orders` with backwards split and whole: what waits for W fits no tight limit. The best are improved
by tabu search, with each R bound to its backward, and what is recomputed is then decided again for the order that results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

from pipeloom.schedule.actions import SAVED, together
from pipeloom.schedule.bounds import memory_bound, work_bound
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.solver.construct import LARGEST_WALKED, plain_orders, sequences_of
from pipeloom.solver.driver import WarmStart, best_of, warm_start
from pipeloom.solver.incumbent import Budget, Incumbent
from pipeloom.solver.instance import Instance, Recomputation, Sequences

# Orders that are improved in turn: more share the moves.
WALKED_ORDERS = 4
# Nodes that a turn evaluates: longer turns decide more rarely again.
NODES_OF_A_TURN = 100_000
SUFFIX = ", recomputed"

Choices = tuple[
    tuple[Recomputation, ...], ...
]  # stage -> the recomputations that a micro-batch passes through, lightest first


def choices_of(costs: Costs, stages: int) -> list[Choices]:
    """Return the ways to recompute: a whole stage, alone or behind its parts, in an action or in blocks with the backwards."""
    spread = StageCosts(costs, stages)
    activation, inputs = costs.per_stage("activation", stages), costs.per_stage("kept", stages)
    amounts = dict(costs.bytes)
    names = sorted(name for name in amounts if name.startswith(f"{SAVED}:") and "+" not in name)
    layer = costs.while_running("layer", stages) or activation
    unsaved = costs.while_running("forward", stages) or (0.0,) * stages
    saved = [(1 - share) * size for share, size in zip(inputs, activation, strict=True)]
    # Parts of more than all that is saved are in part inside each other, and free less together than their sum.
    summed = map(sum, zip(*(costs.share_of(name, stages) for name in names), strict=True))
    joint = len(names) > 1 and (together(names) in amounts or max(summed) <= 1 + TIME_TOLERANCE)
    parts: list[tuple[Recomputation, ...]] = []
    for group in [*([name] for name in names), *([names] if joint else [])]:
        letters = tuple(f"R:{name.partition(':')[2]}" for name in group)
        times = [spread.time_of(f"recompute:{name.partition(':')[2]}") for name in group]
        stage_sizes = [share * size for share, size in zip(costs.share_of(together(group), stages), saved, strict=True)]
        parts.append(
            tuple(
                Recomputation(letters, sum(time[s] for time in times), size, size, min(size, unsaved[s]))
                for s, size in enumerate(stage_sizes)
            )
        )
    least = list(map(min, saved, unsaved))
    whole = tuple(map(partial(Recomputation, ("R",)), spread.recompute, saved, saved, least))
    block = tuple(map(partial(Recomputation, ()), spread.recompute, saved, map(min, layer, saved), least))
    return [
        tuple(zip(*ladder, strict=True))
        for full in (whole, block)
        for ladder in [(full,), *((part, full) for part in parts)]
    ]


def bound_with_recomputation(instance: Instance) -> float:
    """Return a lower bound on schedules that may recompute: every micro-batch holds only what R needs, and R takes no time."""
    costs, stages = instance.costs, instance.stages
    activation, inputs, held = (costs.per_stage(name, stages) for name in ("activation", "kept", "held"))
    pending = tuple(late / share if share else 1.0 for late, share in zip(held, inputs, strict=True))
    least = replace(costs, activation=tuple(a * k for a, k in zip(activation, inputs, strict=True)), held=pending)
    sizes = instance.placement, instance.microbatches
    return max(
        work_bound(*sizes, costs, instance.objective),
        memory_bound(*sizes, least, instance.memory_limit, instance.objective),
    )


def search_with_recomputation(
    instances: Sequence[Instance], incumbent: Incumbent, budget: Budget, random: Random
) -> None:
    """Offer schedules that recompute to `incumbent`, until the budget is spent."""
    starts: list[WarmStart] = []
    for instance in instances:
        if instance.nodes > LARGEST_WALKED:
            continue
        best = incumbent.best
        for schedule in plain_orders(instance, [] if best is None else [best.schedule]):
            origin = best.origin if best is not None and schedule.name == best.schedule.name else schedule.name
            sequences = sequences_of(instance, schedule)
            starts += _started(instance, sequences, origin, incumbent)
            starts += _started(instance, with_whole_backwards(instance, sequences), origin, incumbent)
            if not budget.in_time and incumbent.best is not None:
                return
    walked = best_of(starts)[:WALKED_ORDERS]
    while walked and not (budget.over or incumbent.proved):
        for at, start in enumerate(walked):
            walked[at] = _walked(start, incumbent, budget, random)


def _walked(start: WarmStart, incumbent: Incumbent, budget: Budget, random: Random) -> WarmStart:
    """Improve the order of a start for a turn, decide again what is recomputed, and return the better of both."""
    instance = start.instance
    search, before = start.tabu(random), budget.used

    def carry_on(best: Sequences, value: float, done: int) -> bool:
        budget.used = before + done
        return budget.in_time

    moves = max(0, min(NODES_OF_A_TURN // instance.nodes, budget.allowed - budget.used))
    search.walk(moves, incumbent.bound, carry_on)
    start.value = search.value
    incumbent.offer(start.value, start.origin, instance, search.best)
    plain, origin = replace(instance, recomputed=()), start.origin.removesuffix(SUFFIX)
    again = _started(plain, moved(search.best, instance, plain), origin, incumbent)
    return min([start, *again], key=lambda one: one.value)


def _started(instance: Instance, sequences: Sequences, origin: str, incumbent: Incumbent) -> list[WarmStart]:
    """Return the order with each way to recompute that fits, offered to `incumbent`."""
    starts = []
    for choices in choices_of(instance.costs, instance.stages):
        recomputed = recomputed_for(instance, sequences, choices)
        if recomputed is None:
            continue
        other = replace(instance, recomputed=recomputed)
        start = warm_start(other, moved(sequences, instance, other), f"{origin}{SUFFIX}")
        if start is not None:
            starts.append(start)
            incumbent.bounds.setdefault(start.instance, incumbent.bounds[instance])
            incumbent.offer(start.value, start.origin, start.instance, start.sequences)
    return starts


def recomputed_for(
    instance: Instance, sequences: Sequences, choices: Choices
) -> tuple[tuple[int, Recomputation], ...] | None:
    """Return (F, its recomputation) of the micro-batches to recompute so that the sequences fit; None if none do."""
    table, m = instance.table, instance.microbatches
    limit, stride = instance.memory_limit + TIME_TOLERANCE, table.stride
    chosen_steps: dict[int, int] = {}

    def size(node: int, name: str = "freed") -> float:
        """A size of the recomputation of F `node`, by its name in `Recomputation`."""
        if node not in chosen_steps:
            return 0.0
        size: float = getattr(choices[node // m][chosen_steps[node]], name)
        return table.factors[node % m] * size

    for sequence in sequences:
        position = {node: at for at, operation in enumerate(sequence) for node in table.nodes[operation]}
        alive: set[int] = set()
        level = 0.0
        for operation in sequence:
            node = table.first[operation]
            kind, forward = divmod(node, stride)
            if kind == 0:
                alive.add(node)
            elif kind == 1:
                alive.discard(forward)
            after = table.change[operation] + (size(forward) if kind == 1 else 0.0)
            peak = level + max(0.0, after, size(forward, "held") if kind == 1 else 0.0)
            while peak > limit:
                steps = [(chosen_steps.get(f, -1) + 1, -position[stride + f], f) for f in alive]
                step, _, f = min((s for s in steps if s[0] < len(choices[s[2] // m])), default=(0, 0, -1))
                if f < 0:
                    return None
                before, running = size(f), size(f, "unsaved")
                chosen_steps[f] = step
                gain = size(f) - before
                level -= gain * (f != node)  # which is added when it ends
                peak -= gain - (f == node) * (size(f, "unsaved") - running)
            level += table.change[operation] - (size(node) if kind == 0 else 0.0)
            if kind == 1:
                level += size(forward)
    return tuple(sorted((f, choices[f // m][step]) for f, step in chosen_steps.items()))


def with_whole_backwards(instance: Instance, sequences: Sequences) -> Sequences:
    """Return sequences of single nodes with every W in a B, at the place of its I."""
    table, stride = instance.table, instance.table.stride
    return [[table.backward(n) if n >= stride else n for n in sequence if n < 2 * stride] for sequence in sequences]


def moved(sequences: Sequences, source: Instance, target: Instance) -> Sequences:
    """Return the sequences of one instance as those of another of the same sizes."""
    nodes, operation = source.table.nodes, target.table.operation
    return [[operation(*nodes[each]) for each in sequence] for sequence in sequences]
