"""A second simulator: starts raised until no rule is broken, costs read from `Costs`' fields as its docstring words them.

It shares no code with `pipeloom.schedule.simulate` beyond the schedule's decoded programs, so that a slip in either shows. Rules:
a queue runs its entries in order; one that is no computation starts no earlier than the computation before it in the program; an
action waits for the outputs and gradients that it needs, which may take a hop; a copy, a gather and a sum wait for what they
move, and what needs it waits for them; a claim of a slot waits for the releases that come first in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from pipeloom.schedule import Action, Costs, Pair, Schedule

QUEUES = {"O": "out", "L": "in", "UNSHARD": "collective", "REDUCE_GRAD": "collective"}
Event = tuple[str, int, int]  # F, I or W; stage; micro-batch
Entry = tuple[int, int]  # rank, position in its program
Program = Sequence[Action | Pair]


class Times:
    """The costs of one schedule as functions of its actions."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.bytes = {name: float(size) for name, size in costs.bytes}  # type: ignore[arg-type]

    @cached_property
    def norms(self) -> set[tuple[int, int]]:
        """Stages and micro-batches whose norms are recomputed."""
        return {action[1:3] for action in actions_in(self.schedule) if action.kind == "R:norms"}

    @cached_property
    def whole(self) -> set[tuple[int, int]]:
        """Stages and micro-batches of which all is recomputed."""
        return {action[1:3] for action in actions_in(self.schedule) if action.kind in ("R", "RB", "RI")}

    def saved(self, stage: int) -> float:
        if self.costs.bytes:
            return self.bytes["saved"]
        return (1 - self.of_stage("kept", stage)) * self.of_stage("activation", stage)

    def of_stage(self, field: str, stage: int) -> float:
        value: Any = getattr(self.costs, field)
        return value[stage] if isinstance(value, (tuple, list)) else value

    def factor(self, microbatch: int) -> float:
        return self.costs.microbatch[microbatch] if self.costs.microbatch else 1.0

    def alone(self, kind: str, stage: int) -> float:
        """One action of a micro-batch of factor 1."""
        if kind.startswith("R"):
            again = self.of_stage("forward" if self.costs.recompute is None else "recompute", stage)
            name, part = dict(self.costs.parts), kind.partition(":")[2]
            again = name.get(part, again) if part else again
            return again + (self.alone(kind[1:], stage) if kind in ("RB", "RI") else 0.0)
        if kind == "B":
            if self.costs.backward is not None:
                return self.of_stage("backward", stage)
            return self.of_stage("input_grad", stage) + self.of_stage("weight_grad", stage)
        return self.of_stage({"F": "forward", "I": "input_grad", "W": "weight_grad"}[kind], stage)

    def duration(self, cell: Action | Pair) -> float:
        letter = letter_of(cell)
        if letter in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
            name = {"UNSHARD": "params", "REDUCE_GRAD": "grads"}.get(letter, "")
            return self.bytes.get(name, 0.0) / self.costs.collective_bandwidth
        if letter in ("O", "L") and isinstance(cell, Action):
            again = self.bytes.get("saved:norms", 0.0) if cell[1:3] in self.norms else 0.0
            size = self.factor(cell.microbatch) * fraction(cell) * (self.saved(cell.stage) - again)
            return size / self.costs.host_bandwidth
        if isinstance(cell, Action):
            return self.factor(cell.microbatch) * self.alone(cell.kind, cell.stage)
        s, t, kind = cell.forward.stage, cell.backward.stage, cell.backward.kind[-1]
        split, again = kind == "I", self.alone("R", t) if cell.backward.kind != kind else 0.0
        a, b = self.factor(cell.forward.microbatch), self.factor(cell.backward.microbatch)
        one, other = self.alone("F", s), self.alone(kind, t)
        given = self.given("pair_split", s, t) if split else None
        if given is None:
            given = self.given("pair", s, t)
            if given is not None and split:
                given = max(one, given + again - self.alone("W", t)) - again
        if given is not None:
            return b * again + (a * given if a == b else a * one + b * other - min(a, b) * (one + other - given))
        x, y = self.of_stage("all_to_all", s) * one, self.of_stage("all_to_all", t) * self.alone("I", t)
        communication = a * x + b * y
        if communication == 0:
            return a * one + b * (other + again)
        weight = 0.0 if split else self.alone("W", t)
        return max(a * (one - x) + b * (self.alone("I", t) - y + weight + again), communication)

    def in_turns(self, cell: Action | Pair) -> bool:
        """Whether a pair's halves take turns: both stages communicate, or its given time says that something overlaps."""
        if isinstance(cell, Action):
            return False
        s, t = cell.forward.stage, cell.backward.stage
        if self.of_stage("all_to_all", s) and self.of_stage("all_to_all", t):
            return True
        kind = cell.backward.kind[-1]
        fields = ("pair_split", "pair") if kind == "I" else ("pair",)
        if all(self.given(field, s, t) is None for field in fields):
            return False
        one = Pair(cell.forward._replace(microbatch=0), cell.backward._replace(kind=kind, microbatch=0))
        even = Times(self.schedule, replace(self.costs, microbatch=()))
        return even.duration(one) < even.alone("F", s) + even.alone(kind, t)

    def given(self, field: str, s: int, t: int) -> float | None:
        value: Any = getattr(self.costs, field)
        if not isinstance(value, (tuple, list)):
            return value
        return value[s][t] if isinstance(value[0], (tuple, list)) else value[s]

    def origins(self, action: Action) -> list[tuple[Event, str]]:
        """Events that the action waits for, each with the name of the message that brings it from another rank."""
        kind, stage, microbatch = action[:3]
        if kind == "W":
            return [(("I", stage, microbatch), "")]
        if kind[0] == "R" and kind[-1] not in "BI":
            return []
        route, tensors = self.schedule.routes[self.schedule.route_of[microbatch]], self.schedule.tensors
        at = route.index(stage)
        if kind == "F":
            makers = [(t.producer, t.name) for t in tensors if at in t.consumers] + [(at - 1, "output")] * (at > 0)
        else:
            makers = [(reader, t.name) for t in tensors if t.producer == at for reader in t.consumers]
            if at + 1 == len(route):
                return [
                    *((("I", route[reader], microbatch), name) for reader, name in makers),
                    (("F", stage, microbatch), ""),
                ]
            makers.append((at + 1, "output"))
        return [(("F" if kind == "F" else "I", route[maker], microbatch), name) for maker, name in makers]

    def hop(self, origin: Event, to: int, name: str = "output") -> float:
        source, target = self.schedule.placement[origin[1]], self.schedule.placement[to]
        if source == target:
            return 0.0
        p2p: Any = self.costs.p2p
        latency = p2p[source][target] if isinstance(p2p, (tuple, list)) else p2p
        size = dict(self.costs.tensors).get(name, self.costs.message)
        return latency + self.factor(origin[2]) * size / self.costs.bandwidth


def actions_of(cell: Action | Pair) -> tuple[Action, ...]:
    return (cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,)


def actions_in(schedule: Schedule) -> Iterator[Action]:
    return (action for program in schedule.programs for cell in program for action in actions_of(cell))


def letter_of(cell: Action | Pair) -> str:
    return "" if isinstance(cell, Pair) else cell.kind.partition(":")[0]


def fraction(action: Action) -> float:
    """How much of what is saved a copy moves."""
    part = action.kind.partition(":")[2].split("/")
    return 1 / int(part[1]) if len(part) == 2 else 1.0


class Rule(NamedTuple):
    """An entry waits for `share` of the time of `other`, and then for `hop`; or has begun, and waits when `late` of its own time
    has passed.
    """

    other: Entry
    share: float = 1.0
    hop: float = 0.0
    late: float | None = None


Rules = dict[Entry, list[Rule]]


def rules_of(schedule: Schedule, times: Times, overlap_p2p: bool) -> Rules:
    rules: Rules = defaultdict(list)
    made: dict[tuple[str, int, int], Entry] = {}
    for rank, program in enumerate(schedule.programs):
        for at, cell in enumerate(program):
            for action in actions_of(cell) if letter_of(cell) not in QUEUES else ():
                made["I" if action.kind[-1] in "BI" else action.kind, action.stage, action.microbatch] = rank, at
    for rank, program in enumerate(schedule.programs):
        last: dict[str, Entry] = {}  # of each queue
        for at, cell in enumerate(program):
            here, queue = (rank, at), queue_of(cell)
            rules[here] += [Rule(last[queue])] if queue in last else []
            rules[here] += [Rule(last["compute"], 0.0)] if queue != "compute" and "compute" in last else []
            for action in actions_of(cell) if queue == "compute" and letter_of(cell) != "RESHARD" else ():
                for origin, name in times.origins(action):
                    hop = times.hop(origin, action.stage, name)
                    rules[here].append(Rule(made[origin], 1.0, hop))
                    if hop and not overlap_p2p and "compute" in last:  # the message leaves once the rank is free
                        rules[here].append(Rule(last["compute"], 1.0, hop))
            last[queue] = here
        add_copies(rules, rank, program, made)
        add_parameters(rules, rank, program)
        for value, slots in schedule.slots:
            assert value == "saved"
            frees = [
                at for at, cell in enumerate(program) for a in actions_of(cell) if a.kind == "O" or a.kind[-1] in "BI"
            ]
            claims = [at for at, cell in enumerate(program) for a in actions_of(cell) if claims_slot(times, a)]
            for number, at in enumerate(claims):
                waits = frees[: max(0, number + 1 - int(slots))]
                rules[rank, at] += [Rule((rank, o)) for o in waits if queue_of(program[o]) != queue_of(program[at])]
    return rules


def queue_of(cell: Action | Pair) -> str:
    return QUEUES.get(letter_of(cell), "compute")


def add_copies(rules: Rules, rank: int, program: Program, made: dict[tuple[str, int, int], Entry]) -> None:
    """A copy of a part may run while its forward or backward does: F makes the first part first, B needs the last one first."""
    copies: dict[tuple[str, int, int], list[tuple[Entry, Action]]] = defaultdict(list)
    for at, cell in enumerate(program):
        here, letter = (rank, at), letter_of(cell)
        for action in actions_of(cell):
            place = action.stage, action.microbatch
            if letter == "O":
                rules[here].append(Rule(made["F", *place], end_of_part(action)))
            elif letter == "L":
                rules[here] += [Rule(other) for other, out in copies["O", *place] if out.kind[1:] == action.kind[1:]]
            elif action.kind[-1] in "BI":
                for other, back in copies["L", *place]:
                    late = 1 - end_of_part(back)
                    rules[here].append(Rule(other, late=late if late > 0 else None))
            if letter in ("O", "L"):
                copies[letter, *place].append((here, action))


def end_of_part(action: Action) -> float:
    """The end of the part that a copy moves, as a share of all that is saved."""
    return int(action.kind.partition(":")[2].partition("/")[0] or 1) * fraction(action)


def add_parameters(rules: Rules, rank: int, program: Program) -> None:
    """What computes with a stage's parameters waits for their gather, which waits for the release before; W needs none."""
    latest: dict[tuple[str, int], Entry] = {}  # (UNSHARD, RESHARD or whatever adds to gradients; stage) -> it
    for at, cell in enumerate(program):
        here, letter = (rank, at), letter_of(cell)
        for action in actions_of(cell) if letter not in ("O", "L") else ():
            wait = {"UNSHARD": "RESHARD", "REDUCE_GRAD": "grads", "W": ""}.get(letter, "UNSHARD")
            rules[here] += [Rule(latest[wait, action.stage])] if (wait, action.stage) in latest else []
            if letter in ("UNSHARD", "RESHARD"):
                latest[letter, action.stage] = here
            elif letter != "REDUCE_GRAD" and action.kind[-1] in "BIW":
                latest["grads", action.stage] = here


def claims_slot(times: Times, action: Action) -> bool:
    """Whether the action makes all that is saved, or all but its norms."""
    return action.kind in ("L", "R", "RB", "RI") or (action.kind == "F" and action[1:3] not in times.whole)


def simulated_spans(schedule: Schedule, costs: Costs, overlap_p2p: bool = True) -> list[list[tuple[float, float]]]:
    """rank -> (start, end) of every entry of its program; raises AssertionError where the schedule cannot end."""
    times = Times(schedule, costs)
    rules = rules_of(schedule, times, overlap_p2p)
    lengths = {
        (r, at): times.duration(cell) for r, program in enumerate(schedule.programs) for at, cell in enumerate(program)
    }
    starts, ends = dict.fromkeys(lengths, 0.0), dict(lengths)
    waiting: dict[Entry, set[Entry]] = defaultdict(set)
    for entry in lengths:
        for rule in rules[entry]:
            waiting[rule.other].add(entry)

    def moment(rule: Rule) -> float:
        entry = rule.other
        return (ends[entry] if rule.share == 1 else starts[entry] + rule.share * lengths[entry]) + rule.hop

    changed, left = dict.fromkeys(lengths), len(lengths) ** 2 + len(lengths)
    while changed:
        assert left, "the schedule deadlocks"
        entry, left = next(iter(changed)), left - 1
        del changed[entry]
        before, length = (starts[entry], ends[entry]), lengths[entry]
        starts[entry] = max([0.0] + [moment(rule) for rule in rules[entry] if rule.late is None])
        stalls = [moment(rule) + (1 - rule.late) * length for rule in rules[entry] if rule.late is not None]
        ends[entry] = max([starts[entry] + length, *stalls])
        if before != (starts[entry], ends[entry]):
            changed |= dict.fromkeys(waiting[entry])
    return [[(starts[r, at], ends[r, at]) for at in range(len(program))] for r, program in enumerate(schedule.programs)]


def peak_bytes(schedule: Schedule, costs: Costs, spans: list[list[tuple[float, float]]]) -> dict[str, list[float]]:
    """pool -> rank -> the most bytes at once: what an entry leaves counts from its start, what it frees until its end."""
    times = Times(schedule, costs)
    size = {name: times.bytes.get(name, 0.0) for name in ("saved", "kept", "pending", "saved:norms", "params", "grads")}
    used = {(a.kind, a.stage) for program in schedule.programs for cell in program for a in actions_of(cell)}
    peaks: dict[str, list[float]] = {"device": [], "host": []}
    for rank, program in enumerate(schedule.programs):
        moments: dict[str, list[tuple[float, float]]] = {"device": [], "host": []}
        stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        level = sum(size["params"] for s in stages if ("UNSHARD", s) not in used)
        level += sum(size["grads"] for s in stages if ("REDUCE_GRAD", s) not in used)
        added: set[int] = set()  # stages whose gradients are there
        for (start, end), cell in zip(spans[rank], program, strict=True):
            letter = letter_of(cell)
            if letter in ("O", "L"):
                copy_moments(moments, times, size, actions_of(cell)[0], (start, end))
                continue
            for action in actions_of(cell):
                if letter == "REDUCE_GRAD":
                    added.discard(action.stage)
                elif action.kind[-1] in "BIW" and ("REDUCE_GRAD", action.stage) in used and action.stage not in added:
                    added.add(action.stage)
                    moments["device"].append((start, size["grads"]))
            rise, rest = computed(times, size, cell)
            moments["device"] += [(start, rise), (end, rest)]
        for pool, changes in moments.items():
            peaks[pool].append(highest(level if pool == "device" else 0.0, changes))
    return peaks


def copy_moments(
    moments: dict[str, list[tuple[float, float]]],
    times: Times,
    size: dict[str, float],
    action: Action,
    span: tuple[float, float],
) -> None:
    """A copy is on both sides while it runs; what is recomputed does not travel."""
    rest = size["saved"] - (size["saved:norms"] if action[1:3] in times.norms else 0.0)
    moved = times.factor(action.microbatch) * fraction(action) * rest
    source, target = ("device", "host") if action.kind[0] == "O" else ("host", "device")
    moments[target].append((span[0], moved))
    moments[source].append((span[1], -moved))


def computed(times: Times, size: dict[str, float], cell: Action | Pair) -> tuple[float, float]:
    """The change of a rank's bytes at the start of an entry, and at its end."""
    fixed = {"UNSHARD": (size["params"], 0.0), "RESHARD": (0.0, -size["params"]), "REDUCE_GRAD": (0.0, -size["grads"])}
    if letter_of(cell) in fixed:
        return fixed[letter_of(cell)]
    early = late = held = 0.0
    for action in actions_of(cell):
        kind, factor = action.kind, times.factor(action.microbatch)
        norms = size["saved:norms"] if action[1:3] in times.norms else 0.0
        if kind == "F":
            early += factor * (size["kept"] + (0.0 if action[1:3] in times.whole else size["saved"] - norms))
        elif kind[-1] not in "BIW":
            early += factor * (size["saved:norms"] if ":" in kind else size["saved"])
        else:
            held += factor * size["saved"] * (kind in ("RB", "RI"))
            gone = size["pending"] if kind == "W" else size["kept"] + (0.0 if kind[0] == "R" else size["saved"])
            late += factor * ((size["pending"] if kind[-1] == "I" else 0.0) - gone)
    whole = early + late
    net = times.in_turns(cell) or (not held and isinstance(cell, Action))
    rise = max(0.0, whole) if net else early + held
    return rise, whole - rise


def highest(level: float, changes: list[tuple[float, float]]) -> float:
    peak = level
    for _, change in sorted(changes, key=lambda moment: (round(moment[0], 9), moment[1] > 0)):
        level += change
        peak = max(peak, level)
    return peak


def memory_peaks(schedule: Schedule, costs: Costs, in_bytes: bool = False) -> list[float]:
    """rank -> its peak memory, or bytes, replayed as sums over what is alive.

    In a pair the forward comes first; its halves count after the pair alone where they run in turns (`Times.in_turns`).
    """
    times, peaks, sizes = Times(schedule, costs), [], dict(costs.bytes)

    def values(stage: int) -> tuple[float, float, float, float]:
        """What a stage saves, keeps for R, holds until W, and saves of norms."""
        if in_bytes:
            return tuple(float(sizes.get(name, 0.0)) for name in ("saved", "kept", "pending", "saved:norms"))
        whole, inputs = times.of_stage("activation", stage), times.of_stage("kept", stage)
        norms = sizes.get("saved:norms", 0.0) / (sizes.get("saved") or 1.0)
        saved = (1 - inputs) * whole
        return saved, inputs * whole, times.of_stage("held", stage) * whole, norms * saved

    for program in schedule.programs:
        again = {action[1:3]: action.kind for cell in program for action in actions_of(cell) if action.kind[0] == "R"}
        alive: dict[tuple[int, int], float] = {}
        peak = 0.0
        for cell in program:
            for kind, stage, microbatch, _ in actions_of(cell):
                saved, inputs, pending, norms = values(stage)
                late = {"R:norms": norms, "": 0.0}.get(again.get((stage, microbatch), ""), saved)
                during = saved + inputs - (late if kind == "F" else 0.0)
                after = during if kind == "F" or kind[-1] not in "BIW" else pending if kind[-1] == "I" else 0.0
                for size in (during, after) if kind in ("RB", "RI") else (after,):
                    alive[stage, microbatch] = times.factor(microbatch) * size
                    if not times.in_turns(cell) or (kind != "F" and size == after):
                        peak = max(peak, sum(alive.values()))
        peaks.append(peak)
    return peaks
