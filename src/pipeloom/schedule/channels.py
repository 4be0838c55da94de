"""Messages and channels, derived from a schedule: what each program entry receives and sends, and in which order.

A **channel** is one direction between two ranks and one kind (activations or gradients), first in, first out. Both ends
derive the same order from the same schedule: that in which the source's program makes the messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeloom.schedule.actions import Action, Cell
from pipeloom.schedule.model import Schedule, parts

MessageKind = Literal["activation", "gradient"]


class Channel(NamedTuple):
    """One direction between two ranks, and what it carries."""

    source: int
    destination: int
    kind: MessageKind


class Message(NamedTuple):
    """The output (or input gradient) of `stage` for `microbatch`, the `number`-th message of its channel."""

    channel: Channel
    stage: int
    microbatch: int
    number: int

    @property
    def words(self) -> str:
        what = "output" if self.channel.kind == "activation" else "input gradient"
        return f"the {what} of stage {self.stage} micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Entry:
    """One entry of a rank's program with the messages that it waits for and makes."""

    cell: Cell
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


def traffic(schedule: Schedule) -> tuple[tuple[Entry, ...], ...]:
    """rank -> its program with messages. The schedule must have passed `check`."""
    before, after = neighbours(schedule)
    made: dict[tuple[MessageKind, int, int], Message] = {}
    count: dict[Channel, int] = defaultdict(int)

    def sends(rank: int, action: Action) -> tuple[Message, ...]:
        if action.kind == "W":
            return ()
        kind: MessageKind = "activation" if action.kind == "F" else "gradient"
        to = (after if kind == "activation" else before)[action.stage]
        if to is None or schedule.placement[to] == rank:
            return ()
        channel = Channel(rank, schedule.placement[to], kind)
        message = Message(channel, action.stage, action.microbatch, count[channel])
        count[channel] += 1
        made[kind, action.stage, action.microbatch] = message
        return (message,)

    def receives(rank: int, action: Action) -> tuple[Message, ...]:
        if action.kind == "W":
            return ()
        kind: MessageKind = "activation" if action.kind == "F" else "gradient"
        origin = (before if kind == "activation" else after)[action.stage]
        if origin is None or schedule.placement[origin] == rank:
            return ()
        return (made[kind, origin, action.microbatch],)

    sent = [[sum((sends(rank, a) for a in parts(cell)), ()) for cell in p] for rank, p in enumerate(schedule.programs)]
    return tuple(
        tuple(
            Entry(cell, sum((receives(rank, a) for a in parts(cell)), ()), sent[rank][at])
            for at, cell in enumerate(program)
        )
        for rank, program in enumerate(schedule.programs)
    )


def neighbours(schedule: Schedule) -> tuple[list[int | None], list[int | None]]:
    """stage -> the stage before it, and the stage after it, in its route."""
    before: list[int | None] = [None] * schedule.stages
    after: list[int | None] = [None] * schedule.stages
    for route in schedule.routes:
        for left, right in zip(route, route[1:], strict=False):
            before[right], after[left] = left, right
    return before, after


def smallest_depths(program: tuple[Entry, ...]) -> dict[Channel, int]:
    """channel -> the fewest receives that its destination must have open at once so that it cannot block itself.

    1 where messages are used in the order in which they arrive; more where a later one is used before an earlier one,
    which then sits in its buffer meanwhile.
    """
    used: dict[Channel, set[int]] = defaultdict(set)
    depth: dict[Channel, int] = {}
    for entry in program:
        for message in entry.receives:
            ahead = (
                sum(1 for index in range(message.number) if index not in used[message.channel])
                if (message.number > len(used[message.channel]))
                else 0
            )
            used[message.channel].add(message.number)
            depth[message.channel] = max(depth.get(message.channel, 1), ahead + 1)
    return depth


def posting_plan(program: tuple[Entry, ...], depth: int, ahead: bool) -> tuple[tuple[Message, ...], ...]:
    """position -> the receives to post just before that entry runs, in channel order.

    With `ahead`, each channel keeps `depth` receives open (or `smallest_depths`, if that is more); without, a receive is
    posted when its entry needs it, after those that come before it on its channel.
    """
    incoming: dict[Channel, list[Message]] = defaultdict(list)
    for entry in program:
        for message in entry.receives:
            incoming[message.channel].append(message)
    for messages in incoming.values():
        messages.sort(key=lambda message: message.number)
    depths = {channel: max(depth, least) for channel, least in smallest_depths(program).items()}
    posted = dict.fromkeys(incoming, 0)
    used = dict.fromkeys(incoming, 0)
    plan: list[tuple[Message, ...]] = []
    for entry in program:
        now: list[Message] = []
        wanted = {message.channel: message.number + 1 for message in entry.receives}
        for channel, messages in incoming.items():
            target = min(len(messages), used[channel] + depths[channel]) if ahead else wanted.get(channel, 0)
            now += messages[posted[channel] : target]
            posted[channel] = max(posted[channel], target)
        for message in entry.receives:
            used[message.channel] += 1
        plan.append(tuple(now))
    return tuple(plan)
