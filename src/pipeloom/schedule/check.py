"""`check`: the proof that a schedule is complete, in order, on its ranks, and free of deadlock, before anything starts."""

from __future__ import annotations

from collections import deque
from functools import reduce
from itertools import accumulate, chain, combinations
from operator import or_
from typing import Literal

from pipeloom.errors import ScheduleError
from pipeloom.schedule.actions import EVENTS, INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT, Action, Cell, kind_of, kinds
from pipeloom.schedule.batched_p2p import check_batches
from pipeloom.schedule.channels import neighbours, smallest_depths, traffic
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.graph import Graph, runnable_prefix
from pipeloom.schedule.model import Schedule, of_schedule, parts

CheckedTransport = Literal["individual", "batched"]
TransportName = Literal["auto", "individual", "batched", "shared"]
"""Transports of the runtime, which `RuntimeOptions.transport` describes."""


@of_schedule
def check(
    schedule: Schedule,
    *,
    receive_depth: int | None = None,
    transport: CheckedTransport = "individual",
) -> None:
    """Raise ScheduleError, with the reason, unless every rank can run `schedule` to its end.

    Checked: each (stage, micro-batch) of a route has F and either B or I and W, once, on the placed rank; no cycle among
    data dependencies and program order; the memory of each (stage, micro-batch), which registered kinds can
    change, never falls below zero and ends at zero. Sends do not block, and each channel keeps at least `smallest_depths`
    receives open, so the individual transport adds no cycle of its own; a smaller `receive_depth` given here is refused by
    name. The batched transport does add order (a batch ends when both ends of all its messages have reached it, and a rank
    runs its batches one after another). Batches are formed so that this adds no deadlock to any schedule; they are walked all
    the same.

    Time is linear in the number of actions.
    """
    _check_actions(schedule)
    graph = Graph.of(schedule)
    reached = runnable_prefix(schedule, graph)
    if reached != list(map(len, schedule.codes)):
        raise ScheduleError(_explain(schedule, reached))
    if any(any(kind.memory) for kind in kinds() if not kind.produces):  # the other kinds balance in a complete schedule
        _check_memory(schedule)
    if receive_depth is not None:
        _check_depth(schedule, receive_depth)
    if transport == "batched":
        check_batches(traffic(schedule))


def _check_actions(schedule: Schedule) -> None:
    """Raise unless each action is present once, on its placed rank. A fast test detects a fault; `_diagnose` finds which."""
    stride, m, numbers = schedule.kind_stride, schedule.microbatches, range(len(kinds()))
    seen = bytearray(schedule.no_action)
    total = 0
    misplaced = False
    for rank in range(schedule.ranks):
        codes = schedule.action_codes(rank)
        total += len(codes)
        for code in codes:
            seen[code] = 1
        held = {stage + number * schedule.stages for stage in schedule.stages_of[rank] for number in numbers}
        misplaced = misplaced or not held.issuperset({code // m for code in codes})
    wanted = bytearray(stride)
    for mb, route in enumerate(schedule.route_of):
        for stage in schedule.routes[route] if len(schedule.routes) > 1 else ():
            wanted[stage * m + mb] = 1
    if len(schedule.routes) == 1:
        wanted = bytearray(b"\x01") * stride
    due = int.from_bytes(wanted, "little")
    done = [int.from_bytes(seen[number * stride : (number + 1) * stride], "little") for number in numbers]
    complete = total == sum(seen) and not any(bits & ~due for bits in done)
    for event in EVENTS:
        producers = [bits for kind, bits in zip(kinds(), done, strict=True) if event in kind.produces]
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
                if action in place:
                    raise ScheduleError(f"rank {rank}, action {at}: {action} appears twice")
                place[action] = rank
                if action.stage not in schedule.routes[schedule.route_of[action.microbatch]]:
                    raise ScheduleError(
                        f"rank {rank}, action {at}: {action}, but micro-batch {action.microbatch} takes route "
                        f"{schedule.route_of[action.microbatch]}, which does not pass through stage {action.stage}"
                    )
    for microbatch, route in enumerate(schedule.route_of):
        for stage in schedule.routes[route]:
            _diagnose_stage(schedule, place, stage, microbatch)


def _diagnose_stage(schedule: Schedule, place: dict[Action, int], stage: int, microbatch: int) -> None:
    there = [kind for kind in kinds() if Action(kind.letter, stage, microbatch) in place]
    where = f"stage {stage} micro-batch {microbatch} (rank {schedule.placement[stage]})"

    def cell(letter: str) -> str:
        return str(Action(letter, stage, microbatch))

    backward = [kind for kind in there if kind.is_backward]
    produced = [event for kind in there for event in kind.produces]
    if OUTPUT not in produced:
        raise ScheduleError(f"{where} has no forward: {cell('F')} is missing")
    if len(set(produced)) < len(produced):
        extra = " and ".join(cell(kind.letter) for kind in backward[1:])
        raise ScheduleError(f"{where} has its backward twice: {cell(backward[0].letter)} and {extra}")
    if not backward:
        raise ScheduleError(f"{where} has no backward: {cell('B')} (or {cell('I')} and {cell('W')}) is missing")
    for event, letter in ((INPUT_GRADIENT, "I"), (WEIGHT_GRADIENT, "W")):
        if event not in produced:
            raise ScheduleError(f"{where} has no {event}: {cell(letter)} is missing")


def _check_memory(schedule: Schedule) -> None:
    """Raise where the actions of a stage and micro-batch free more than they have allocated, or leave some allocated.

    A change of memory is linear in `Costs.held`, so looking at its ends, 0 and 1, is enough.
    """
    actions: dict[tuple[int, int], list[Action]] = {}
    for program in schedule.programs:
        for action in chain.from_iterable(map(parts, program)):
            actions.setdefault((action.stage, action.microbatch), []).append(action)
    for (stage, microbatch), there in actions.items():
        for held in (0, 1):
            changes = [constant + share * held for constant, share in (kind_of(action.kind).memory for action in there)]
            levels = list(accumulate(changes))
            if min(levels) < -TIME_TOLERANCE or levels[-1] > TIME_TOLERANCE:
                wrong = "falls below zero" if min(levels) < -TIME_TOLERANCE else "is not all freed"
                sums = ", ".join(f"{action} {change:+g}" for action, change in zip(there, changes, strict=True))
                raise ScheduleError(
                    f"the memory of stage {stage} micro-batch {microbatch} (rank {schedule.placement[stage]}) {wrong}: {sums}"
                )


def _explain(schedule: Schedule, reached: list[int]) -> str:
    """The shortest cycle among the ranks that are stuck, in words."""
    at = {rank: count for rank, count in enumerate(reached) if count < len(schedule.codes[rank])}
    place = {
        action: (rank, i) for rank in at for i, cell in enumerate(schedule.programs[rank]) for action in parts(cell)
    }
    waits: dict[int, list[tuple[Action, int]]] = {}
    for rank, position in at.items():
        cell = schedule.programs[rank][position]
        for action in parts(cell):
            need = _need(schedule, place, action)
            if need is not None and place[need][1] >= at.get(place[need][0], 0) and place[need][0] in at:
                if place[need] == (rank, position):
                    return f"rank {rank}, action {position}: {cell} depends on itself: {action} waits for {need} of the same pair"
                waits.setdefault(rank, []).append((need, place[need][0]))
    return _cycle_words(schedule, at, _shortest_cycle(waits), place)


def _need(schedule: Schedule, place: dict[Action, tuple[int, int]], action: Action) -> Action | None:
    """The pending action whose result `action` waits for; None if that result exists already or nothing is needed."""
    need, stage = kind_of(action.kind).waits_for, action.stage
    if need is None:
        return None
    source, event = stage, need.event
    if need.step:
        before, after = neighbours(schedule)
        other = (before if need.step < 0 else after)[stage]
        if other is None and need.at_end is None:
            return None
        source, event = (other, event) if other is not None else (stage, need.at_end or event)
    options = [Action(kind.letter, source, action.microbatch) for kind in kinds() if event in kind.produces]
    return next((option for option in options if option in place), None)


def _shortest_cycle(waits: dict[int, list[tuple[Action, int]]]) -> list[tuple[int, Action]]:
    """The shortest [(rank, what it waits for), …] in which each waits for the next; breadth first from every rank."""
    best: list[tuple[int, Action]] = []
    for start in waits:
        paths: deque[tuple[int, list[tuple[int, Action]]]] = deque([(start, [])])
        seen: set[int] = set()
        while paths:
            rank, path = paths.popleft()
            if best and len(path) + 1 >= len(best):
                break
            for need, owner in waits.get(rank, ()):
                if owner == start:
                    best = [*path, (rank, need)]
                    paths.clear()
                    break
                if owner not in seen:
                    seen.add(owner)
                    paths.append((owner, [*path, (rank, need)]))
    return best


def _cycle_words(
    schedule: Schedule, at: dict[int, int], cycle: list[tuple[int, Action]], place: dict[Action, tuple[int, int]]
) -> str:
    lines = ["the schedule deadlocks; the shortest cycle:"]
    for rank, need in cycle:
        cell: Cell = schedule.programs[rank][at[rank]]
        owner, position = place[need]
        lines.append(
            f"  rank {rank} is at {cell.words} (action {at[rank]}), which waits for {need.words} on rank {owner} "
            f"(its action {position}; that rank has reached action {at[owner]})"
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
