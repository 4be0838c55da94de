"""`check`: the proof that a schedule is complete, in order, on its ranks, and free of deadlock, before anything starts."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Literal

from pipeloom.errors import ScheduleError
from pipeloom.limits import require_whole
from pipeloom.schedule.actions import (
    BASIC_KINDS,
    COMPUTE,
    EVENTS,
    GRADS,
    INPUT_GRADIENT,
    KEPT,
    OUTPUT,
    PARAMS,
    PENDING,
    STAGE_VALUES,
    WEIGHT_GRADIENT,
    Action,
    Cell,
    Kind,
    kind_of,
    kinds,
    unit_words,
    whole_of,
)
from pipeloom.schedule.calls import NO_CALLS, Calls
from pipeloom.schedule.channels import smallest_depths, traffic
from pipeloom.schedule.costs import Costs, Sends
from pipeloom.schedule.graph import NEVER, Graph, WalkCosts, WalkResult, entry_waits, groups_of, runnable_prefix, walk
from pipeloom.schedule.model import Schedule, ValueKey, of_schedule, parts, unit_action, value_key

CheckedTransport = Literal["individual", "batched"]
TransportName = Literal["auto", "individual", "batched", "shared"]
"""Transports of the runtime, which `RuntimeOptions.transport` describes."""


@of_schedule
def check(
    schedule: Schedule,
    *,
    receive_depth: int | None = None,
    transport: CheckedTransport | None = None,
    sends: Sends = "free",
    training: bool = False,
) -> None:
    """Raise ScheduleError, with the reason, unless every rank can run `schedule` to its end.

    Checked: each (stage, micro-batch) of a route, or each of its slices, has F and either B or I and W, once, on the placed rank
    (a schedule of forwards alone, as evaluation runs them, has no backward, and is refused where `training` asks for one); the
    slices of one micro-batch forward in order and backward in the reverse order; every value that an
    action needs of its own stage is there, none is made twice, and what an action can free is freed in the end (one sweep); no
    cycle among data dependencies, program order, the queues of all ranks, and calls of senders that wait, as `sends` says
    (`Costs.sends`). Our own sends do not wait, and each channel keeps at
    least `smallest_depths` receives open, so the individual transport adds no cycle of its own; a smaller `receive_depth` given
    here is refused by name. The batched transport does add order (a batch ends when both ends of all its messages have reached
    it, and a rank runs its batches one after another), but its batches are formed so that this adds no deadlock to any schedule
    (`schedule/batched_p2p.py`). So the result is the same for every transport; `transport` has no effect, warns, and goes in 0.4.

    Time is linear in the number of actions.
    """
    if transport is not None:
        warnings.warn(
            "transport= of check has no effect and goes in 0.4; a schedule that passes runs with every transport",
            DeprecationWarning,
            stacklevel=4,
        )
    if training and schedule.forwards_alone:
        raise ScheduleError(f"{schedule.name}, of forwards alone, has no backward, and a training step needs one")
    _check_actions(schedule)
    graph = Graph.of(schedule)
    if runnable_prefix(schedule, graph) != list(map(len, schedule.codes)):
        raise ScheduleError(_explain(schedule))
    if schedule.slices > 1:
        _check_slices(schedule)
    if len(schedule.kinds) > BASIC_KINDS:  # F, B, I and W hold in every complete schedule whose order can run
        _check_values(schedule)
    if sends != "free":
        calls = Calls.of(schedule, Costs(sends=sends))
        if _walk_of_order(schedule, calls).stuck:
            raise ScheduleError(_explain(schedule, calls, f" with {sends} sends"))
    if receive_depth is not None:
        require_whole("receive_depth", receive_depth)
        _check_depth(schedule, receive_depth)


def _check_actions(schedule: Schedule) -> None:
    """Raise unless each action is present once, on its placed rank. A fast test detects a fault; `_diagnose` finds which."""
    stride, units, numbers = schedule._kind_stride, schedule.units, range(len(schedule.kinds))
    seen = bytearray(schedule._no_action)
    total = 0
    misplaced = False
    of_stage = {number for number, kind in enumerate(schedule.kinds) if kind.of_stage}
    for rank in range(schedule.ranks):
        codes = schedule._action_codes(rank)
        held = {stage + number * schedule.stages for stage in schedule.stages_of[rank] for number in numbers}
        misplaced = misplaced or not held.issuperset({code // units for code in codes})
        if of_stage:
            codes = [code for code in codes if code // stride not in of_stage]
        total += len(codes)
        for code in codes:
            seen[code] = 1
    wanted = bytearray(stride)
    for mb, route in enumerate(schedule.route_of):
        for stage in schedule.routes[route] if len(schedule.routes) > 1 else ():
            first = stage * units + mb * schedule.slices
            wanted[first : first + schedule.slices] = b"\x01" * schedule.slices
    if len(schedule.routes) == 1:
        wanted = bytearray(b"\x01") * stride
    due = int.from_bytes(wanted, "little")
    before = 8 * units * schedule.vocabulary.start
    shares = due >> before << before
    due_of = [shares if kind.vocabulary else due & ~shares for kind in schedule.kinds]
    done = [int.from_bytes(seen[number * stride : (number + 1) * stride], "little") for number in numbers]
    complete = total == sum(seen) and not any(bits & ~due for bits, due in zip(done, due_of, strict=True))
    for rows in groups_of(schedule).values():
        complete = complete and len(rows) == schedule.ranks
    for event in (OUTPUT,) if schedule.forwards_alone else EVENTS:
        producers = [bits for kind, bits in zip(schedule.kinds, done, strict=True) if event in kind.produces]
        both = any(a & b for a, b in combinations(producers, 2))
        complete = complete and not both and reduce(or_, producers) == due
    if misplaced or not complete:
        _diagnose(schedule)


def _diagnose(schedule: Schedule) -> None:
    """Raise ScheduleError for the first fault, in the order of the programs, then of the stages."""
    place: dict[Action, int] = {}
    for rank, program in enumerate(schedule.programs):
        for at, cell in enumerate(program):
            for action in parts(cell):
                if schedule.placement[action.stage] != rank:
                    raise ScheduleError(
                        f"rank {rank}, action {at}: {action} is on the wrong rank; stage {action.stage} is placed on "
                        f"rank {schedule.placement[action.stage]}"
                    )
                if kind_of(action.kind).of_stage:
                    continue
                if action in place:
                    raise ScheduleError(f"rank {rank}, action {at}: {action} appears twice")
                place[action] = rank
                if (action.stage in schedule.vocabulary) != kind_of(action.kind).vocabulary:
                    share = "holds a share of the vocabulary" if action.stage in schedule.vocabulary else "holds layers"
                    raise ScheduleError(f"rank {rank}, action {at}: {action}, but stage {action.stage} {share}")
                if (
                    not schedule.vocabulary
                    and action.stage not in schedule.routes[schedule.route_of[action.microbatch]]
                ):
                    raise ScheduleError(
                        f"rank {rank}, action {at}: {action}, but micro-batch {action.microbatch} takes route "
                        f"{schedule.route_of[action.microbatch]}, which does not pass through stage {action.stage}"
                    )
    for (letter, unit), rows in groups_of(schedule).items():
        missing = {*range(schedule.ranks)} - {rank for rank, _ in rows}
        if missing:
            cell = unit_action(schedule, letter, schedule.vocabulary[min(missing)], unit)
            raise ScheduleError(
                f"{cell} is missing on rank {min(missing)}: all ranks run {letter} of a micro-batch together, and "
                f"{len(rows)} of {schedule.ranks} have it"
            )
    for microbatch, route in enumerate(schedule.route_of):
        for stage in (*schedule.routes[route], *schedule.vocabulary):
            for part in range(schedule.slices):
                _diagnose_stage(schedule, place, Action("F", stage, microbatch, part if schedule.slices > 1 else None))


def _diagnose_stage(schedule: Schedule, place: dict[Action, int], forward: Action) -> None:
    there = [kind for kind in schedule.kinds if forward._replace(kind=kind.letter) in place]
    rank = schedule.placement[forward.stage]
    where = f"stage {forward.stage} {unit_words(forward.microbatch, forward.slice)} (rank {rank})"

    def cell(letter: str) -> str:
        return str(forward._replace(kind=letter))

    if forward.stage in schedule.vocabulary:
        due = ((OUTPUT, "S"), (WEIGHT_GRADIENT, "T"), (INPUT_GRADIENT, "REDUCE"))
        for event, letter in due[: 1 if schedule.forwards_alone else 3]:
            count = sum(event in kind.produces for kind in there)
            if count != 1:
                raise ScheduleError(
                    f"{where}: {cell(letter)} is {'missing' if not count else 'there, and another that does the same'}"
                )
    backward = [kind for kind in there if kind.is_backward]
    produced = [event for kind in there for event in kind.produces]
    if OUTPUT not in produced:
        raise ScheduleError(f"{where} has no forward: {cell('F')} is missing")
    if len(set(produced)) < len(produced):
        extra = " and ".join(cell(kind.letter) for kind in backward[1:])
        raise ScheduleError(f"{where} has its backward twice: {cell(backward[0].letter)} and {extra}")
    if schedule.forwards_alone:
        return
    if not backward:
        raise ScheduleError(f"{where} has no backward: {cell('B')} (or {cell('I')} and {cell('W')}) is missing")
    for event, letter in ((INPUT_GRADIENT, "I"), (WEIGHT_GRADIENT, "W")):
        if event not in produced:
            raise ScheduleError(f"{where} has no {event}: {cell(letter)} is missing")


def _check_slices(schedule: Schedule) -> None:
    """Raise where a slice goes forward before the one before it on its stage, or backward before the one behind it.

    The state of a slice, its keys and values, is part of what is kept, and so there from its F until its B or I.
    """
    slices, stride, kinds = schedule.slices, schedule._kind_stride, schedule.kinds
    steps = [
        (1 if kind.is_forward else -1) * (kind.is_forward or INPUT_GRADIENT in kind.produces) * (not kind.vocabulary)
        for kind in kinds
    ]
    for rank in range(schedule.ranks):
        due: dict[tuple[int, int], int] = {}
        for code in schedule._action_codes(rank):
            number, place = divmod(code, stride)
            if not (step := steps[number]) or kinds[number].of_stage:
                continue
            key = step, place // slices  # of a stage and micro-batch
            expected = due.get(key, 0 if step > 0 else slices - 1)
            if place % slices != expected:
                raise ScheduleError(
                    f"rank {rank}: {schedule.decode(code)} stands before slice {expected} of its stage and micro-batch; "
                    + (
                        "a forward needs the keys and values of the slices before it"
                        if step > 0
                        else "a backward needs the gradients of its keys and values from the slices behind it"
                    )
                )
            due[key] = expected + step


def _needed(kind: Kind, needs: Sequence[str]) -> list[str]:
    """Return which of the values that an action needs must be there: not what it waits for, nor a part that W alone may need."""
    waited, with_parts = kind.waits_for and kind.waits_for.value, INPUT_GRADIENT not in kind.produces
    return [value for value in needs if value != waited and (with_parts or value == whole_of(value))]


def _check_values(schedule: Schedule) -> None:
    """Raise where an action needs a value of its own stage that is not there, makes one that is, or leaves one for ever.

    A stage begins with its parameters, or with its share of them if it gathers them, and ends so.
    """
    gathered, reduced = (schedule.stage_actions.get(letter, frozenset()) for letter in ("UNSHARD", "REDUCE_GRAD"))
    freed = {PARAMS, *(value for kind in schedule.kinds for value in kind.frees)}
    there: dict[ValueKey, Action | None] = {
        (value, stage, -1): None
        for stage in range(schedule.stages)
        for value in STAGE_VALUES - {GRADS, PARAMS if stage in gathered else GRADS}
    }
    begun = frozenset(there)
    parts_of: dict[ValueKey, list[ValueKey]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for at, action in [(at, action) for at, cell in enumerate(program) for action in parts(cell)]:
            kind, stage, mb = kind_of(action.kind), action.stage, schedule.unit_of(action)
            where = f"rank {rank}, action {at}: {action}"
            values = schedule._values_of(action)
            results, needed = values.makes, _needed(kind, values.needs)
            if kind.part and KEPT in needed and (KEPT, stage, mb) not in there and (PENDING, stage, mb) in there:
                needed, results = [PENDING], (f"{PENDING}:{kind.part}",)  # behind I: a part that only W needs
            for value in (*needed, *kind.takes, *(value for value in kind.frees if value not in results)):
                key = value_key(value, stage, mb)
                if key not in there:
                    raise ScheduleError(
                        f"{where} needs {_words(schedule, key)}, which is not there{_makers(schedule, value, action)}"
                    )
            for key in [value_key(value, stage, mb) for value in results]:
                if key in there:
                    maker = there[key]
                    before = "the step begins with it" if maker is None else f"{maker} has made it"
                    raise ScheduleError(f"{where} makes what is {key[0]} a second time; {before}")
                parts_of[value_key(whole_of(key[0]), stage, mb)].append(key)
            there |= {value_key(value, stage, mb): action for value in (*results, *kind.adds)}
            # A copy leaves the parts that R makes where they are.
            again = schedule._remade.get((stage, mb), frozenset()) if kind.queue != COMPUTE else frozenset()
            stays = {value for value in again if value != whole_of(value)}
            for whole in [value_key(value, stage, mb) for value in (*kind.frees, *kind.takes)]:
                for key in (whole, *parts_of.pop(whole, ())):
                    if key[0] in stays:
                        parts_of[whole].append(key)
                    else:
                        there.pop(key, None)
    for key in begun.difference(there):
        raise ScheduleError(f"the step ends without {_words(schedule, key)}, with which it begins")
    for key, maker in () if schedule.forwards_alone else there.items():
        if key not in begun and (whole_of(key[0]) in freed or (key[0] == GRADS and key[1] in reduced)):
            raise ScheduleError(
                f"rank {schedule.placement[key[1]]}: nothing frees {_words(schedule, key)}, which {maker} leaves"
            )


def _words(schedule: Schedule, key: ValueKey) -> str:
    """Return a value in words."""
    value, stage, unit = key
    if unit < 0:
        return f"the {value} of stage {stage}"
    microbatch, part = divmod(unit, schedule.slices)
    return f"what is {value} of stage {stage} {unit_words(microbatch, part if schedule.slices > 1 else None)}"


def _makers(schedule: Schedule, value: str, action: Action) -> str:
    """Return the cells of the same stage and micro-batch that could make `value`, in words."""
    makers = [kind for kind in kinds() if value in (*kind.makes, *kind.adds) and not kind.fuses]
    cells = [str(action._replace(kind=kind.letter)) for kind in makers if kind.of_stage or value not in STAGE_VALUES]
    return f"; {' or '.join(cells)} makes it" if cells else ""


Lane = tuple[int, str]  # rank and queue


def _walk_of_order(schedule: Schedule, calls: Calls) -> WalkResult:
    """Walk the schedule without times."""
    nothing = WalkCosts([0.0] * schedule._no_action, None, defaultdict(float), calls=calls)
    return walk(schedule, Graph.of(schedule), nothing)


def _explain(schedule: Schedule, calls: Calls = NO_CALLS, among: str = "") -> str:
    """The shortest cycle among the queues that are stuck, in words."""
    run = _walk_of_order(schedule, calls)
    at: dict[Lane, int] = {}
    lane_of: dict[tuple[int, int], Lane] = {}
    for rank, queues in enumerate(schedule.queues):
        for queue, positions in queues.items():
            lane_of |= {(rank, position): (rank, queue) for position in positions}
            stuck = [p for p in positions if p >= len(run.ends[rank]) or run.ends[rank][p] == NEVER]
            if stuck:
                at[rank, queue] = stuck[0]
    pending = {
        action: (rank, position)
        for (rank, queue), first in at.items()
        for position in reversed(schedule.queues[rank][queue])  # of a repeated action, the first that has not run
        if position >= first
        for action in parts(schedule.programs[rank][position])
    }
    ordered = entry_waits(schedule)
    waits: dict[Lane, list[tuple[Action, Lane]]] = {}
    for lane, position in at.items():
        rank = lane[0]
        cell = schedule.programs[rank][position]
        needs = [need for action in parts(cell) if (need := _need(schedule, pending, action)) is not None]
        others = [
            parts(schedule.programs[other.rank][other.at])[0]
            for other in ordered.get((rank, position), ())
            if not other.together or run.starts[other.rank][other.at] == NEVER
        ]
        reached = [(call[0], calls.before[call]) for call in calls.waits.get((rank, position), {})]
        others += [parts(schedule.programs[other][last])[0] for other, last in reached if last is not None]
        for need in (*needs, *(other for other in others if other in pending)):
            owner, there = pending[need]
            if (owner, there) == (rank, position):
                action = next(action for action in parts(cell) if _need(schedule, pending, action) == need)
                return f"rank {rank}, action {position}: {cell} depends on itself: {action} waits for {need} of the same pair"
            if there >= at.get(lane_of[owner, there], there + 1):
                waits.setdefault(lane, []).append((need, lane_of[owner, there]))
    return _cycle_words(schedule, at, _shortest_cycle(waits), pending, lane_of, among)


def _need(schedule: Schedule, place: dict[Action, tuple[int, int]], action: Action) -> Action | None:
    """The pending action whose result `action` waits for; None if that result exists already or nothing is needed."""
    need, stage = kind_of(action.kind).waits_for, action.stage
    if need is None:
        return None
    source, value = stage, need.value
    if need.step:
        before, after = schedule.neighbours
        other = (before if need.step < 0 else after)[stage]
        if other is None and need.at_end is None:
            return None
        source, value = (other, value) if other is not None else (stage, need.at_end or value)
    options = [action._replace(kind=kind.letter, stage=source) for kind in schedule.kinds if value in kind.produces]
    return next((option for option in options if option in place), None)


def _shortest_cycle(waits: dict[Lane, list[tuple[Action, Lane]]]) -> list[tuple[Lane, Action]]:
    """The shortest [(queue, what it waits for), …] in which each waits for the next; breadth first from every queue."""
    best: list[tuple[Lane, Action]] = []
    for start in waits:
        paths: deque[tuple[Lane, list[tuple[Lane, Action]]]] = deque([(start, [])])
        seen: set[Lane] = set()
        while paths:
            lane, path = paths.popleft()
            if best and len(path) + 1 >= len(best):
                break
            for need, owner in waits.get(lane, ()):
                if owner == start:
                    best = [*path, (lane, need)]
                    paths.clear()
                    break
                if owner not in seen:
                    seen.add(owner)
                    paths.append((owner, [*path, (lane, need)]))
    return best


def _cycle_words(
    schedule: Schedule,
    at: dict[Lane, int],
    cycle: list[tuple[Lane, Action]],
    place: dict[Action, tuple[int, int]],
    lane_of: dict[tuple[int, int], Lane],
    among: str,
) -> str:
    lines = [f"the schedule deadlocks{among}; the shortest cycle:"]
    for lane, need in cycle:
        cell: Cell = schedule.programs[lane[0]][at[lane]]
        owner, position = place[need]
        lines.append(
            f"  rank {lane[0]} is at {cell.words} (action {at[lane]}), which waits for {need.words} on rank {owner} "
            f"(its action {position}; that rank has reached action {at[lane_of[owner, position]]})"
        )
    return "\n".join(lines)


def _check_depth(schedule: Schedule, receive_depth: int) -> None:
    for program in traffic(schedule):
        for channel, least in smallest_depths(program).items():
            if receive_depth < least:
                raise ScheduleError(
                    f"receive depth {receive_depth} deadlocks: rank {channel.destination} uses {channel.kind}s from rank "
                    f"{channel.source} out of order or several at once, and needs {least} receives open"
                )
