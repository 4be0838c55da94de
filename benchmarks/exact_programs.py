"""The least makespan of small cases within a memory by constraint programming (the extra `opt`), for `memory_search.py --exact`.

Every micro-batch of a stage is saved as it is, recomputed in one of the search's ways directly before its backward, or copied in
four parts; each backward is an I and a W, or a B. Micro-batches of a stage and kind are in order. A first model waits whenever it
gains, which is fast to solve. Where that gains, in a second one everything starts, as in programs, at the end of something before
it (in its queue, a message, an entry that frees slots) or, for copies, when an earlier computation starts. How many slots there
are is not part of it: where more at one moment than at another would gain, the result is a bound that no program reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from pipeloom.schedule import Costs
from pipeloom.schedule.costs import StageCosts
from pipeloom.solver.exact import require_solver
from pipeloom.solver.recompute import choices_of

UNIT = 240  # of a time of 1: quarters of thirds are whole
PARTS = 4  # of a copy


def least_makespan(
    ranks: int, microbatches: int, costs: Costs, memory: float, longest: float, seconds: float
) -> tuple[float, float]:
    """Return (the best makespan up to `longest`, a lower bound), infinite for none: one stage per rank, equal micro-batches."""
    for eager in (False, True):
        model = _Model(ranks, microbatches, costs, memory, longest, eager)
        solver = model.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 2
        status = solver.solve(model.model)
        solved = status in (model.cp.OPTIMAL, model.cp.FEASIBLE)
        least = solver.objective_value / UNIT if solved else math.inf
        bound = math.inf if status == model.cp.INFEASIBLE else solver.best_objective_bound / UNIT
        if bound > longest - 0.01:
            break  # nothing is shorter
    return least, bound


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


class _Moment(NamedTuple):
    """A time, and the literals under which it is one."""

    when: Any
    literals: tuple[Any, ...] = ()


class _Model:
    def __init__(self, ranks: int, microbatches: int, costs: Costs, memory: float, longest: float, eager: bool) -> None:
        self.cp = require_solver()
        self.model = model = self.cp.CpModel()
        self.horizon = math.floor(UNIT * longest)
        self.costs, self.spread, self.ranks, self.microbatches = costs, StageCosts(costs, ranks), ranks, microbatches
        self.ways = choices_of(costs, ranks) if costs.recompute is not None else []
        self.start: dict[tuple[str, int, int], Any] = {}  # (F or I, stage, micro-batch)
        self.end: dict[tuple[int, int], Any] = {}  # of I or B
        self.arrivals: dict[tuple[str, int, int], list[_Moment]] = {}
        self.waits: list[tuple[Any, tuple[Any, ...], list[list[_Moment]], Any]] = []  # arguments of `one_of`
        makespan = self.time()
        for rank in range(ranks):
            self.queues: dict[str, list[Any]] = {"compute": [], "out": [], "in": []}
            self.held: list[tuple[Any, int]] = []
            self.work: list[Any] = []  # times of computations
            self.done: list[_Moment] = []  # ends of computations
            self.begun: list[_Moment] = []  # their starts
            self.freed: list[_Moment] = []  # ends of what frees slots
            self.out: list[_Moment] = []  # ends of copies
            self.back: list[_Moment] = []
            for microbatch in range(microbatches):
                model.add(makespan >= self.add(rank, microbatch))
            model.add(makespan >= sum(self.work))
            for intervals in self.queues.values():
                model.add_no_overlap(intervals)
            model.add_cumulative(*zip(*self.held, strict=True), round(memory * 1000))
        for rank in range(1, ranks):
            for microbatch in range(microbatches):
                for kind, to, when in (
                    ("F", rank, self.start["F", rank - 1, microbatch] + round(UNIT * self.spread.forward[rank - 1])),
                    ("I", rank - 1, self.end[rank, microbatch]),
                ):
                    arrival = when + round(UNIT * costs.hop(rank - 1, rank))
                    model.add(self.start[kind, to, microbatch] >= arrival)
                    self.arrivals[kind, to, microbatch].append(_Moment(arrival))
        for start, literals, moments, besides in self.waits if eager else ():
            self.one_of(start, literals, chain(*moments), besides)
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

    def one_of(self, time: Any, literals: Sequence[Any], moments: Iterable[_Moment], besides: Any) -> None:
        """Let a time that counts under `literals` be one of the moments, `besides` one."""
        those = []
        for moment in moments:
            if moment.when is not besides:
                those.append(literal := self.model.new_bool_var(""))
                self.model.add(time == moment.when).only_enforce_if(literal)
                self.model.add_bool_and(moment.literals).only_enforce_if(literal)
        self.model.add_bool_or(those).only_enforce_if(*literals)

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
        self.work.append(forward + input_grad + weight_grad)
        if microbatch:
            model.add(f >= self.start["F", rank, microbatch - 1] + forward)
            model.add(i >= self.end[rank, microbatch - 1])
        if rank + 1 == self.ranks:
            model.add(i >= f + forward)
        done, begun, freed = self.done, self.begun, self.freed
        sent = [_Moment(0)] if rank == 0 else []
        arrived = list[_Moment]()
        self.arrivals["F", rank, microbatch], self.arrivals["I", rank, microbatch] = sent, arrived
        recomputed = list[_Moment]()  # ends of R
        self.waits += [
            (f, (), [done, freed, sent], None),
            (i, (), [done, freed, arrived, recomputed], None),
            (w, (apart,), [done], None),
        ]
        done += [_Moment(f + forward), _Moment(end), _Moment(w + weight_grad, (apart,))]
        begun += [_Moment(f), _Moment(i), _Moment(w, (apart,))]
        freed.append(_Moment(end))

        def takes(extra: int, literal: Any) -> None:
            model.add(end == i + input_grad + extra).only_enforce_if(apart, literal)
            model.add(end == i + input_grad + weight_grad + extra).only_enforce_if(~apart, literal)

        literals = [model.new_bool_var("")]
        model.add(begin == i).only_enforce_if(literals[0])
        takes(0, literals[0])
        self.hold(f, end, activation, literals[0])
        for way in dict.fromkeys(way for choice in self.ways for way in choice[rank]):
            literals.append(again := model.new_bool_var(""))
            time = round(UNIT * way.time)
            self.work.append(time * again)
            if way.letters:
                model.add(i >= begin + time).only_enforce_if(again)
                recomputed.append(_Moment(begin + time, (again,)))
                self.waits.append((begin, (again,), [done, freed], None))
                begun.append(_Moment(begin, (again,)))
            else:
                model.add(begin == i).only_enforce_if(again)
            takes(0 if way.letters else time, again)
            self.hold(f, end, activation - way.freed, again)
            self.hold(begin, end, way.held, again)
        if costs.host_bandwidth < math.inf:
            literals.append(copied := model.new_bool_var(""))
            model.add(begin == i).only_enforce_if(copied)
            self.hold(f, end, kept * activation, copied)
            time, size = round(UNIT * spread.copy[rank] / PARTS), (1 - kept) * activation / PARTS
            ends = [(i + input_grad, apart), (i + input_grad + weight_grad, ~apart)]
            for part in range(1, PARTS + 1):
                out, back = self.time(), self.time()
                self.queues["out"].append(model.new_optional_fixed_size_interval_var(out, time, copied, ""))
                self.queues["in"].append(model.new_optional_fixed_size_interval_var(back, time, copied, ""))
                ready = f + forward * part // PARTS
                model.add(out >= ready).only_enforce_if(copied)
                model.add(back >= out + time).only_enforce_if(copied)
                ends += [
                    (back + time + input_grad * part // PARTS, apart),
                    (back + time + (input_grad + weight_grad) * part // PARTS, ~apart),
                ]
                there = _Moment(out + time, (copied,))
                self.waits.append((out, (copied,), [[_Moment(ready)], self.out, begun], None))
                self.waits.append((back, (copied,), [[there], self.back, begun, freed], i))
                self.out.append(there)
                self.back.append(_Moment(back + time, (copied,)))
                freed.append(there)
                self.hold(f, out + time, size, copied)
                self.hold(back, end, size, copied)
            for moment, literal in ends:
                model.add(end >= moment).only_enforce_if(copied, literal)
            self.waits.append((end, (copied,), [[_Moment(moment, (literal,)) for moment, literal in ends]], None))
        model.add_exactly_one(literals)
        return last
