"""The transport protocol, and the transport within one process."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
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


def tensors(values: BoundaryValues) -> list[Tensor]:
    """Return the tensors among the values, detached and contiguous, ready to be sent.

    A lazy conjugate or negative is computed: a message carries memory, not those bits.
    """
    return [value.detach().resolve_conj().resolve_neg().contiguous() for value in values if value is not None]


class BufferPool:
    """Buffers by dtype and number of dimensions, as large as the largest that was needed. One is returned after its micro-batch's
    backward.

    It is reused only if no other tensor shares its storage: a module that keeps its input keeps it intact.

    Attributes:
        made, nbytes: number of all buffers since the start, and size of those that have not been replaced by larger ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = self.nbytes = 0
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)  # flat ones

    def take(self, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype: in the smallest free buffer that has room, or in a new one that
        takes the place of the largest that has not, so that there are never more than are needed at once.
        """
        free, count = self._free[spec.dtype, len(spec.shape)], math.prod(spec.shape)
        unused = [at for at, buffer in enumerate(free) if _holders(buffer) == 1]
        fitting = [at for at in unused if free[at].numel() >= count]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda at: free[at].numel()))
        else:
            if unused:
                self.nbytes -= free.pop(max(unused, key=lambda at: free[at].numel())).nbytes
            self.made += 1
            buffer = torch.empty(count, dtype=spec.dtype, device=self.device)
            self.nbytes += buffer.nbytes
        return buffer[:count].view(spec.shape)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        # A new tensor on the whole storage: a queued weight gradient, for instance, may still hold the old tensor object, and
        # only tensors are counted. No view, which would hold another.
        whole = torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer.untyped_storage())
        self._free[buffer.dtype, buffer.ndim].append(whole)


def _holders(buffer: Tensor) -> int:
    """Return the number of tensors that share the storage of `buffer`, including itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the storage object asked through
