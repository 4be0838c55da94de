"""The transport protocol, and the transport within one process."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import itemgetter
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


Mailroom = dict[Channel, dict[int, tuple[Message, Delivery]]]
"""Shared by all ranks of one process: channel -> messages in flight, by number."""


class InProcessTransport:
    """Transport for all ranks in one thread: notebooks, debuggers, tests. It keeps the channels' order and open receives."""

    def __init__(self, mailroom: Mailroom) -> None:
        self._boxes = mailroom
        self._open: set[Message] = set()

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        for outgoing in sends:
            named = outgoing.message.edge.name != OUTPUT and outgoing.message.channel.kind == "activation"
            delivery = Delivery(handed_over(outgoing.values, named), outgoing.boundary, outgoing.checksum)
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


def handed_over(values: BoundaryValues, named: bool) -> BoundaryValues:
    """Return the values for another stage of this process, without their graph.

    The next stage may change its input in place, and a tensor with a name may be that: its readers get a copy.
    """
    detached = tuple([None if value is None else value.detach() for value in values])
    return tuple([None if value is None else value.clone() for value in detached]) if named else detached


def tensors(values: BoundaryValues) -> list[Tensor]:
    """Return the tensors among the values, detached and contiguous, ready to be sent.

    A lazy conjugate or negative is computed: a message carries memory, not those bits.
    """
    return [value.detach().resolve_conj().resolve_neg().contiguous() for value in values if value is not None]


class BufferPool:
    """Buffers by shape and dtype. One is returned after its micro-batch's backward, and grows where another shape needs it.

    It is reused only if no other tensor shares its storage: a module that keeps its input keeps it intact.

    Attributes:
        made, nbytes: number of all buffers since the start, and size of those that have not been replaced by larger ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = self.nbytes = 0
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = defaultdict(list)

    def take(self, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        free = self._free[spec.dtype, spec.shape]
        for at, buffer in enumerate(free):
            if _holders(buffer) == 1:
                return free.pop(at)
        return self._of_other_shape(spec)

    def _of_other_shape(self, spec: TensorSpec) -> Tensor:
        """Return a tensor in the smallest unused buffer that has room, or in a new one that takes the place of the largest that
        has not, so that there are never more than are needed at once.
        """
        unused = [
            (buffer.untyped_storage().nbytes(), free, at)
            for (dtype, shape), free in self._free.items()
            if dtype == spec.dtype and len(shape) == len(spec.shape)
            for at, buffer in enumerate(free)
            if _holders(buffer) == 1
        ]
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if fitting := [each for each in unused if each[0] >= size]:
            _, free, at = min(fitting, key=itemgetter(0))
            storage = free.pop(at).untyped_storage()
            buffer = torch.empty(0, dtype=spec.dtype, device=self.device)
            buffer.set_(storage, 0, spec.shape)  # type: ignore[call-overload]  # no view, which would hold another tensor
        else:
            if unused:
                replaced, free, at = max(unused, key=itemgetter(0))
                self.nbytes -= replaced
                free.pop(at)
            self.made += 1
            buffer = spec.empty(self.device)
            self.nbytes += buffer.nbytes
        self._free = defaultdict(list, {key: free for key, free in self._free.items() if free})
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        # A new tensor on the same storage: a queued weight gradient, for instance, may still hold the old tensor object, and
        # only tensors are counted.
        self._free[buffer.dtype, tuple(buffer.shape)].append(buffer.detach())


def _holders(buffer: Tensor) -> int:
    """Return the number of tensors that share the storage of `buffer`, including itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the storage object asked through
