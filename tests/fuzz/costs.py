"""Random costs: the simulator against another one, bounds against every schedule at hand, proofs against enumeration.

A case is a schedule (a family's, or one written at random: any order that its dependencies allow, fused, split and paired
backwards, one route or two) and costs with any of their fields drawn. What is checked:

* every start and end of `simulate`, and its peaks, are those of the second simulator (both ways of timing messages);
* the critical path has no gap, and the solver's own evaluation of the schedule's words is the simulator's;
* no bound (`lower_bound`, the search's with and without pairs, both objectives) is above what the schedule reaches;
* every `ENUMERATED`-th case: nor above the optimum of a small instance, which is found by enumeration;
* every `PROVED`-th case: a search with a proof claims nothing that the enumeration contradicts, and times its own
  schedule as the simulator does.

A case that fails is shrunk (fewer micro-batches, default costs, whole numbers) and printed as a line of Python.
"""

from __future__ import annotations

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from random import Random
from typing import Any

import pipeloom as pl
from fuzz._brute_force import least
from fuzz._loop import run_cases, smallest
from fuzz._simulator import Times, actions_of, memory_peaks, peak_bytes, simulated_spans
from pipeloom.errors import CapacityError, PipeloomError, UsageError
from pipeloom.schedule import Action, Costs, Pair, Schedule, check, lower_bound, simulate
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.transforms import recompute, transformed
from pipeloom.solver.bounds import bound_of, pair_bound
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance

CASES = 10_000
ENUMERATED, PROVED = 40, 250
LARGEST = 24  # actions (F, I and W) of an instance that is enumerated
PER_STAGE = ("forward", "input_grad", "weight_grad", "backward", "activation", "held", "all_to_all")
CHOICES = ("simulation", "enumeration", "proof")


@dataclass(frozen=True)
class Case:
    """One case; its schedule follows from the sizes and the seed.

    Attributes:
        family: a family's name, or "random".
        placement: stage -> rank of a random schedule; a family's is its own, for as many ranks.
        routes: 1, or 2: the second half of the stages is a second route.
        kind: what is checked: one of `CHOICES`.
        again: what is recomputed of a random half of the micro-batches: "", or the word of the transform.
        queues: transforms that add copies, gathers and sums, which run beside the computation.
        room: the memory of an enumeration or a proof, in multiples of what one micro-batch takes at least.
    """

    family: str
    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    routes: int = 1
    overlap_p2p: bool = True
    kind: str = "simulation"
    room: float = 1.0
    seed: int = 0
    again: str = ""
    queues: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Case({', '.join(_changed(self))})"


def _changed(value: Any) -> Iterator[str]:
    """name=value of a dataclass's fields that are not at their default."""
    for field in fields(value):
        one = getattr(value, field.name)
        if field.default is MISSING or one != field.default:
            text = f"Costs({', '.join(_changed(one))})" if isinstance(one, Costs) else repr(one)
            yield f"{field.name}={text}"


def random_case(seed: int) -> Case:
    """The case of this seed."""
    random = Random(seed)
    kind = "proof" if seed % PROVED == 0 else "enumeration" if seed % ENUMERATED == 0 else "simulation"
    family = "random" if kind != "simulation" or random.random() < 0.7 else random.choice(sorted(FAMILIES))
    ranks = random.choice([1, 2, 2, 3, 4])
    stages = ranks * random.choice([1, 1, 2, 2, 3])
    microbatches = random.randint(1, 7)
    routes = 1
    if family == "random":
        if kind != "simulation":
            ranks, stages = random.choice([(1, 1), (1, 2), (2, 2), (2, 2), (2, 4), (3, 3), (2, 3)])
            microbatches = random.randint(1, LARGEST // 3 // stages)
        elif stages % 2 == 0 and random.random() < 0.3:
            routes = 2
        placement = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
        if random.random() < 0.5:
            random.shuffle(placement)
    else:
        schedule = build_family(family, ranks, microbatches)
        placement, microbatches = list(schedule.placement), schedule.microbatches
    return Case(
        family,
        tuple(placement),
        microbatches,
        random_costs(random, len(placement), max(placement) + 1, microbatches, kind),
        routes,
        random.random() < 0.7,
        kind,
        random.choice([1.0, 1.0, 1.5, 2.0, 3.0, math.inf]),
        seed,
        random.choice(["", "block", "whole", "norms"]) if kind == "simulation" else "",
        random_queues(random) if kind == "simulation" and random.random() < 0.3 else (),
    )


def random_queues(random: Random) -> tuple[str, ...]:
    copies = random.choice([(), ("offload",), ("offload=1/2",), ("offload=3/3",)])
    return (*copies, *random.choice([(), ("shard=1",), ("shard=2",), ("reduce-gradients=1",), ("reduce-gradients=2",)]))


def build_family(name: str, ranks: int, microbatches: int) -> Schedule:
    """The family at these sizes, or at the nearest larger ones that it takes."""
    for more in range(12):
        for p in (ranks, ranks + 1):
            try:
                return build(name, p, microbatches + more)
            except PipeloomError:
                continue
    raise AssertionError(f"{name} takes no sizes near {ranks} ranks and {microbatches} micro-batches")


def random_costs(random: Random, stages: int, ranks: int, microbatches: int, kind: str = "simulation") -> Costs:
    """Any field drawn, many left alone; whole numbers, zeros, fractions and extremes."""
    grain: Callable[[], float] = random.choice(
        [
            lambda: float(random.randint(0, 5)),
            lambda: float(random.randint(1, 30)),
            lambda: float(random.randint(1, 30)),
            lambda: random.uniform(0, 3),
            lambda: random.choice([0.0, 1.0, 1e-3, 1e3]),
            lambda: 0.0,
        ]
    )

    def one_or_each(draw: Callable[[], float]) -> Any:
        return draw() if random.random() < 0.5 else tuple(draw() for _ in range(stages))

    drawn: dict[str, Any] = {name: one_or_each(grain) for name in ("forward", "input_grad", "weight_grad")}

    def sometimes(name: str, share: float, make: Callable[[], Any]) -> None:
        if random.random() < share:
            drawn[name] = make()

    def matrix(size: int, draw: Callable[[], float]) -> Any:
        return tuple(tuple(draw() for _ in range(size)) for _ in range(size))

    def pair() -> Any:
        return matrix(stages, grain) if random.random() < 0.4 else one_or_each(grain)

    sometimes("p2p", 0.6, lambda: grain() / 2 if random.random() < 0.5 else matrix(ranks, lambda: grain() / 2))
    sometimes("message", 0.3, grain)
    sometimes("bandwidth", 0.3, lambda: random.choice([0.5, 1.0, 2.0, 100.0]))
    sometimes("activation", 0.4, lambda: one_or_each(lambda: random.choice([0.0, 0.5, 1.0, 2.0, random.uniform(0, 3)])))
    sometimes("held", 0.4, lambda: one_or_each(lambda: random.choice([0.0, 0.5, 1.0, random.random()])))
    sometimes("all_to_all", 0.25, lambda: one_or_each(lambda: random.choice([0.0, 0.3, 0.5, 1.0])))
    sometimes("pair", 0.15, pair)
    sometimes("pair_split", 0.1, pair)
    sometimes("backward", 0.3, lambda: one_or_each(grain))
    if kind == "simulation":
        sometimes("recompute", 0.5, lambda: one_or_each(grain))
        sometimes("kept", 0.5, lambda: one_or_each(random.random))
        sometimes("parts", 0.5, lambda: {"norms": grain()})
        sometimes("host_bandwidth", 0.5, lambda: random.choice([2.0, 10.0, 30.0]))
        sometimes("collective_bandwidth", 0.5, lambda: random.choice([1.0, 5.0, 20.0]))
        names = {
            "params": random.uniform(0, 20),
            "grads": random.uniform(0, 20),
            "saved": 10.0,
            "saved:norms": random.uniform(0, 10),
            "kept": 2.0,
            "pending": random.uniform(0, 12),
        }
        sometimes("bytes", 0.5, lambda: names)
    factors = [lambda: [random.choice([0.5, 2.0, 3.0])] * microbatches]
    if kind != "proof":
        factors.append(lambda: [random.choice([0.0, 0.5, 1.0, 2.0, 7.0]) for _ in range(microbatches)])
    sometimes("microbatch", 0.3, lambda: tuple(random.choice(factors)()))
    return Costs(**drawn)


def schedule_of(case: Case) -> Schedule:
    """The case's family, or a schedule that grows action by action, each drawn among those that can run."""
    if case.family != "random":
        return build_family(case.family, max(case.placement) + 1, case.microbatches)
    random, grown = Random(case.seed), Grown(case)
    paired, eager = (random.choice([0.0, 0.5, 1.0]) for _ in range(2))
    while grown.left:
        rank = random.randrange(len(grown.programs))
        forwards, backwards, weights = grown.ready(rank)
        if forwards and backwards and random.random() < paired:
            grown.add(rank, Pair(random.choice(forwards), random.choice(backwards)))
            continue
        first, rest = (backwards, forwards) if random.random() < eager else (forwards, backwards)
        kinds = [kind for kind in (first, weights, rest) if kind]
        if kinds:
            grown.add(rank, random.choice(kinds[0] if random.random() < 0.7 else random.choice(kinds)))
    return Schedule.of(
        grown.programs,
        placement=case.placement,
        microbatches=case.microbatches,
        name="random",
        routes=grown.routes,
        route_of=grown.route_of,
    )


def recomputed(case: Case, schedule: Schedule) -> Schedule:
    """The schedule with what the case says recomputed."""
    if not case.again:
        return schedule
    random, part = Random(case.seed), "" if case.again in ("block", "whole") else case.again
    places = [(s, mb) for mb, route in enumerate(schedule.route_of) for s in schedule.routes[route]]
    return recompute(schedule, case.again == "whole", [place for place in places if random.random() < 0.5], part)


class Grown:
    """A schedule under construction: programs so far, what is done, and how much is left."""

    def __init__(self, case: Case) -> None:
        random, self.case = Random(case.seed + 1), case
        stages = len(case.placement)
        each = stages // case.routes
        self.routes = [list(range(at, at + each)) for at in range(0, stages, each)]
        self.route_of = [random.randrange(case.routes) for _ in range(case.microbatches)]
        split = random.choice([0.0, 0.5, 1.0])
        self.kinds = [
            ["I" if random.random() < split else "B" for _ in range(case.microbatches)] for _ in range(stages)
        ]
        self.done: set[tuple[str, int, int]] = set()
        self.programs: list[list[Action | Pair]] = [[] for _ in range(max(case.placement) + 1)]
        self.left = 3 * each * case.microbatches

    def ready(self, rank: int) -> tuple[list[Action], list[Action], list[Action]]:
        """The forwards, backwards and Ws that could run on the rank now."""
        found: tuple[list[Action], list[Action], list[Action]] = ([], [], [])
        for mb, index in enumerate(self.route_of):
            route = self.routes[index]
            for at, stage in enumerate(route):
                if self.case.placement[stage] != rank:
                    continue
                if ("F", stage, mb) not in self.done:
                    if not at or ("F", route[at - 1], mb) in self.done:
                        found[0].append(Action("F", stage, mb))
                elif ("I", stage, mb) not in self.done:
                    if at + 1 == len(route) or ("I", route[at + 1], mb) in self.done:
                        found[1].append(Action(self.kinds[stage][mb], stage, mb))  # type: ignore[arg-type]
                elif ("W", stage, mb) not in self.done:
                    found[2].append(Action("W", stage, mb))
        return found

    def add(self, rank: int, cell: Action | Pair) -> None:
        self.programs[rank].append(cell)
        for kind, stage, mb, _ in actions_of(cell):
            new = {(part, stage, mb) for part in ("IW" if kind == "B" else kind)}
            self.done |= new
            self.left -= len(new)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))


def check_case(case: Case) -> None:
    """Raises AssertionError where anything disagrees."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        {"simulation": check_simulation, "enumeration": check_enumeration, "proof": check_proof}[case.kind](case)


def check_spans(timeline: pl.Timeline, spans: list[list[tuple[float, float]]]) -> None:
    """The starts and ends of a simulation are those of another."""
    for rank, row in enumerate(spans):
        for at, (start, end) in enumerate(row):
            times, cell = (timeline.starts[rank][at], timeline.ends[rank][at]), timeline.schedule.programs[rank][at]
            assert close(times[0], start), f"{cell} starts at {times[0]}, not {start}"
            assert close(times[1], end), f"{cell} ends at {times[1]}, not {end}"


def check_queues(schedule: Schedule, case: Case) -> None:
    """Times and bytes with copies, gathers and sums beside the computation."""
    costs = case.costs
    for word in case.queues:
        with contextlib.suppress(UsageError):  # fewer slots than a pair needs
            schedule = transformed(schedule, [word], costs)
    if "offload" not in case.queues:
        schedule = schedule.with_slots({})  # the second simulator counts whole copies only
    if not schedule.has_queues:
        return
    check(schedule)
    timeline, spans = simulate(schedule, costs), simulated_spans(schedule, costs)
    check_spans(timeline, spans)
    for pool, peaks in peak_bytes(schedule, costs, spans).items() if costs.bytes else ():
        found = timeline.peak_bytes.get(pool, (0.0,) * schedule.ranks)
        assert all(map(close, found, peaks)), f"bytes of the {pool} {found}, not {peaks}"


def check_simulation(case: Case) -> None:
    schedule, costs = recomputed(case, schedule_of(case)), case.costs
    if case.queues:
        return check_queues(schedule, case)
    check(schedule)
    timeline = simulate(schedule, costs, overlap_p2p=case.overlap_p2p)
    spans = simulated_spans(schedule, costs, case.overlap_p2p)
    check_spans(timeline, spans)
    peaks = memory_peaks(schedule, costs)
    assert all(map(close, timeline.peak_memory, peaks)), f"peaks {timeline.peak_memory}, not {peaks}"
    if costs.bytes:
        device, peaks_in_bytes = timeline.peak_bytes["device"], memory_peaks(schedule, costs, in_bytes=True)
        standing = sum(size for name, size in costs.bytes if name in ("params", "grads"))
        stages = map(schedule.placement.count, range(schedule.ranks))
        peaks_in_bytes = [peak + count * standing for peak, count in zip(peaks_in_bytes, stages, strict=True)]
        assert all(map(close, device, peaks_in_bytes)), f"bytes {device}, not {peaks_in_bytes}"
    for rank, curve in enumerate(timeline.memory_curve):
        if curve:
            assert close(max(level for _, level in curve), peaks[rank]), f"rank {rank}'s memory curve passes its peak"
            assert close(curve[-1][1], 0.0), f"rank {rank} ends with memory {curve[-1][1]}"
    for phases, idle in zip(timeline.idle_by_phase, timeline.idle, strict=True):
        assert close(sum(phases), idle), f"{phases} are not {idle} in all"
    for idle, causes in zip(timeline.idle, timeline.idle_by_cause, strict=True):
        assert close(sum(causes.values()), idle), f"{causes} are not {idle} in all"
        assert not causes["overhead"], f"a simulation has an overhead: {causes}"
    path = timeline.critical_path
    assert timeline.starts[path[0][0]][path[0][1]] == 0, "the critical path starts late"
    assert close(max(timeline.ends[rank][at] for rank, at in path), timeline.makespan), "the critical path ends early"
    if case.overlap_p2p:
        check_path(schedule, costs, spans, path)
    bound = lower_bound(schedule, costs)
    assert at_most(bound, timeline.makespan), f"lower bound {bound} is above the makespan {timeline.makespan}"
    if not schedule._has_split:
        bound = lower_bound(schedule, costs, split_backward=False)
        assert at_most(bound, timeline.makespan), f"unsplit, lower bound {bound} is above {timeline.makespan}"
    if not case.again and len(schedule.routes) == 1 and schedule.routes[0] == tuple(range(schedule.stages)):
        room = max(timeline.peak_memory) or math.inf
        for objective in ("makespan", "span"):
            instance = Instance(schedule.placement, schedule.microbatches, costs, room, objective, (), case.overlap_p2p)
            value = timeline.value(objective)
            for name, bound in (
                ("bound", bound_of(instance, pairs=False)),
                ("bound with pairs", pair_bound(instance)),
            ):
                assert at_most(bound, value), f"the {objective}'s {name} {bound} is above {value}"
            check_sequences(instance, schedule)


def check_path(
    schedule: Schedule, costs: Costs, spans: list[list[tuple[float, float]]], path: tuple[tuple[int, int], ...]
) -> None:
    """Every entry of a critical path starts when the one before it has ended, or when its message has arrived."""
    times = Times(schedule, costs)
    for (rank, at), (following, then) in zip(path, path[1:], strict=False):
        gap = spans[following][then][0] - spans[rank][at][1]
        hops = [0.0] if rank == following else []
        for action in actions_of(schedule.programs[following][then]):
            for origin, _ in times.origins(action):
                hops += [times.hop(origin, action.stage)] if schedule.placement[origin[1]] == rank else []
        scale = max(1.0, abs(spans[following][then][0]))
        assert any(abs(gap - hop) <= 1e-6 * scale for hop in hops), f"the critical path has a gap of {gap}, not {hops}"


def check_sequences(instance: Instance, schedule: Schedule) -> None:
    """The solver times the schedule's words as the simulator times the schedule that it writes them as."""
    sequences = instance.numbered(
        [[[action[:2]] for cell in program for action in actions_of(cell)] for program in schedule.programs]
    )
    found = evaluate(instance, sequences)
    if found is not None and all(sequences):
        again = simulate(instance.schedule_of(sequences), instance.costs, overlap_p2p=instance.overlap_p2p)
        assert close(found.value, again.value(instance.objective)), (
            f"words of {found.value} take {again.value(instance.objective)}"
        )


def at_most(bound: float, value: float) -> bool:
    return bound <= value + 1e-6 * max(1.0, abs(value))


def instances(case: Case) -> Iterator[tuple[Instance, float]]:
    """The case's instance with both objectives, and the optimum of each."""
    stages = len(case.placement)
    activation = case.costs.per_stage("activation", stages)
    largest = max(case.costs.factors(case.microbatches))
    one = [sum(a for a, home in zip(activation, case.placement, strict=True) if home == r) for r in set(case.placement)]
    room = case.room * largest * max(one) if largest * max(one) else math.inf
    for objective in ("makespan", "span"):
        instance = Instance(case.placement, case.microbatches, case.costs, room, objective, (), case.overlap_p2p)
        yield (
            instance,
            least(case.placement, case.microbatches, case.costs, room, objective, overlap_p2p=case.overlap_p2p),
        )


def check_enumeration(case: Case) -> None:
    for instance, optimum in instances(case):
        for name, bound in (("bound", bound_of(instance, pairs=False)), ("bound with pairs", pair_bound(instance))):
            assert at_most(bound, optimum), f"the {instance.objective}'s {name} {bound} is above the optimum {optimum}"


def check_proof(case: Case) -> None:
    for instance, optimum in instances(case):
        for pairs in (False, True):
            if pairs and not case.overlap_p2p:
                continue
            try:
                found = pl.search(
                    instance.ranks,
                    case.microbatches,
                    case.costs,
                    None if instance.memory_limit == math.inf else instance.memory_limit,
                    placement=case.placement,
                    objective=instance.objective,
                    iterations=100,
                    prove=not pairs,
                    pairs=pairs,
                    overlap_p2p=case.overlap_p2p,
                )
            except CapacityError:
                continue  # no start fits: allowed, as some room is left to the search
            check(found.schedule)
            spans = simulated_spans(found.schedule, case.costs, case.overlap_p2p)
            reached = max(row[-1][1] - (row[0][0] if instance.objective == "span" else 0.0) for row in spans)
            sequences = f"{instance.objective}, pairs={pairs}: value {found.value}, bound {found.lower_bound}, "
            sequences += f"proved={found.proved}; optimum {optimum}, its schedule takes {reached}"
            assert close(found.value, reached), sequences
            assert max(memory_peaks(found.schedule, case.costs)) <= instance.memory_limit + 1e-6, sequences
            assert at_most(found.lower_bound, optimum), sequences
            assert at_most(optimum, found.value), sequences
            assert not found.proved or close(found.value, optimum), sequences


def simplifications(case: Case) -> Iterator[Case]:
    costs = case.costs
    if case.microbatches > 1:
        fewer = replace(costs, microbatch=costs.microbatch[: case.microbatches - 1])
        yield replace(case, microbatches=case.microbatches - 1, costs=fewer)
    if not case.overlap_p2p:
        yield replace(case, overlap_p2p=True)
    if case.again:
        yield replace(case, again="")
    if case.queues:
        yield replace(case, queues=case.queues[1:])
        yield replace(case, queues=case.queues[:-1])
    if case.room != 1.0:
        yield replace(case, room=1.0)
    for field in fields(Costs):
        value = getattr(costs, field.name)
        if value == field.default:
            continue
        yield replace(case, costs=replace(costs, **{field.name: field.default}))
        simpler: list[Any] = []
        if isinstance(value, tuple):
            simpler += [value[0]] if field.name in (*PER_STAGE, "pair", "pair_split") else []
            simpler += [_mapped(value, at) for at in range(len(value))] if not isinstance(value[0], tuple) else []
        elif isinstance(value, float) and value not in (0.0, 1.0) and math.isfinite(value):
            simpler += [0.0, 1.0, float(round(value))] if value != round(value) else [float(value // 2)]
        for one in simpler:
            if one != value:
                try:
                    yield replace(case, costs=replace(costs, **{field.name: one}))
                except PipeloomError:
                    continue


def _mapped(value: tuple[float, ...], at: int) -> tuple[float, ...]:
    """`value` with one entry rounded, or made 1."""
    new = float(round(value[at])) if value[at] != round(value[at]) else min(1.0, value[at])
    return (*value[:at], new, *value[at + 1 :])


def failure(case: Case) -> str | None:
    """What `check_case` says, None where it passes. Any exception that reaches the user counts, an internal one above all."""
    try:
        check_case(case)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.name})"
    return None


def main(seed: int, cases: int | None, deadline: float | None) -> int:
    """Run the part (see `tests.fuzz.__main__`)."""
    return run_cases("costs", CASES, (seed, cases, deadline), _run)


def _run(number: int) -> str | None:
    case = random_case(number)
    wrong = failure(case)
    if wrong is None:
        return None
    kind = wrong.split(":")[0]
    small = smallest(case, lambda one: (failure(one) or "").split(":")[0] == kind, simplifications)
    return f"{failure(small)}\n  PYTHONPATH=tests python -c 'from fuzz.costs import *; check_case({small!r})'"
