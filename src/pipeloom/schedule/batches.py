"""The batched transport's own order, walked before a run: can its batches all meet?

Between two program entries a rank puts its sends and receives into one batch. On one communicator batches run one after the
other, a message moves when both of its ends are in a batch that has its turn, and a batch ends when all its messages have
moved. An entry runs when the batches with its receives have ended. Receives are
posted just before the entry that needs them: posted earlier, they would hold up the sends behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.errors import ScheduleError
from pipeloom.schedule.channels import Entry, Message, posting_plan


@dataclass
class _RankState:
    program: tuple[Entry, ...]
    plan: tuple[tuple[Message, ...], ...]
    position: int = 0
    launched: int = 0
    batches: list[set[Message]] | None = None
    head: int = 0


def check_batches(programs: tuple[tuple[Entry, ...], ...]) -> None:
    """Raises ScheduleError when some batches wait for one another for ever; names the ranks and messages."""
    states = [_RankState(program, posting_plan(program, 1, ahead=False), batches=[]) for program in programs]
    arrived: set[Message] = set()
    moving = True
    while moving:
        moving = False
        for state in states:
            moving = _issue(state) or moving
        moving = _meet(states, arrived) or moving
    stuck = [rank for rank, state in enumerate(states) if state.position < len(state.program)]
    if stuck:
        raise ScheduleError(_words(states, stuck, arrived))


def _issue(state: _RankState) -> bool:
    """Launches the batches and runs the entries that `state` can; true if anything happened."""
    assert state.batches is not None
    moved = False
    while state.position < len(state.program):
        if state.launched == state.position:
            sends = state.program[state.position - 1].sends if state.position else ()
            batch = {*sends, *state.plan[state.position]}
            if batch:
                state.batches.append(batch)
            state.launched += 1
            moved = True
        waiting = set(state.program[state.position].receives)
        if any(not waiting.isdisjoint(batch) for batch in state.batches[state.head :]):
            return moved
        state.position += 1
        moved = True
    if state.launched == state.position:
        last = state.program[-1].sends if state.program else ()
        if last:
            state.batches.append(set(last))
        state.launched += 1
        moved = True
    return moved


def _meet(states: list[_RankState], arrived: set[Message]) -> bool:
    """Moves the messages both of whose ends have their turn, and ends the batches that are done."""
    moved = False
    for state in states:
        assert state.batches is not None
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
        assert state.batches is not None
        if state.head >= len(state.batches) or message not in state.batches[state.head]:
            return False
    return True


def _words(states: list[_RankState], stuck: list[int], arrived: set[Message]) -> str:
    lines = ['the batched transport deadlocks on this schedule (transport = "individual" does not):']
    for rank in stuck:
        state = states[rank]
        need = [m for m in state.program[state.position].receives if m not in arrived]
        held = sorted((state.batches or [set()])[state.head] - arrived) if state.head < len(state.batches or []) else []
        state_words = f"  rank {rank} is at {state.program[state.position].cell.words}, which waits for "
        if need:
            state_words += f"{need[0].words} from rank {need[0].channel.source}"
        else:
            state_words += "the end of the batch with its message"
        lines.append(f"{state_words}; the batch at its front still holds {held[0].words}" if held else state_words)
    return "\n".join(lines)
