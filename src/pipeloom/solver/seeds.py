"""Where the search starts: every one-route family that fits, and list scheduling by simple rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipeloom.errors import PipeloomError
from pipeloom.schedule.actions import Action, KindName
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families import build
from pipeloom.schedule.families.greedy import NoWayOn, Rule, line_of, programs_along, programs_of
from pipeloom.schedule.families.interleaved import chunk_order, round_sizes
from pipeloom.schedule.families.layout import warmup_then_alternate
from pipeloom.schedule.model import Schedule, parts
from pipeloom.solver.problem import EPS, Problem, Words

ONE_CHUNK = ("1f1b", "zb-h1", "zb-h2", "zb-auto", "gpipe", "1f1b-overlap")
LOOPED = ("interleaved", "interleaved-zb", "looped-bfs", "interleaved-overlap")
VEE = ("zbv", "v-half", "v-min", "dualpipev", "hanayo")
CHEAP = ("1f1b", "interleaved", "zb-h1", "zb-h2")
ROUNDS = ("zbv", "v-half", "zb-auto")
SLOW = 60_000
FEW = 200_000


@dataclass(frozen=True)
class Seed:
    """Words to start from, and where they come from."""

    origin: str
    words: Words


def family_schedules(
    placement: Sequence[int], microbatches: int, costs: Costs, room: float, only: Sequence[str] = ()
) -> Iterator[Schedule]:
    """Every one-route family on this placement, or on one that becomes it when each stage is cut into equal runs.

    A family of v' chunks, v' a divisor of v, is made for stages of v / v' stages each and then cut (`cut`). Families that
    refuse the sizes or do not fit the room are left out. `only` these names; else, for large sizes, only the cheap ones.
    """
    stages, ranks = len(placement), max(placement) + 1
    large = 3 * stages * microbatches > SLOW
    for run in range(1, stages // ranks + 1):
        merged = [placement[at] for at in range(0, stages, run)]
        if stages % run or [rank for rank in merged for _ in range(run)] != list(placement):
            continue
        chunks, rough = len(merged) // ranks, merge(costs, stages, run)
        for name, options in _candidates(merged, ranks, chunks, room):
            if (only or large) and name not in (only or CHEAP):
                continue
            try:
                made = build(name, ranks, microbatches, chunks if name in LOOPED else None, options, rough)
            except PipeloomError:
                continue
            if list(made.placement) == merged:
                yield cut(made, run) if run > 1 else made


def _candidates(merged: Sequence[int], ranks: int, chunks: int, room: float) -> Iterator[tuple[str, dict[str, Any]]]:
    if chunks == 1:
        yield from ((name, {"memory": room} if name == "zb-auto" and room < math.inf else {}) for name in ONE_CHUNK)
    elif list(merged) == [at % ranks for at in range(len(merged))]:
        yield from ((name, {}) for name in LOOPED)
        yield from ((name, {"group_size": ranks}) for name in LOOPED[:2])
    else:
        yield from ((name, {"waves": chunks // 2} if name == "hanayo" else {}) for name in VEE)


def merge(costs: Costs, stages: int, run: int) -> Costs:
    """The costs of stages made of `run` consecutive ones each."""
    if run == 1:
        return costs

    def summed(name: str) -> tuple[float, ...]:
        values = costs.per_stage(name, stages)
        return tuple(sum(values[at : at + run]) for at in range(0, stages, run))

    activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
    kept = [a * h for a, h in zip(activation, held, strict=True)]
    whole = summed("activation")
    shares = tuple(
        min(1.0, sum(kept[at : at + run]) / whole[at // run]) if whole[at // run] else 1.0
        for at in range(0, stages, run)
    )
    return replace(
        costs,
        forward=summed("forward"),
        input_grad=summed("input_grad"),
        weight_grad=summed("weight_grad"),
        activation=whole,
        held=shares,
        all_to_all=0.0,
        pair=None,
        pair_split=None,
        backward=None,
    )


def cut(schedule: Schedule, run: int) -> Schedule:
    """The same schedule on stages cut into `run` each: F through them in order, I and W through them in reverse."""
    programs: list[list[Action]] = []
    for program in schedule.programs:
        row: list[Action] = []
        for action in (action for cell in program for action in parts(cell)):
            low = action.stage * run
            down = range(low + run - 1, low - 1, -1)
            if action.kind == "F":
                row += [Action("F", stage, action.microbatch) for stage in range(low, low + run)]
            for kind in ("I", "W"):
                if action.kind in ("B", kind):
                    row += [Action(kind, stage, action.microbatch) for stage in down]
        programs.append(row)
    return Schedule.of(
        programs,
        placement=[rank for rank in schedule.placement for _ in range(run)],
        microbatches=schedule.microbatches,
        name=schedule.name,
        options=dict(schedule.options),
    )


def words_of(problem: Problem, schedule: Schedule) -> Words:
    """The schedule's words: every B an I and a W, every pair its parts. Neither makes it longer, where pairs do not gain."""
    return problem.words_of(
        [[(action.kind, action.stage) for cell in program for action in parts(cell)] for program in schedule.programs]
    )


def grown(problem: Problem, first_rule: bool = False) -> Iterator[Seed]:
    """List scheduling by rules (or the first one), under several limits a stage; what gets stuck is left out.

    Micro-batches are taken as alike.
    """
    problem = problem.even
    rooms = [problem.room] * problem.ranks
    rules = list(product((False, True), (True, False) if problem.stages > problem.ranks else (True,), (0.0, 0.5, 1.0)))
    for caps in _caps(problem):
        line = line_of(problem.placement, problem.microbatches, problem.costs, rooms, caps)
        for turns, late, patience in rules[:1] if first_rule else rules:
            try:
                programs = programs_of(line, Rule(turns, late, patience))
            except NoWayOn:
                continue
            yield Seed("list scheduling", problem.words_of([[a[:2] for a in program] for program in programs]))


def by_rounds(problem: Problem, patience: Sequence[float] = (1.0, 0.5)) -> Iterator[Seed]:
    """On a loop: interleaved's order of F and I, its warm-up cut to the room, and W where they fit or make room.

    For the memories between those that the families take. Nothing where the order gets stuck.
    """
    problem = problem.even
    p, m, chunks = problem.ranks, problem.microbatches, problem.stages // problem.ranks
    if chunks < 2 or list(problem.placement) != [at % p for at in range(problem.stages)]:
        return
    sizes = round_sizes(p, m)
    order = chunk_order(sizes, chunks)
    largest = max(problem.costs.per_stage("activation", problem.stages))
    for slope, share in product((1, 2), patience):
        # what the warm-up needs, and no more, so that weight gradients are not put off to the end
        room = min(problem.room, largest * (slope * (p - 1) + (chunks - 1) * max(sizes) + 1))
        line = line_of(problem.placement, m, problem.costs, [room] * p)
        words: list[list[tuple[KindName, int]]] = []
        for rank in range(p):
            forwards: list[tuple[KindName, int]] = [("F", c * p + rank) for _, c in order]
            backwards: list[tuple[KindName, int]] = [("I", (chunks - 1 - c) * p + rank) for _, c in order]
            warmup = slope * (p - rank - 1) + (chunks - 1) * max(sizes)
            words.append(list(warmup_then_alternate(forwards, backwards, warmup)))
        try:
            programs = programs_along(line, words, share)
        except NoWayOn:
            continue
        yield Seed("interleaved rounds", problem.words_of([[a[:2] for a in program] for program in programs]))


def few_of(problem: Problem) -> Iterator[tuple[Problem, Words, str]]:
    """For large sizes: words for some of the micro-batches, and where they come from.

    Families in rounds of p, whose stretches of p micro-batches repeat; and list scheduling. What is missing is a multiple of p,
    or of twelve, which periods of several lengths divide.
    """
    base, p, m = problem.even, problem.ranks, problem.microbatches
    rounds = replace(base, microbatches=min(m, 3 * p + m % p))
    if rounds.nodes <= FEW:
        for seed in by_rounds(rounds, (1.0,)):
            yield rounds, seed.words, seed.origin
        for made in family_schedules(rounds.placement, rounds.microbatches, base.costs, base.room, ROUNDS):
            yield rounds, words_of(rounds, made), made.name
    some = FEW // (6 * problem.stages)
    few = replace(
        base, microbatches=m - max(0, -(-(m - some) // 12) * 12) if m > 12 and some > 12 else min(m, some + 1)
    )
    for seed in grown(few, first_rule=True):
        yield few, seed.words, seed.origin


def _caps(problem: Problem) -> list[tuple[float, ...]]:
    """Limits on the micro-batches of a stage: none, places kept free for later stages, and by how long a stage holds them."""
    place, stages = problem.placement, problem.stages
    none = (math.inf,) * stages
    if stages == problem.ranks or problem.room == math.inf:
        return [none]
    places = math.floor(problem.room / max(problem.costs.per_stage("activation", stages)) + EPS)
    later = [sum(1 for other in range(stage + 1, stages) if place[other] == place[stage]) for stage in range(stages)]
    kept = tuple(max(1.0, places - count) for count in later)
    life = [stages - stage for stage in range(stages)]
    whole = [sum(life[other] for other in range(stages) if place[other] == place[stage]) for stage in range(stages)]
    shared = tuple(max(1.0, float(round(places * own / all_))) for own, all_ in zip(life, whole, strict=True))
    single = (1.0,) * stages  # fits wherever anything does: growth cannot get stuck under it
    return list(dict.fromkeys([none, kept, shared, single]))
