"""Messages and channels, derived from a schedule: what each program entry receives and sends, and in which order.

A **channel** is one direction between two ranks and one kind (activations or gradients), first in, first out. Both ends
derive the same order from the same schedule: that in which the source's program makes the messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeloom.schedule.actions import INPUT_GRADIENT, OUTPUT, Action, Cell, kind_of
from pipeloom.schedule.model import Schedule, parts

MessageKind = Literal["activation", "gradient"]


class Channel(NamedTuple):
    """One direction between two ranks, and what it carries."""

    source: int
    destination: int
    kind: MessageKind


class Message(NamedTuple):
    """What stage `producer` computed and stage `consumer` waits for, of one micro-batch.

    Attributes:
        channel: what it travels on.
        producer, consumer: the stages; neighbours in their route.
        name: what it is: the producer's output, or its input gradient.
        microbatch: whose it is.
        number: its position among the messages of its channel, from 0.
    """

    channel: Channel
    producer: int
    consumer: int
    name: str
    microbatch: int
    number: int

    @property
    def words(self) -> str:
        return f"the {self.name} of stage {self.producer} micro-batch {self.microbatch}"


@dataclass(frozen=True)
class EntryTraffic:
    """One entry of a rank's program with the messages that it waits for and makes."""

    cell: Cell
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


def traffic(schedule: Schedule) -> tuple[tuple[EntryTraffic, ...], ...]:
    """rank -> its program with messages. The schedule must have passed `check`."""
    before, after = neighbours(schedule)
    made: dict[tuple[MessageKind, int, int], Message] = {}
    count: dict[Channel, int] = defaultdict(int)

    def sends(rank: int, action: Action) -> tuple[Message, ...]:
        kind = message_kind(action)
        if kind is None:
            return ()
        to = (after if kind == "activation" else before)[action.stage]
        if to is None or schedule.placement[to] == rank:
            return ()
        channel = Channel(rank, schedule.placement[to], kind)
        name = OUTPUT if kind == "activation" else INPUT_GRADIENT
        message = Message(channel, action.stage, to, name, action.microbatch, count[channel])
        count[channel] += 1
        made[kind, action.stage, action.microbatch] = message
        return (message,)

    def receives(rank: int, action: Action) -> tuple[Message, ...]:
        kind = message_kind(action)
        if kind is None:
            return ()
        origin = (before if kind == "activation" else after)[action.stage]
        if origin is None or schedule.placement[origin] == rank:
            return ()
        return (made[kind, origin, action.microbatch],)

    sent = [[sum((sends(rank, a) for a in parts(cell)), ()) for cell in p] for rank, p in enumerate(schedule.programs)]
    return tuple(
        tuple(
            EntryTraffic(cell, sum((receives(rank, a) for a in parts(cell)), ()), sent[rank][at])
            for at, cell in enumerate(program)
        )
        for rank, program in enumerate(schedule.programs)
    )


def message_kind(action: Action) -> MessageKind | None:
    """What the action takes from one neighbouring stage and gives to the other; None where it stays within its stage."""
    produces = kind_of(action.kind).produces
    return "activation" if OUTPUT in produces else "gradient" if INPUT_GRADIENT in produces else None


def neighbours(schedule: Schedule) -> tuple[list[int | None], list[int | None]]:
    """stage -> the stage before it, and the stage after it, in its route."""
    before: list[int | None] = [None] * schedule.stages
    after: list[int | None] = [None] * schedule.stages
    for route in schedule.routes:
        for left, right in zip(route, route[1:], strict=False):
            before[right], after[left] = left, right
    return before, after


def smallest_depths(program: tuple[EntryTraffic, ...]) -> dict[Channel, int]:
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


def posting_plan(program: tuple[EntryTraffic, ...], depth: int, ahead: bool) -> tuple[tuple[Message, ...], ...]:
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
