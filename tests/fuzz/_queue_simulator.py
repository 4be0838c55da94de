"""A second simulator for programs with several queues: starts raised until no rule is broken, bytes summed over intervals.

It shares with `pipeloom.schedule.simulate` no more than `_event_simulator` does. Rules: a queue runs its entries in order; one
that is no computation starts no earlier than the computation before it in the program; a copy, a gather and a sum wait for what
they move, and what needs it waits for them; a claim of a slot waits for the releases that come first in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fuzz._event_simulator import Times, actions_of
from pipeloom.schedule import Action, Costs, Pair, Schedule

QUEUES = {"O": "out", "L": "in", "UNSHARD": "collective", "REDUCE_GRAD": "collective"}
Entry = tuple[int, int]  # rank, position in its program
Program = Sequence[Action | Pair]


class Rule(NamedTuple):
    """An entry waits for `share` of the time of `other`, and then for `hop`; or has begun, and waits when `late` of its own time
    has passed.
    """

    other: Entry
    share: float = 1.0
    hop: float = 0.0
    late: float | None = None


def letter_of(cell: Action | Pair) -> str:
    return "" if isinstance(cell, Pair) else cell.kind.partition(":")[0]


def fraction(action: Action) -> float:
    """How much of what is saved a copy moves."""
    part = action.kind.partition(":")[2].split("/")
    return 1 / int(part[1]) if len(part) == 2 else 1.0


class QueueTimes(Times):
    """As `Times`, with the actions of other queues, and what they move."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__(schedule, costs)
        self.bytes = {name: float(size) for name, size in costs.bytes}  # type: ignore[arg-type]
        actions = [action for program in schedule.programs for cell in program for action in actions_of(cell)]
        self.norms = {action[1:3] for action in actions if action.kind == "R:norms"}
        self.whole = {action[1:3] for action in actions if action.kind in ("R", "RB", "RI")}

    def saved(self, stage: int) -> float:
        if self.costs.bytes:
            return self.bytes["saved"]
        return (1 - self.of_stage("kept", stage)) * self.of_stage("activation", stage)

    def duration(self, cell: Action | Pair) -> float:
        letter = letter_of(cell)
        if letter in ("O", "L") and isinstance(cell, Action):
            again = self.bytes.get("saved:norms", 0.0) if cell[1:3] in self.norms else 0.0
            size = self.factor(cell.microbatch) * fraction(cell) * (self.saved(cell.stage) - again)
            return size / self.costs.host_bandwidth
        if letter in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
            name = {"UNSHARD": "params", "REDUCE_GRAD": "grads"}.get(letter, "")
            return self.bytes.get(name, 0.0) / self.costs.collective_bandwidth
        return super().duration(cell)


Rules = dict[Entry, list[Rule]]


def rules_of(schedule: Schedule, times: QueueTimes) -> Rules:
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
            last[queue] = here
            for action in actions_of(cell) if queue == "compute" and letter_of(cell) != "RESHARD" else ():
                origin = times.origin(action)
                rules[here] += [Rule(made[origin], 1.0, times.hop(origin, action.stage))] if origin is not None else []
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


def claims_slot(times: QueueTimes, action: Action) -> bool:
    """Whether the action makes all that is saved, or all but its norms."""
    return action.kind in ("L", "R", "RB", "RI") or (action.kind == "F" and action[1:3] not in times.whole)


def simulate_queues(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """rank -> (start, end) of every entry of its program."""
    times = QueueTimes(schedule, costs)
    rules = rules_of(schedule, times)
    lengths = {
        (r, at): times.duration(cell) for r, program in enumerate(schedule.programs) for at, cell in enumerate(program)
    }
    starts, ends = dict.fromkeys(lengths, 0.0), dict(lengths)

    def moment(rule: Rule) -> float:
        entry = rule.other
        return (ends[entry] if rule.share == 1 else starts[entry] + rule.share * lengths[entry]) + rule.hop

    for _ in range(len(lengths) + 1):
        before = dict(starts), dict(ends)
        for entry, length in lengths.items():
            every = rules.get(entry, ())
            starts[entry] = max([0.0] + [moment(rule) for rule in every if rule.late is None])
            stalls = [moment(rule) + (1 - rule.late) * length for rule in every if rule.late is not None]
            ends[entry] = max([starts[entry] + length, *stalls])
        if before == (starts, ends):
            break
    else:
        raise AssertionError("the schedule deadlocks")
    return [[(starts[r, at], ends[r, at]) for at in range(len(program))] for r, program in enumerate(schedule.programs)]


def peak_bytes(schedule: Schedule, costs: Costs, spans: list[list[tuple[float, float]]]) -> dict[str, list[float]]:
    """pool -> rank -> the most bytes at once: what an entry leaves counts from its start, what it frees until its end."""
    times = QueueTimes(schedule, costs)
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
    times: QueueTimes,
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


def computed(times: QueueTimes, size: dict[str, float], cell: Action | Pair) -> tuple[float, float]:
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
