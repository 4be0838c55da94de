"""The walk over the batches of the batched transport: can all of them meet?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeloom.errors import ScheduleError
from pipeloom.schedule.batched_p2p import MessageBatch, TrafficOfRanks, batches_of, message_clock
from pipeloom.schedule.channels import EntryTraffic, Message


def check_batches(programs: TrafficOfRanks, ahead: bool = True) -> None:
    """Raise ScheduleError when some batches wait for one another for ever; name the ranks and messages."""
    clock = message_clock(programs)
    check_meeting(programs, [batches_of(programs, rank, ahead, clock) for rank in range(len(programs))])


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
