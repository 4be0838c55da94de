"""Batches: the messages that the batched transport puts into one call, so chosen that all calls match on one communicator.

On one communicator the batches of a rank run one after the other, a message moves when both of its ends are in a batch that
has its turn, and a batch ends when all its messages have moved (NCCL's rule). A receive that is posted too early delays
the sends after it; one that is posted too late delays those of its sender.

So both ends place a message by the same clock: a walk of the whole schedule at unit costs, in which a message moves when
the entry that sends it ends. On every rank the batches then hold the messages of windows of time that follow one another,
and the earliest message that has not moved is always in batches that have their turn. Whatever `check` accepts can run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeloom.errors import ScheduleError
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
    return _of_rank(programs, rank, clock or message_clock(programs), ahead)


def check_batches(programs: TrafficOfRanks, ahead: bool = True) -> None:
    """Raise ScheduleError when some batches wait for one another for ever; name the ranks and messages."""
    clock = message_clock(programs)
    check_meeting(programs, [_of_rank(programs, rank, clock, ahead) for rank in range(len(programs))])


# -- when each message moves ---------------------------------------------------------------------------------------------


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


def _of_rank(
    programs: TrafficOfRanks, rank: int, clock: MessageClock, ahead: bool
) -> tuple[tuple[MessageBatch, ...], ...]:
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


# -- the walk: can all batches meet? -------------------------------------------------------------------------------------


@dataclass
class _RankState:
    program: tuple[EntryTraffic, ...]
    plan: tuple[tuple[MessageBatch, ...], ...]
    position: int = 0
    launched: int = 0
    batches: list[set[Message]] = field(default_factory=list)
    head: int = 0

    @property
    def stuck(self) -> bool:
        return self.position < len(self.program) or self.head < len(self.batches)


def check_meeting(programs: TrafficOfRanks, batches: Sequence[tuple[tuple[MessageBatch, ...], ...]]) -> None:
    """Run the programs with `batches` (rank -> as `batches_of`); raise ScheduleError where no rank can continue."""
    states = [_RankState(program, plan) for program, plan in zip(programs, batches, strict=True)]
    arrived: set[Message] = set()
    moving = True
    while moving:
        moving = False
        for state in states:
            moving = _issue(state) or moving
        moving = _meet(states, arrived) or moving
    if any(state.stuck for state in states):
        raise ScheduleError(_words(states, arrived))


def _issue(state: _RankState) -> bool:
    """Launch the batches and run the entries that `state` allows; return whether anything happened."""
    moved = False
    while True:
        if state.launched == state.position:
            state.batches += map(set, state.plan[state.position])
            state.launched += 1
            moved = True
        if state.position == len(state.program):
            return moved
        waiting = set(state.program[state.position].receives)
        if any(not waiting.isdisjoint(batch) for batch in state.batches[state.head :]):
            return moved
        state.position += 1
        moved = True


def _meet(states: list[_RankState], arrived: set[Message]) -> bool:
    """Move the messages both of whose ends have their turn, and end the complete batches; return whether anything happened."""
    moved = False
    for state in states:
        while state.head < len(state.batches):
            batch = state.batches[state.head]
            for message in [m for m in batch if m not in arrived and _has_turn(states, m)]:
                arrived.add(message)
                moved = True
            if not batch <= arrived:
                break
            state.head += 1
            moved = True
    return moved


def _has_turn(states: list[_RankState], message: Message) -> bool:
    for rank in (message.channel.source, message.channel.destination):
        state = states[rank]
        if state.head >= len(state.batches) or message not in state.batches[state.head]:
            return False
    return True


def _words(states: list[_RankState], arrived: set[Message]) -> str:
    lines = ["the batches of this schedule wait for one another for ever:"]
    for rank, state in enumerate(states):
        if not state.stuck:
            continue
        at_end = state.position == len(state.program)
        where = "the end of its program" if at_end else state.program[state.position].cell.words
        held = sorted(state.batches[state.head] - arrived) if state.head < len(state.batches) else []
        front = f"; the batch at its front still holds {held[0].words}" if held else ""
        lines.append(f"  rank {rank} is at {where}{front}")
    return "\n".join(lines)
