"""Lower bounds, proofs and better sequences from constraint programming (OR-Tools CP-SAT, the extra `opt`).

One interval variable per action, with no overlap on a rank. Where a B is shorter than I and W, the interval of B is an
alternative to those of both. By the lemma of `instance`, the micro-batches of an operation type are in order, except that a
micro-batch with a B may overtake the W of an earlier one. Memory is a cumulative resource that a micro-batch occupies from F
until W (the share that is not held: until I); one that is recomputed, less until its I.

Domain: equal micro-batches, and costs under which no pair gains (`pairs_gain`). Blocking receivers are relaxed, so that bounds
stay valid: a receiver that could wait for both messages of a pair at once waits for only one of them.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

from pipeloom.errors import missing_packages
from pipeloom.limits import usable_cores
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences

# Conversion of costs to the integers that CP-SAT requires.
# Factors tried in turn, until all times are whole numbers: the smallest keeps the domains small.
FACTORS = (1, 2, 4, 5, 8, 10, 20, 100, 1000, 10_000)
# If none of them works, times are rounded down to multiples of 1 / finest: finer gives a tighter bound and a slower proof.
FINEST_FACTOR = 100_000
# The relative tolerance within which a value counts as equal to its bound, and the unit of memory.
RELATIVE_ROUNDING = 1e-6


@dataclass(frozen=True)
class Certificate:
    """Result of the solver.

    Attributes:
        bound: lower bound on the value of all sequences of this instance.
        sequences: sequences better than the given value, or None.
        value: the value of `sequences`, or the given value.
    """

    bound: float
    sequences: Sequences | None
    value: float


def certify(instance: Instance, value: float, seconds: float, hint: Sequences | None = None) -> Certificate:
    """Search for sequences better than `value`, starting from `hint`, and for a lower bound, for at most `seconds`.

    Costs that are no multiples of a ten-thousandth are rounded down for the bound. The sequences found are timed with the
    problem's own costs. Raises UsageError without OR-Tools.
    """
    cp_model = require_solver()
    times = _least_times(instance)
    factor = _factor(instance, times)
    # the difference of two times that were rounded down may be a unit larger than it was; a span has two of them
    slack = 2 if factor == FINEST_FACTOR and instance.objective == "span" else 0
    model = _Model(cp_model, instance, times, factor, math.ceil(value * factor - TIME_TOLERANCE) + slack)
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = min(8, max(2, usable_cores()))
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        # the sequences of the hint have this value, so they should satisfy the model: with a hint, this proves nothing
        return Certificate(value if hint is None else 0.0, None, value)
    bound = min(value, max(0.0, solver.best_objective_bound - slack) / factor)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        sequences = model.sequences(solver)
        timing = evaluate(instance, sequences)
        if timing is not None and instance.fits(sequences) and timing.value < value - TIME_TOLERANCE:
            return Certificate(min(bound, timing.value), sequences, timing.value)
    return Certificate(bound, None, value)


def require_solver() -> Any:
    """Return the module of CP-SAT. Raises UsageError if OR-Tools is not installed."""
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise missing_packages("a proof", ["OR-Tools"], "opt") from None


def _least_times(instance: Instance) -> list[float]:
    """Return node -> the shortest time for which it occupies its rank, in any pair.

    A receiver that is kept waiting (no `overlap_p2p`) waits in a pair for both messages at once: the wait of an F may be
    for the message of the backward beside it. That cannot be so for a rank's first F, which nothing can be paired with.
    """
    table, m, stride = instance.table, instance.microbatches, instance.stages * instance.microbatches
    times = table.time[: table.none]
    if instance.overlap_p2p:
        return times
    for stage, rank in enumerate(instance.placement):
        mates = [other for other, home in enumerate(instance.placement) if home == rank]
        longest = max(table.wait[stride + other * m] for other in mates)
        for node in range(stage * m + (stage == mates[0]), (stage + 1) * m):
            times[node] -= min(table.wait[node], longest)
    return times


def _factor(instance: Instance, times: list[float]) -> int:
    """Return the smallest factor that makes all times integers, or `FINEST_FACTOR` if none does."""
    table = instance.table
    values = {*times, *table.hop, *table.wait, *table.saved.values()}
    for factor in FACTORS:
        if all(abs(v * factor - round(v * factor)) < TIME_TOLERANCE for v in values):
            return factor
    return FINEST_FACTOR


class _Model:
    def __init__(self, cp_model: Any, instance: Instance, times: list[float], factor: int, most: int) -> None:
        # F of the first micro-batch in the first stage starts at 0. The path of that micro-batch, to the last stage and back,
        # lies within the span of that rank and passes every rank, so no rank ends later than two spans.
        horizon = most if instance.objective == "makespan" else 2 * most
        self.model = model = cp_model.CpModel()
        self.instance, self.factor = instance, factor
        table, m = instance.table, instance.microbatches
        time = [math.floor(value * factor + TIME_TOLERANCE) for value in times]
        hop = [math.floor(value * factor + TIME_TOLERANCE) for value in table.hop]
        self.start = start = [model.new_int_var(0, max(0, horizon - length), "") for length in time]
        self.end = end = [begin + length for begin, length in zip(start, time, strict=True)]
        self.whole: dict[int, Any] = {}
        intervals: list[list[Any]] = [[] for _ in range(instance.ranks)]
        for node, saved in table.saved.items():
            length = math.floor((times[node] + times[node + table.stride] - saved) * factor + TIME_TOLERANCE)
            intervals[table.rank[node]].append(self._alternative(node, time, length, horizon))
        on_rank: list[list[int]] = [[] for _ in range(instance.ranks)]
        for node in range(instance.nodes):
            on_rank[table.rank[node]].append(node)
            alone = [~self.whole[node]] if node in self.whole else []
            intervals[table.rank[node]].append(
                model.new_optional_fixed_size_interval_var(start[node], time[node], alone[0], "")
                if alone
                else model.new_fixed_size_interval_var(start[node], time[node], "")
            )
            if table.predecessor[node] != table.none:
                model.add(start[node] >= end[table.predecessor[node]] + hop[node])
            if table.weight_grad_of[node] != table.none:
                model.add(start[table.weight_grad_of[node]] >= end[node]).only_enforce_if(alone)
            if node % m:  # an I with its W in one B may overtake an earlier W
                in_order = alone if node >= 2 * table.stride else []
                model.add(start[node] >= end[node - 1]).only_enforce_if(in_order)
        for nodes, on_this in zip(on_rank, intervals, strict=True):
            model.add_no_overlap(on_this)
            self._memory(nodes, horizon)
        model.add(start[0] == 0)
        for stage in range(1, instance.stages):
            if instance.placement[stage] in instance.placement[:stage] or factor == FINEST_FACTOR:
                break  # with rounded times, sums of times do not give exact starts
            # Nothing comes before this F on its rank, so that it starts when its message arrives. It need not be the message that
            # arrives first: a rank that begins with a later micro-batch begins its span later.
            first = stage * m
            begins = [model.new_bool_var("") for _ in range(m if instance.objective == "span" else 1)]
            model.add_exactly_one(begins)
            for other, literal in enumerate(begins):
                model.add(start[first] == end[first - m + other] + hop[first]).only_enforce_if(literal)
        target = model.new_int_var(0, most, "")
        if instance.objective == "makespan":
            model.add_max_equality(target, end)
        else:
            for nodes in on_rank:
                # F of the rank's earliest stage, after its wait: everything else there comes after it
                first = start[min(nodes)] + math.floor(table.wait[min(nodes)] * factor + TIME_TOLERANCE)
                for node in nodes:
                    model.add(target >= end[node] - first)
        model.minimize(target)

    def _alternative(self, node: int, time: list[int], length: int, horizon: int) -> Any:
        """Let the I `node` and its W be one B of this length, and return the interval of the B."""
        model, start, weight = self.model, self.start, node + self.instance.table.stride
        self.whole[node] = self.whole[weight] = whole = model.new_bool_var("")
        for part in (node, weight):  # these may take longer alone than in the B
            start[part] = model.new_int_var(0, horizon, "")
            self.end[part] = model.new_int_var(0, horizon, "")
            model.add(self.end[part] == start[part] + time[part]).only_enforce_if(~whole)
            model.add(self.end[part] == start[node] + length).only_enforce_if(whole)
        model.add(start[weight] == start[node]).only_enforce_if(whole)
        return model.new_optional_fixed_size_interval_var(start[node], length, whole, "")

    def _memory(self, nodes: list[int], horizon: int) -> None:
        instance, model = self.instance, self.model
        stride, m = instance.stages * instance.microbatches, instance.microbatches
        if instance.memory_limit == math.inf:
            return
        alike, memory_limit = instance.factors[0], instance.memory_limit + TIME_TOLERANCE
        activation = [value * alike for value in instance.costs.per_stage("activation", instance.stages)]
        held = instance.costs.per_stage("held", instance.stages)
        forwards = [node for node in nodes if node < stride]
        stages = sorted({node // m for node in forwards})
        if (
            not instance.recomputed
            and self.whole.keys().isdisjoint(nodes)
            and len(stages) == 1
            and held[stages[0]] == 1
            and activation[stages[0]] > 0
        ):
            places = math.floor(memory_limit / activation[stages[0]] + TIME_TOLERANCE)
            for node in forwards[places:]:
                model.add(self.start[node] >= self.end[2 * stride + node - places])
            return
        # memory in millionths, activations rounded down and the memory limit rounded up, so that the bound stays valid
        parts, demands = [], []
        change, rise = instance.table.change, instance.table.rise
        for node in forwards:
            back, weight, level = stride + node, 2 * stride + node, change[node]
            spans = [
                (self.start[node], self.end[weight], level + change[back]),
                (self.start[node], self.end[back], -change[back]),
            ]
            if instance.recomputed:
                spans = [
                    (self.start[node], self.start[back], level),
                    (self.start[back], self.end[back], level + rise[back]),
                    (self.end[back], self.end[weight], level + change[back]),
                ]
            for begin, until, size in spans:
                if size > 0:
                    length = model.new_int_var(0, horizon, "")
                    parts.append(model.new_interval_var(begin, length, until, ""))
                    demands.append(math.floor(size / RELATIVE_ROUNDING + TIME_TOLERANCE))
        model.add_cumulative(parts, demands, math.ceil(memory_limit / RELATIVE_ROUNDING))

    def hint(self, sequences: Sequences) -> None:
        timing = evaluate(self.instance, sequences)
        if timing is None:
            return
        table = self.instance.table
        for operation in timing.order:
            nodes, begin = (
                table.nodes[operation],
                math.floor(timing.start[table.first[operation]] * self.factor + TIME_TOLERANCE),
            )
            for node in nodes:
                self.model.add_hint(self.start[node], begin)
            if nodes[0] in self.whole and nodes[0] < 2 * table.stride:
                self.model.add_hint(self.whole[nodes[0]], len(nodes) > 1)

    def sequences(self, solver: Any) -> Sequences:
        """Return the solution's order on every rank; of equal starts, nodes that take no time come first."""
        table = self.instance.table
        sequences: Sequences = [[] for _ in range(self.instance.ranks)]
        for node in range(self.instance.nodes):
            if node not in self.whole or not solver.value(self.whole[node]):
                sequences[table.rank[node]].append(node)
            elif node < 2 * table.stride:
                sequences[table.rank[node]].append(table.backward(node))

        def when(operation: int) -> tuple[int, int, int]:
            first = table.first[operation]
            return solver.value(self.start[first]), solver.value(self.end[first]), operation

        return [sorted(sequence, key=when) for sequence in sequences]
