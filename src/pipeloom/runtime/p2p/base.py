"""The transport protocol, and the two transports within one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeloom.runtime.health.report import PeerGone as PeerGone
from pipeloom.runtime.tensor_spec import BoundaryValues, TensorSpec, TensorSpecs
from pipeloom.schedule.actions import OUTPUT
from pipeloom.schedule.batched_p2p import MessageBatch
from pipeloom.schedule.channels import Channel, Message


class Outgoing(NamedTuple):
    """A message to be sent: its values (of gradients: one tensor for each that carries a gradient) and their specs.

    `checksum`: that of the values when they were computed, if the options request one.
    """

    message: Message
    values: BoundaryValues
    boundary: TensorSpecs
    checksum: int | None = None


class Delivery(NamedTuple):
    """Values received along an edge for one micro-batch, or their gradients, in tensors owned by the receiver; their specs, and
    the checksum sent with them.
    """

    values: BoundaryValues
    boundary: TensorSpecs
    checksum: int | None = None


class Transport(Protocol):
    """Protocol for moving messages. One object per rank."""

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        """Start these sends and open these receives; return at once."""

    def arrived(self, message: Message) -> bool:
        """Return whether `take` would not block; if it would, the executor runs another rank of this thread instead."""

    def take(self, message: Message) -> Delivery:
        """Return the message's values, in buffers owned by the caller; wait for them if necessary."""

    def recycle(self, values: BoundaryValues) -> None:
        """Return the buffers of received values that are no longer used."""

    def finish(self) -> None:
        """Wait until every send of the step has completed."""


class BatchQueue:
    """The batches of one run; each is due once its sends are computed and its receives posted.

    Args:
        batches: the batches, in order; a message that the program has computed is a send, any other a receive.
    """

    def __init__(self, batches: Sequence[MessageBatch]) -> None:
        self._batches = deque(batches)
        self._made: dict[Message, Outgoing] = {}
        self._posted: set[Message] = set()

    def due(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> list[list[Outgoing | Message]]:
        """Return the batches to start now, with the sends in place of their messages."""
        self._made |= {outgoing.message: outgoing for outgoing in sends}
        self._posted.update(posts)
        batches: list[list[Outgoing | Message]] = []
        while self._batches and all(m in self._made or m in self._posted for m in self._batches[0]):
            batch = self._batches.popleft()
            batches.append([self._made.pop(m) if m in self._made else m for m in batch])
            self._posted.difference_update(batch)
        return batches

    def __bool__(self) -> bool:
        return bool(self._batches)


@dataclass
class Mailroom:
    """Shared by all ranks of one process: channel -> messages in flight, first in, first out."""

    boxes: dict[Channel, dict[int, tuple[Message, Delivery]]] = field(default_factory=dict)


class InProcessTransport:
    """Transport for all ranks in one thread: notebooks, debuggers, tests. It keeps the channels' order and open receives."""

    def __init__(self, mailroom: Mailroom) -> None:
        self._boxes = mailroom.boxes
        self._open: set[Message] = set()

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        for outgoing in sends:
            delivery = Delivery(_off_graph(outgoing), outgoing.boundary, outgoing.checksum)
            self._boxes.setdefault(outgoing.message.channel, {})[outgoing.message.number] = outgoing.message, delivery
        if posts:
            self._open.update(posts)

    def arrived(self, message: Message) -> bool:
        return message in self._open and message.number in self._boxes.get(message.channel, {})

    def take(self, message: Message) -> Delivery:
        self._open.discard(message)
        sent, delivery = self._boxes[message.channel].pop(message.number)
        if sent != message:
            raise RuntimeError(f"channel {message.channel} brought {sent.words} instead of {message.words}")
        return delivery

    def recycle(self, values: BoundaryValues) -> None:
        """Nothing to do: the values belonged to the sender's graph."""

    def finish(self) -> None:
        """Nothing to wait for."""


def _off_graph(outgoing: Outgoing) -> BoundaryValues:
    """Return the values for a stage of this process; a named tensor is copied, since the next stage may change it in place."""
    values = tuple([None if value is None else value.detach() for value in outgoing.values])
    if outgoing.message.edge.name == OUTPUT or outgoing.message.channel.kind == "gradient":
        return values
    return tuple(None if value is None else value.clone() for value in values)


class Communicator:
    """Batches of all ranks on one communicator within one process, under NCCL's rule.

    The batches of a rank run in the order in which they were issued. A message is transferred when its send and its receive are
    both in the current batch of their ranks; sends and receives between two ranks match in order. A batch ends when all its
    messages have been transferred.
    """

    def __init__(self, ranks: int) -> None:
        self._queues: list[deque[list[Outgoing | Message]]] = [deque() for _ in range(ranks)]
        self._moved: list[dict[Message, Outgoing]] = [{} for _ in range(ranks)]
        self.arrived: list[dict[Message, Outgoing]] = [{} for _ in range(ranks)]

    def issue(self, rank: int, batch: list[Outgoing | Message]) -> None:
        """Append `batch` to those of `rank`, and transfer the messages that can be transferred now."""
        self._queues[rank].append(batch)
        ranks = range(len(self._queues))
        while any(
            [self._match(source, to) for source in ranks for to in ranks if self._queues[source] and self._queues[to]]
        ):
            for receiver, queue in enumerate(self._queues):
                if queue and not queue[0]:
                    queue.popleft()
                    self.arrived[receiver] |= self._moved[receiver]
                    self._moved[receiver].clear()

    def unfinished(self, rank: int) -> bool:
        """Return whether batches of `rank` have not ended."""
        return bool(self._queues[rank])

    def _match(self, source: int, destination: int) -> bool:
        """Transfer one message if both current batches have one; the first send matches the first receive."""
        sending, receiving = self._queues[source][0], self._queues[destination][0]
        sends = [
            at
            for at, each in enumerate(sending)
            if isinstance(each, Outgoing) and each.message.channel[1] == destination
        ]
        wants = [at for at, each in enumerate(receiving) if isinstance(each, Message) and each.channel.source == source]
        if not sends or not wants:
            return False
        sent, wanted = sending.pop(sends[0]), receiving.pop(wants[0])
        assert isinstance(sent, Outgoing)
        assert isinstance(wanted, Message)
        if sent.message != wanted:
            raise RuntimeError(f"{sent.message.words} met the receive of {wanted.words}")
        self._moved[destination][wanted] = sent
        return True


class InProcessBatches:
    """As `InProcessTransport`, for one rank of a pipeline whose transport is "batched"."""

    def __init__(self, communicator: Communicator, rank: int, batches: Sequence[MessageBatch]) -> None:
        self._communicator = communicator
        self._rank = rank
        self._queue = BatchQueue(batches)

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        detached = [outgoing._replace(values=_off_graph(outgoing)) for outgoing in sends]
        for batch in self._queue.due(detached, posts):
            self._communicator.issue(self._rank, batch)

    def arrived(self, message: Message) -> bool:
        return message in self._communicator.arrived[self._rank]

    def take(self, message: Message) -> Delivery:
        outgoing = self._communicator.arrived[self._rank].pop(message)
        return Delivery(outgoing.values, outgoing.boundary, outgoing.checksum)

    def recycle(self, values: BoundaryValues) -> None:
        """Nothing to do: the values belonged to the sender's graph."""

    def finish(self) -> None:
        if self._queue or self._communicator.unfinished(self._rank):
            raise RuntimeError(f"rank {self._rank} has batches left at the end of the step")


def tensors(values: BoundaryValues) -> list[Tensor]:
    """Return the tensors among the values, detached and contiguous, ready to be sent.

    A lazy conjugate or negative is computed: a message carries memory, not those bits.
    """
    return [value.detach().resolve_conj().resolve_neg().contiguous() for value in values if value is not None]


class BufferPool:
    """Buffers by shape and dtype. A buffer is returned after its micro-batch's backward.

    It is reused only if no other tensor shares its storage: a module that keeps its input keeps it intact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = 0
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = defaultdict(list)

    def take(self, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        free = self._free[spec.dtype, spec.shape]
        for at, buffer in enumerate(free):
            if _holders(buffer) == 1:
                return free.pop(at)
        self.made += 1
        return spec.empty(self.device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        # A new tensor on the same storage: a queued weight gradient, for instance, may still hold the old tensor object, and
        # only tensors are counted.
        self._free[buffer.dtype, tuple(buffer.shape)].append(buffer.detach())


def _holders(buffer: Tensor) -> int:
    """Return the number of tensors that share the storage of `buffer`, including itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the storage object asked through
