"""Certificates by constraint programming (OR-Tools CP-SAT, the extra `opt`): a better order, or a proof that there is none.

One interval an action, none at once on a rank; by the lemma of `problem`, the micro-batches of a letter in order; memory as
a resource that a micro-batch takes from F until W (the share that is not held: until I).
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from typing import Any

from pipeloom.errors import UsageError
from pipeloom.solver.evaluation import evaluate
from pipeloom.solver.problem import EPS, Problem, Words

FACTORS = (1, 2, 4, 5, 8, 10, 20, 100, 1000, 10_000)
FINE = 100_000
ROUNDING = 1e-6


@dataclass(frozen=True)
class Certificate:
    """What the solver found.

    Attributes:
        bound: no words of this problem have a lower value.
        words: better ones than were given, or None.
        value: theirs, or the one given.
    """

    bound: float
    words: Words | None
    value: float


def certify(problem: Problem, value: float, seconds: float, hint: Words | None = None) -> Certificate:
    """Looks for words better than `value`, starting from `hint`, and for a lower bound, for at most `seconds`.

    Costs that are no multiples of a ten-thousandth are rounded down for the bound. Raises UsageError without OR-Tools.
    """
    cp_model = require_solver()
    factor = _factor(problem)
    model = _Model(cp_model, problem, factor, math.ceil(value * factor - EPS))
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = min(8, max(2, os.cpu_count() or 1))
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        assert hint is None, "the words given are a solution"
        return Certificate(value, None, value)
    bound = min(value, max(0.0, solver.best_objective_bound) / factor)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        words = model.words(solver)
        found = evaluate(problem, words)
        if found is not None and problem.fits(words) and found.value < value - EPS:
            return Certificate(min(bound, found.value), words, found.value)
    return Certificate(bound, None, value)


def require_solver() -> Any:
    """OR-Tools' module; raises UsageError where it is not installed."""
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise UsageError("proofs need OR-Tools: pip install 'pipeloom[opt]'") from None


def _factor(problem: Problem) -> int:
    """What makes all times whole numbers, or `FINE`."""
    tables = problem.tables
    values = {*tables.time, *tables.hop}
    for factor in FACTORS:
        if all(abs(v * factor - round(v * factor)) < EPS for v in values):
            return factor
    return FINE


class _Model:
    def __init__(self, cp_model: Any, problem: Problem, factor: int, most: int) -> None:
        # The first action of all is F of the first stage's first micro-batch, at 0; the way of that micro-batch, to the last
        # stage and back, lies in one span and passes every rank: no rank ends later than two spans.
        horizon = most if problem.objective == "makespan" else 2 * most
        self.model = model = cp_model.CpModel()
        self.problem, self.factor = problem, factor
        tables, m = problem.tables, problem.microbatches
        time = [math.floor(value * factor + EPS) for value in tables.time]
        hop = [math.floor(value * factor + EPS) for value in tables.hop]
        self.start = start = [model.new_int_var(0, max(0, horizon - length), "") for length in time]
        self.end = end = [begin + length for begin, length in zip(start, time, strict=True)]
        on_rank: list[list[int]] = [[] for _ in range(problem.ranks)]
        for node in range(problem.nodes):
            on_rank[tables.rank[node]].append(node)
            if tables.need[node] != tables.none:
                model.add(start[node] >= end[tables.need[node]] + hop[node])
            if tables.own_weight[node] != tables.none:
                model.add(start[tables.own_weight[node]] >= end[node])
            if node % m:
                model.add(start[node] >= end[node - 1])
        for nodes in on_rank:
            model.add_no_overlap([model.new_fixed_size_interval_var(start[node], time[node], "") for node in nodes])
            self._memory(nodes, horizon)
        model.add(start[0] == 0)
        for stage in range(1, problem.stages):
            if problem.placement[stage] in problem.placement[:stage]:
                break
            first = stage * m  # nothing comes before it on its rank, so that it starts when its message arrives
            model.add(start[first] == end[first - m] + hop[first])
        target = model.new_int_var(0, most, "")
        if problem.objective == "makespan":
            model.add_max_equality(target, end)
        else:
            for nodes in on_rank:
                first = start[min(nodes)]  # F of the rank's earliest stage: everything else there comes after it
                for node in nodes:
                    model.add(target >= end[node] - first)
        model.minimize(target)

    def _memory(self, nodes: list[int], horizon: int) -> None:
        problem, model = self.problem, self.model
        stride, m = problem.stages * problem.microbatches, problem.microbatches
        if problem.room == math.inf:
            return
        activation = problem.costs.per_stage("activation", problem.stages)
        held = problem.costs.per_stage("held", problem.stages)
        forwards = [node for node in nodes if node < stride]
        stages = sorted({node // m for node in forwards})
        if len(stages) == 1 and held[stages[0]] == 1 and activation[stages[0]] > 0:
            places = math.floor(problem.room / activation[stages[0]] + EPS)
            for node in forwards[places:]:
                model.add(self.start[node] >= self.end[2 * stride + node - places])
            return
        # memory in millionths, activations rounded down and the room up: the bound stays one
        parts, demands = [], []
        for node in forwards:
            stage = node // m
            for share, until in ((held[stage], 2 * stride + node), (1 - held[stage], stride + node)):
                if share * activation[stage] > 0:
                    length = model.new_int_var(0, horizon, "")
                    parts.append(model.new_interval_var(self.start[node], length, self.end[until], ""))
                    demands.append(math.floor(share * activation[stage] / ROUNDING + EPS))
        model.add_cumulative(parts, demands, math.ceil(problem.room / ROUNDING - EPS))

    def hint(self, words: Words) -> None:
        found = evaluate(self.problem, words)
        if found is not None:
            for node, variable in enumerate(self.start):
                self.model.add_hint(variable, math.floor(found.start[node] * self.factor + EPS))

    def words(self, solver: Any) -> Words:
        """The order of the solution on every rank; where starts are equal, what takes no time goes first."""
        kept: Words = [[] for _ in range(self.problem.ranks)]
        for node in range(self.problem.nodes):
            kept[self.problem.tables.rank[node]].append(node)

        def when(node: int) -> tuple[int, int, int]:
            return solver.value(self.start[node]), solver.value(self.end[node]), node

        return [sorted(row, key=when) for row in kept]
