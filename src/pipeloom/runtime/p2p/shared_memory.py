"""Messages between CPU ranks of one machine: tensors through shared memory, notices through a socket.

gloo sends a small message in about 70 microseconds and wakes two threads for it; this transport copies it into memory that
both ranks map, sends a notice of a few bytes, and copies it out. A rank never blocks while it sends: while a peer's socket is
full it reads from all peers, as it does whenever it waits.

Memory comes from `memfd_create`, and its descriptors are sent over the sockets, so a killed rank leaves nothing behind.

A notice is a `struct`: received data is never executed. The sockets keep other users out (`connect` in health/links.py).
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import DistributedError, UsageError
from pipeloom.runtime.health.links import RunStore, connect
from pipeloom.runtime.p2p.base import BufferPool, Delivery, Outgoing, PeerGone
from pipeloom.runtime.tensor_spec import BoundaryValues, TensorSpecs, boundary_of, from_numbers, to_numbers
from pipeloom.schedule.channels import Channel, Message, MessageKind

_START = 64  # offset of the data, a cache line after byte 0, which tells whether the receiver has still to read it
_SPIN_SECONDS = 100e-6  # a neighbour often answers sooner than a sleeping process wakes; a longer spin takes its core
_NOTICE_BYTES = 65536  # the longest that a reader accepts: a notice that is cut off is lost
_DESCRIPTORS_NEXT = b"+"  # the next notice carries descriptors of new memory
_MOST_BOUNDARIES = 4096  # that a peer remembers: steps of unequal micro-batches always bring new ones
_MOST_TENSORS = 128  # in a message: Linux passes at most 253 descriptors at once
# flags, number of tensors, number of new segments, message, boundary, checksum (or 0); then each tensor's segment
_NOTICES = [struct.Struct(f"<BBHIIq{count}I") for count in range(_MOST_TENSORS + 1)]
_GRADIENT, _NEW_BOUNDARY = 1, 2  # flags
_MESSAGE_KINDS: tuple[MessageKind, MessageKind] = ("activation", "gradient")


class _SharedSegment:
    """Memory for one tensor in transit, mapped by its sender and its receiver."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)[_START:]
        self._view: tuple[Any, Tensor] | None = None

    @classmethod
    def create(cls, bytes_of_data: int) -> tuple[_SharedSegment, int]:
        size = _START + bytes_of_data
        descriptor = os.memfd_create("pipeloom")
        os.ftruncate(descriptor, size)
        return cls(descriptor, size), descriptor

    def tensor(self, like: Tensor) -> Tensor:
        key = (like.dtype, like.shape)
        if self._view is None or self._view[0] != key:
            self._view = key, self.bytes[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
        return self._view[1]


class _Outbox:
    """Messages sent to one peer: segments by size, oldest first, and the specs that the peer has received."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.segments: list[_SharedSegment] = []
        self.free: dict[int, deque[int]] = defaultdict(deque)
        self.boundaries: dict[TensorSpecs, int] = {}

    def segment(self, size: int) -> tuple[int, _SharedSegment, int | None]:
        """Return (number, segment, descriptor to send if it is new) of a segment with enough bytes."""
        # Powers of two from a page on, so that messages of several lengths share segments.
        size = 1 << max(size - 1, 4095).bit_length()
        waiting = self.free[size]
        if waiting and self.segments[waiting[0]].map[0] == 0:
            number = waiting.popleft()
            waiting.append(number)
            return number, self.segments[number], None
        segment, descriptor = _SharedSegment.create(size)
        self.segments.append(segment)
        waiting.append(len(self.segments) - 1)
        return len(self.segments) - 1, segment, descriptor


class _SharedInbox:
    """Messages from one peer: its segments and specs by number."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.segments: list[_SharedSegment] = []
        self.boundaries: dict[int, TensorSpecs] = {}
        self.descriptors_next = False
        self.gone: str | None = None  # the reason why no more messages can arrive


class SharedLinks:
    """Connections to the peers; constructing them is collective over the pipeline's ranks."""

    def __init__(
        self, store: RunStore, prefix: str, rank: int, channels: Sequence[Channel], timeout: float, spin: bool
    ) -> None:
        self.spin = _SPIN_SECONDS if spin else 0.0
        self.arrived: dict[tuple[int, str, int], deque[tuple[list[int], TensorSpecs, int]]] = defaultdict(deque)
        peers = {end for channel in channels if rank in channel[:2] for end in channel[:2]} - {rank}
        # A socket per peer, with whole notices: one read never returns a part of a notice, or parts of two.
        self._connections = connect(
            store, f"{prefix}/socket", rank, peers, timeout, local=True, kind=socket.SOCK_SEQPACKET
        )
        self.inboxes = {peer: _SharedInbox(connection) for peer, connection in self._connections.items()}
        self.outboxes = {peer: _Outbox(connection) for peer, connection in self._connections.items()}
        self._notice = bytearray(_NOTICE_BYTES)
        self._poll = select.poll()
        self._by_descriptor: dict[int, int] = {}
        for peer, connection in self._connections.items():
            self._poll.register(connection, select.POLLIN)
            self._by_descriptor[connection.fileno()] = peer

    def notify(self, peer: int, notice: bytes, descriptors: list[int]) -> None:
        """Send a notice; read from all peers while this peer's socket is full."""
        connection = self.outboxes[peer].connection
        if not descriptors:
            self._push(peer, connection.send, notice)
            return
        self._push(peer, connection.send, _DESCRIPTORS_NEXT)
        self._push(peer, partial(socket.send_fds, connection, fds=descriptors), [notice])
        for descriptor in descriptors:
            os.close(descriptor)

    def _push(self, peer: int, send: Callable[[Any], int], notice: Any) -> None:
        while True:
            try:
                send(notice)
                return
            except BlockingIOError:
                self.read_all(0.001)
            except ConnectionError as error:
                raise PeerGone(peer, error) from None

    def read(self, peer: int) -> bool:
        """Read one notice of `peer`, if there is one.

        A peer that has exited is not an error here: it may have sent all its messages and finished its part.
        """
        inbox = self.inboxes[peer]
        if inbox.gone is not None:
            return False
        try:
            descriptors: list[int] = []
            data = self._notice
            if inbox.descriptors_next:  # only on this occasion: it takes longer than all the rest of a small message
                notice, descriptors, _, _ = socket.recv_fds(inbox.connection, _NOTICE_BYTES, _MOST_TENSORS)
                length = len(notice)
                data[:length] = notice
                inbox.descriptors_next = False
            else:
                length = inbox.connection.recv_into(data)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer has exited without reading all that this rank sent. The error is reported once, before what the peer itself
            # had sent, which may be all that this rank needs.
            return self.read(peer)
        if not length:
            inbox.gone = "it has closed its connection"
            self._poll.unregister(inbox.connection)
            return False
        if length == 1:
            inbox.descriptors_next = True
            return self.read(peer)
        try:
            form = _NOTICES[data[1]]
            flags, _, new, index, boundary, checksum, *numbers = form.unpack_from(data)
            if new or flags & _NEW_BOUNDARY:
                rest = struct.unpack_from(f"<{(length - form.size) // 8}q", data, form.size)
                for descriptor, size in zip(descriptors, rest[:new], strict=True):
                    inbox.segments.append(_SharedSegment(descriptor, size))
                    os.close(descriptor)
                if flags & _NEW_BOUNDARY:
                    inbox.boundaries[boundary] = from_numbers(rest[new:])
            specs = inbox.boundaries[boundary]  # now: a later message may bring others under this number
        except (struct.error, LookupError, ValueError) as error:
            raise DistributedError(f"rank {peer} sent {length} bytes that are not a message notice: {error}") from None
        self.arrived[peer, _MESSAGE_KINDS[flags & _GRADIENT], index].append((numbers, specs, checksum))
        return True

    def read_all(self, timeout: float | None) -> None:
        """Read all notices that have arrived; wait up to `timeout` seconds for a first one."""
        for descriptor, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            while self.read(self._by_descriptor[descriptor]):
                pass

    def wait(self, message: Message) -> tuple[list[int], TensorSpecs, int]:
        """Wait for `message`; return the numbers of its segments, its specs and its checksum.

        Notices are kept by message, since a rank may use messages in another order than that of arrival, and in queues, since
        a sender may be in the next step already.
        """
        source = message.channel.source
        queue = self.arrived[source, message.channel.kind, message.number]
        if not queue and self.spin:
            until = time.perf_counter() + self.spin
            while not queue and time.perf_counter() < until:
                self.read(source)
        while not queue:
            if self.inboxes[source].gone is not None:
                raise PeerGone(source, self.inboxes[source].gone)
            self.read_all(None)
        return queue.popleft()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class SharedMemoryTransport:
    """Transport of one rank over `SharedLinks`. Each message contains its shapes, so they need no agreement beforehand."""

    def __init__(self, links: SharedLinks, pool: BufferPool) -> None:
        self._links = links
        self._pool = pool

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        for outgoing in sends:
            self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        message, values, boundary, checksum = outgoing
        channel = message.channel
        outbox = self._links.outboxes[channel.destination]
        numbers: list[int] = []
        descriptors: list[int] = []
        sizes: list[int] = []
        for value in values:
            if value is None:
                continue
            number, segment, descriptor = outbox.segment(value.numel() * value.element_size())
            segment.tensor(value).copy_(value.detach() if value.requires_grad else value)
            segment.map[0] = 1  # before the notice, whose system call makes both visible to the receiver
            numbers.append(number)
            if descriptor is not None:
                descriptors.append(descriptor)
                sizes.append(segment.size)
        flags, rest = 0, sizes
        if channel.kind == "gradient":
            flags, boundary = _GRADIENT, boundary_of(values)
        known = outbox.boundaries.get(boundary)
        if known is None:
            if len(outbox.boundaries) == _MOST_BOUNDARIES:  # their numbers are given again
                outbox.boundaries.clear()
            known = outbox.boundaries[boundary] = len(outbox.boundaries)
            flags |= _NEW_BOUNDARY
            rest = [*sizes, *to_numbers(boundary)]
        if len(numbers) > _MOST_TENSORS:
            raise UsageError(
                f"{len(numbers)} tensors would be sent between two stages through shared memory, which allows {_MOST_TENSORS}; "
                "pass fewer between two stages"
            )
        head = flags, len(numbers), len(sizes), message.number, known, checksum or 0
        notice = _NOTICES[len(numbers)].pack(*head, *numbers)
        if rest:
            notice += struct.pack(f"<{len(rest)}q", *rest)
        self._links.notify(channel.destination, notice, descriptors)

    def arrived(self, message: Message) -> bool:
        return True

    def take(self, message: Message) -> Delivery:
        numbers, boundary, checksum = self._links.wait(message)
        inbox = self._links.inboxes[message.channel.source]
        left = iter(numbers)
        values: list[Tensor | None] = []
        for spec in boundary:
            if spec is None:
                values.append(None)
                continue
            value = self._pool.take(spec)
            segment = inbox.segments[next(left)]
            value.copy_(segment.tensor(value))
            segment.map[0] = 0  # after the copy: from here on the sender may write the next message there
            values.append(value)
        return Delivery(tuple(values), boundary, checksum)

    def recycle(self, values: BoundaryValues) -> None:
        for value in values:
            if value is not None:
                self._pool.give(value)

    def finish(self) -> None:
        """Do nothing: sent values have been copied."""
