"""Messages and channels, derived from a schedule: which messages each program entry receives and sends, their order and size.

A **channel** is one direction between two ranks and one kind (activations or gradients), first in, first out. Both ends
derive the same order from the same schedule: that in which the source's program sends the messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeloom.schedule.actions import INPUT_GRADIENT, OUTPUT, Action, Cell, kind_of, unit_words
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule, parts

MessageKind = Literal["activation", "gradient"]


class Channel(NamedTuple):
    """One direction between two ranks, and the kind of its messages."""

    source: int
    destination: int
    kind: MessageKind


class Edge(NamedTuple):
    """A value that one stage sends to another: OUTPUT, or a tensor by its name. Its gradient is sent back along the edge."""

    producer: int
    consumer: int
    name: str


class Message(NamedTuple):
    """A value of one micro-batch that is sent along an edge, or, on a channel for gradients, its gradient that is sent back.

    Attributes:
        channel: the channel that carries it.
        edge: the edge of the value, also for its gradient.
        microbatch: its micro-batch.
        number: its position among the messages of its channel, from 0.
        slice: the slice of the micro-batch; None where sequences are not cut.
    """

    channel: Channel
    edge: Edge
    microbatch: int
    number: int
    slice: int | None = None

    @property
    def producer(self) -> int:
        """The stage that computes it."""
        return self.edge.producer if self.channel.kind == "activation" else self.edge.consumer

    @property
    def consumer(self) -> int:
        """The stage that waits for it."""
        return self.edge.consumer if self.channel.kind == "activation" else self.edge.producer

    @property
    def name(self) -> str:
        """Return "output", "input gradient", or the name of the tensor; a gradient has the name of its tensor."""
        returns = self.channel.kind == "gradient"
        return INPUT_GRADIENT if returns and self.edge.name == OUTPUT else self.edge.name

    @property
    def words(self) -> str:
        unit = unit_words(self.microbatch, self.slice)
        if self.name in (OUTPUT, INPUT_GRADIENT):
            return f"the {self.name} of stage {self.producer} {unit}"
        if self.channel.kind == "activation":
            return f"tensor {self.name!r} of stage {self.producer} for stage {self.consumer} {unit}"
        return f"the gradient of tensor {self.name!r} from stage {self.producer} {unit}"


@dataclass(frozen=True)
class EntryTraffic:
    """One entry of a rank's program with the messages that it waits for and sends."""

    cell: Cell
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


def traffic(schedule: Schedule) -> tuple[tuple[EntryTraffic, ...], ...]:
    """rank -> its program with messages. The schedule must have passed `check`."""
    channels = _ChannelsOfActions(schedule)
    message_of: dict[tuple[MessageKind, Edge, str], Message] = {}
    count: dict[Channel, int] = defaultdict(int)

    def sends(action: Action) -> Iterator[Message]:
        for channel, edge in channels[action.kind, action.stage][1]:
            message = Message(channel, edge, action.microbatch, count[channel], action.slice)
            count[channel] += 1
            message_of[channel.kind, edge, action.unit] = message
            yield message

    def receives(action: Action) -> Iterator[Message]:
        for channel, edge in channels[action.kind, action.stage][0]:
            yield message_of[channel.kind, edge, action.unit]

    sent = [[tuple([m for a in parts(cell) for m in sends(a)]) for cell in program] for program in schedule.programs]
    return tuple(
        tuple(
            EntryTraffic(cell, tuple([m for a in parts(cell) for m in receives(a)]), sent[rank][at])
            for at, cell in enumerate(program)
        )
        for rank, program in enumerate(schedule.programs)
    )


class _ChannelsOfActions(dict[tuple[str, int], tuple[list[tuple[Channel, Edge]], list[tuple[Channel, Edge]]]]):
    """(kind, stage) -> the channels on which such actions receive from other ranks, and those on which they send, each with its
    edge; added where they are first asked for.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._named = schedule, NamedEdges.of(schedule)

    def __missing__(self, key: tuple[str, int]) -> tuple[list[tuple[Channel, Edge]], list[tuple[Channel, Edge]]]:
        kind, stage, placement = message_kind(Action(*key)), key[1], self._schedule.placement
        rank, (before, after) = placement[stage], (each[stage] for each in self._schedule.neighbours)
        inputs = [*([] if before is None else [Edge(before, stage, OUTPUT)]), *self._named.reads[stage]]
        outputs = [*([] if after is None else [Edge(stage, after, OUTPUT)]), *self._named.writes[stage]]

        def other(edge: Edge) -> int:
            return placement[edge.producer if edge.consumer == stage else edge.consumer]

        sources, destinations = (inputs, outputs) if kind == "activation" else (outputs, inputs)
        self[key] = (
            [(Channel(other(edge), rank, kind), edge) for edge in sources if kind and other(edge) != rank],
            [(Channel(rank, other(edge), kind), edge) for edge in destinations if kind and other(edge) != rank],
        )
        return self[key]


def message_kind(action: Action) -> MessageKind | None:
    """Return the kind of message that the action receives from one neighbouring stage and sends to the other; None: none."""
    produces = kind_of(action.kind).produces
    return "activation" if OUTPUT in produces else "gradient" if INPUT_GRADIENT in produces else None


@dataclass(frozen=True)
class NamedEdges:
    """Edges of named tensors, by stage.

    Attributes:
        reads: stage -> edges of the tensors that it receives, in the order of `Schedule.tensors`.
        writes: stage -> edges of the tensors that it sends, in that order.
    """

    reads: tuple[tuple[Edge, ...], ...]
    writes: tuple[tuple[Edge, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> NamedEdges:
        """Return the edges of every route: its stage at the producer's position sends to those at the consumers' positions."""
        edges = [
            Edge(route[tensor.producer], route[consumer], tensor.name)
            for route in schedule.routes
            for tensor in schedule.tensors
            for consumer in tensor.consumers
        ]
        return cls(
            tuple(tuple(edge for edge in edges if edge.consumer == stage) for stage in range(schedule.stages)),
            tuple(tuple(edge for edge in edges if edge.producer == stage) for stage in range(schedule.stages)),
        )


def smallest_depths(program: tuple[EntryTraffic, ...]) -> dict[Channel, int]:
    """channel -> the fewest receives that its destination must have open at once so that it cannot block itself.

    1 where messages are used one by one in the order in which they arrive; more where an entry uses several of them, and where
    a later one is used before an earlier one, which then sits in its buffer meanwhile.
    """
    used: dict[Channel, set[int]] = defaultdict(set)
    depth: dict[Channel, int] = {}
    for entry in program:
        for message in entry.receives:
            channel, number = message.channel, message.number
            before = used[channel]
            ahead = sum(1 for index in range(number) if index not in before) if number > len(before) else 0
            depth[channel] = max(depth.get(channel, 1), ahead + 1)
        for message in entry.receives:
            used[message.channel].add(message.number)
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
        wanted: dict[Channel, int] = {}
        for message in entry.receives:
            wanted[message.channel] = max(wanted.get(message.channel, 0), message.number + 1)
        for channel, messages in incoming.items():
            target = min(len(messages), used[channel] + depths[channel]) if ahead else wanted.get(channel, 0)
            now += messages[posted[channel] : target]
            posted[channel] = max(posted[channel], target)
        for message in entry.receives:
            used[message.channel] += 1
        plan.append(tuple(now))
    return tuple(plan)


def released_sends(programs: tuple[tuple[EntryTraffic, ...], ...], rank: int) -> dict[Message, tuple[Message, ...]]:
    """Return message -> the sends of the rank that have certainly arrived once it has, from programs without pairs."""
    peers = {m.channel.destination for entry in programs[rank] for m in entry.sends}
    used_at: dict[int, list[tuple[int, Message]]] = {}
    made_at: dict[Message, int] = {}
    for peer in peers:
        entries = enumerate(programs[peer])
        used_at[peer] = [(at, m) for at, entry in entries for m in entry.receives if m.channel.source == rank]
        made_at |= {
            m: at for at, entry in enumerate(programs[peer]) for m in entry.sends if m.channel.destination == rank
        }
    next_use = dict.fromkeys(peers, 0)
    result: dict[Message, tuple[Message, ...]] = {}
    for entry in programs[rank]:
        for message in entry.receives:
            peer = message.channel.source
            released = []
            uses = used_at.get(peer, [])
            while next_use.get(peer, 0) < len(uses) and uses[next_use[peer]][0] <= made_at[message]:
                released.append(uses[next_use[peer]][1])
                next_use[peer] += 1
            result[message] = tuple(released)
    return result


# -- how many, and how large ----------------------------------------------------------------------------------------------


def message_counts(schedule: Schedule) -> dict[Channel, int]:
    """channel -> the number of its messages in one step, sorted. A hop within a rank is not a message."""
    microbatches_of_route = Counter(schedule.route_of)
    counts: Counter[Channel] = Counter()
    for channel, index, _ in _hops(schedule):
        counts[channel] += microbatches_of_route[index] * schedule.slices
    return dict(sorted(counts.items()))


def message_sizes(schedule: Schedule, costs: Costs) -> dict[Channel, float]:
    """channel -> the total size of its messages in one step, in the unit of `Costs.message`, sorted."""
    factor_of_route = [0.0] * len(schedule.routes)
    for index, factor in zip(schedule.route_of, costs.factors(schedule.microbatches), strict=True):
        factor_of_route[index] += factor
    sizes: dict[Channel, float] = {}
    for channel, index, name in _hops(schedule):
        sizes[channel] = sizes.get(channel, 0.0) + factor_of_route[index] * costs.size_of(name)
    return dict(sorted(sizes.items()))


def _hops(schedule: Schedule) -> Iterator[tuple[Channel, int, str]]:
    """(channel, route, name) of each message of a micro-batch on a route; a gradient has the name of its tensor."""
    microbatches_of_route = Counter(schedule.route_of)
    hops = [(*hop, OUTPUT) for route in schedule.routes for hop in zip(route, route[1:], strict=False)]
    hops += [hop for edges in NamedEdges.of(schedule).writes for hop in edges]
    route_of = {stage: index for index, route in enumerate(schedule.routes) for stage in route}
    for stage, following, name in hops:
        here, there, index = schedule.placement[stage], schedule.placement[following], route_of[stage]
        if here != there and microbatches_of_route[index]:
            yield Channel(here, there, "activation"), index, name
            yield Channel(there, here, "gradient"), index, name


def size_words(count: float) -> str:
    """A number of bytes, as people write it: "1.5 MiB"."""
    return _in_units(count, 2**10, ("TiB", "GiB", "MiB", "KiB")) or f"{count:.0f} B"


def count_words(count: int) -> str:
    """A large number, as people write it: "1.5 M"."""
    return _in_units(count, 10**3, ("B", "M", "k")) or str(count)


def _in_units(count: float, base: int, units: Sequence[str]) -> str:
    for power, unit in zip(range(len(units), 0, -1), units, strict=True):
        if count >= base**power:
            number = count / base**power
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return ""
