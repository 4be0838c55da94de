"""The least makespan of small cases within a memory by constraint programming (the extra `opt`), for `memory_search.py --exact`.

Every micro-batch of a stage is saved as it is, recomputed in one of the search's ways directly before its backward, or copied in
four parts; each backward is an I and a W, or a B. Micro-batches of a stage and kind are in order. Waits are free, while a program
waits for messages, queues and slots alone: where a program could only wait longer, the result is a bound and not reached.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from pipeloom.schedule import Costs
from pipeloom.schedule.costs import StageCosts
from pipeloom.solver.exact import require_solver
from pipeloom.solver.recompute import choices_of

UNIT = 240  # of a time of 1: quarters of thirds are whole
PARTS = 4  # of a copy


def least_makespan(ranks: int, microbatches: int, costs: Costs, memory: float, seconds: float) -> tuple[float, float]:
    """Return (the best makespan, a lower bound): one stage per rank, equal micro-batches."""
    model = _Model(ranks, microbatches, costs, memory)
    solver = model.cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model.model)
    solved = status in (model.cp.OPTIMAL, model.cp.FEASIBLE)
    return solver.objective_value / UNIT if solved else math.inf, solver.best_objective_bound / UNIT


def small_case(seed: int) -> tuple[int, int, Costs, float]:
    """Return (ranks, micro-batches, costs, memory)."""
    random = Random(seed)
    ranks = random.choice([1, 2, 2, 3])
    microbatches = {1: random.choice([2, 3, 4]), 2: random.choice([2, 3]), 3: 2}[ranks]
    forward, backward = random.choice([1, 1, 1.5, 2]), (random.choice([1, 1, 1.5, 2]), random.choice([1, 1, 0.5]))
    ways = random.choice(["R", "O", "O", "RO", "RO"])
    costs = Costs(
        forward,
        *backward,
        random.choice([0, 0, 0.5]),
        kept=0.1,
        held=random.choice([0.5, 0.7, 1]),
        recompute=random.choice([forward, forward / 2]) if "R" in ways else None,
        host_bandwidth=0.9 / (forward * random.choice([0.5, 1, 1, 2])) if "O" in ways else math.inf,
    )
    return ranks, microbatches, costs, random.choice([1.2, 1.5, 2.0, 2.2])


class _Model:
    def __init__(self, ranks: int, microbatches: int, costs: Costs, memory: float) -> None:
        self.cp = require_solver()
        self.model = model = self.cp.CpModel()
        spread = StageCosts.of(costs, ranks)
        whole = sum(map(sum, (spread.forward, spread.input_grad, spread.weight_grad)))
        self.horizon = round(UNIT * (4 * microbatches * whole + 100))
        self.costs, self.spread, self.ranks = costs, spread, ranks
        self.ways = choices_of(costs, ranks) if costs.recompute is not None else []
        self.start: dict[tuple[str, int, int], Any] = {}  # (F or I, stage, micro-batch)
        self.end: dict[tuple[int, int], Any] = {}  # of I or B
        makespan = self.time()
        for rank in range(ranks):
            self.queues: dict[str, list[Any]] = {"compute": [], "out": [], "in": []}
            self.held: list[tuple[Any, int]] = []
            for microbatch in range(microbatches):
                model.add(makespan >= self.add(rank, microbatch))
            for intervals in self.queues.values():
                model.add_no_overlap(intervals)
            model.add_cumulative(*zip(*self.held, strict=True), round(memory * 1000))
        for rank in range(1, ranks):
            hop = round(UNIT * costs.hop(rank - 1, rank))
            for microbatch in range(microbatches):
                sent = self.start["F", rank - 1, microbatch] + round(UNIT * spread.forward[rank - 1])
                model.add(self.start["F", rank, microbatch] >= sent + hop)
                model.add(self.start["I", rank - 1, microbatch] >= self.end[rank, microbatch] + hop)
        model.minimize(makespan)

    def time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def hold(self, begin: Any, end: Any, size: float, literal: Any = None) -> None:
        if size > 0:
            length = self.time()
            interval = (
                self.model.new_interval_var(begin, length, end, "")
                if literal is None
                else self.model.new_optional_interval_var(begin, length, end, literal, "")
            )
            self.held.append((interval, round(size * 1000)))

    def add(self, rank: int, microbatch: int) -> Any:
        """Add a micro-batch of a rank's stage, and return when it ends."""
        model, costs, spread = self.model, self.costs, self.spread
        forward, input_grad, weight_grad = (
            round(UNIT * each[rank]) for each in (spread.forward, spread.input_grad, spread.weight_grad)
        )
        activation, held, kept = (costs.per_stage(name, self.ranks)[rank] for name in ("activation", "held", "kept"))
        f, begin, i, end, w, last = (self.time() for _ in range(6))  # `begin`: of R, if it is an action
        self.start["F", rank, microbatch], self.start["I", rank, microbatch], self.end[rank, microbatch] = f, i, end
        apart = model.new_bool_var("")
        compute = self.queues["compute"]
        compute.append(model.new_fixed_size_interval_var(f, forward, ""))
        compute.append(model.new_interval_var(begin, self.time(), end, ""))
        compute.append(model.new_optional_fixed_size_interval_var(w, weight_grad, apart, ""))
        model.add(w >= end)
        model.add(last == w + weight_grad).only_enforce_if(apart)
        model.add(last == end).only_enforce_if(~apart)
        self.hold(end, last, held * activation)
        if microbatch:
            model.add(f >= self.start["F", rank, microbatch - 1] + forward)
            model.add(i >= self.end[rank, microbatch - 1])
        if rank + 1 == self.ranks:
            model.add(i >= f + forward)

        def takes(extra: int, *literals: Any) -> None:
            model.add(end >= i + input_grad + extra).only_enforce_if(*literals)
            model.add(end >= i + input_grad + weight_grad + extra).only_enforce_if(~apart, *literals)

        literals = [model.new_bool_var("")]
        model.add(begin == i).only_enforce_if(literals[0])
        takes(0, literals[0])
        self.hold(f, end, activation, literals[0])
        for way in dict.fromkeys(way for choice in self.ways for way in choice[rank]):
            literals.append(again := model.new_bool_var(""))
            time = round(UNIT * way.time)
            model.add(i >= begin + time if way.letters else begin == i).only_enforce_if(again)
            takes(0 if way.letters else time, again)
            self.hold(f, end, activation - way.freed, again)
            self.hold(begin, end, way.held, again)
        if costs.host_bandwidth < math.inf:
            literals.append(copied := model.new_bool_var(""))
            model.add(begin == i).only_enforce_if(copied)
            takes(0, copied)
            self.hold(f, end, kept * activation, copied)
            time, size = round(UNIT * spread.copy[rank] / PARTS), (1 - kept) * activation / PARTS
            for part in range(1, PARTS + 1):
                out, back = self.time(), self.time()
                self.queues["out"].append(model.new_optional_fixed_size_interval_var(out, time, copied, ""))
                self.queues["in"].append(model.new_optional_fixed_size_interval_var(back, time, copied, ""))
                model.add(out >= f + forward * part // PARTS).only_enforce_if(copied)
                model.add(back >= out + time).only_enforce_if(copied)
                model.add(end >= back + time + input_grad * part // PARTS).only_enforce_if(copied)
                whole = (input_grad + weight_grad) * part // PARTS
                model.add(end >= back + time + whole).only_enforce_if(copied, ~apart)
                self.hold(f, out + time, size, copied)
                self.hold(back, end, size, copied)
        model.add_exactly_one(literals)
        return last
