"""Batches: the messages that the batched transport puts into one call, so chosen that all calls match on one communicator.

On one communicator the batches of a rank run one after the other, a message moves when both of its ends are in a batch that
has its turn, and a batch ends when all its messages have moved (NCCL's rule). A receive that is posted too early delays
the sends after it; one that is posted too late delays those of its sender.

So both ends place a message by the same clock: a walk of the whole schedule at unit costs, in which a message moves when
the entry that sends it ends. On every rank the batches then hold the messages of windows of time that follow one another,
and the earliest message that has not moved is always in batches that have their turn. So whatever `check` accepts can run, which
tests show by a walk over the batches of all families and of random orders.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from pipeloom.schedule.actions import kind_of
from pipeloom.schedule.channels import EntryTraffic, Message
from pipeloom.schedule.model import parts

MessageBatch: TypeAlias = tuple[Message, ...]
"""Messages of one call, a rank's sends and receives, in the order in which NCCL matches those of one pair of ranks."""

TrafficOfRanks: TypeAlias = tuple[tuple[EntryTraffic, ...], ...]


def batches_of(
    programs: TrafficOfRanks, rank: int, ahead: bool = True, clock: MessageClock | None = None
) -> tuple[tuple[MessageBatch, ...], ...]:
    """Return the batches of `rank`: for each of its entries those launched before it, and finally those after the last one.

    The first batch before an entry holds the sends of the entry before it and the receives that the entry needs. With
    `ahead`, the receives of messages that arrive while the entry computes follow: in the same batch if the entry does not wait
    for it, else in a separate one. Without `ahead`, they are in the batch after the entry.

    Args:
        clock: `message_clock(programs)`, where several ranks need it.
    """
    clock = clock or message_clock(programs)
    program, starts, ends = programs[rank], clock.starts[rank], clock.ends[rank]
    first: list[list[Message]] = [[] for _ in range(len(program) + 1)]
    second: list[list[Message]] = [[] for _ in range(len(program) + 1)]
    for at, entry in enumerate(program):
        first[at + 1] += entry.sends
        for message in entry.receives:
            moves = clock.moves[message]
            if not ahead:
                first[bisect_left(starts, moves)].append(message)
                continue
            gap = bisect_right(ends, moves)
            (second if moves > starts[gap] else first)[gap].append(message)
    result: list[tuple[MessageBatch, ...]] = []
    for at, (now, later) in enumerate(zip(first, second, strict=True)):
        awaited = program[at].receives if at < len(program) else ()
        calls = (now, later) if not set(now).isdisjoint(awaited) else ([*now, *later],)
        result.append(tuple(tuple(sorted(c, key=lambda m: (clock.moves[m], m))) for c in calls if c))
    return tuple(result)


@dataclass(frozen=True)
class MessageClock:
    """Times at unit costs: starts and ends of each rank's entries, and the moment when each message moves."""

    starts: list[list[int]]
    ends: list[list[int]]
    moves: dict[Message, int]


def message_clock(programs: TrafficOfRanks) -> MessageClock:
    """Return when each message moves."""
    clock = MessageClock([[] for _ in programs], [[] for _ in programs], {})
    ready = deque(range(len(programs)))
    waiting: dict[Message, int] = {}
    while ready:
        rank = ready.popleft()
        program, starts, ends = programs[rank], clock.starts[rank], clock.ends[rank]
        while len(ends) < len(program):
            entry = program[len(ends)]
            missing = next((message for message in entry.receives if message not in clock.moves), None)
            if missing is not None:
                waiting[missing] = rank
                break
            starts.append(max([ends[-1] if ends else 0, *(clock.moves[message] for message in entry.receives)]))
            # At least 1: the messages that an entry sends must move later than those that it needs.
            ends.append(starts[-1] + max(1, sum(len(kind_of(action.kind).produces) for action in parts(entry.cell))))
            for message in entry.sends:
                clock.moves[message] = ends[-1]
                if message in waiting:
                    ready.append(waiting.pop(message))
    return clock
