"""Messages over torch.distributed: tags on gloo, a process group for each channel on NCCL.

Ranks whose tensors are on a GPU and whose group has no NCCL (several processes on one GPU) send through host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import DistributedError
from pipeloom.parallel.collectives import Tag, as_sent, goes_through_host
from pipeloom.parallel.mesh import PipelineMesh, group_of_members
from pipeloom.runtime.p2p.base import BatchQueue, BufferPool, Delivery, Outgoing, tensors
from pipeloom.runtime.tensor_spec import (
    HEADER_LENGTH,
    BoundaryValues,
    ShapeCache,
    TensorSpecs,
    boundary_of,
    decode,
    encode,
)
from pipeloom.schedule.channels import Channel, Message

_TAGS: dict[str, Tag] = {"activation": Tag.ACTIVATION, "gradient": Tag.GRADIENT}
_HEADER_TAGS: dict[str, Tag] = {"activation": Tag.ACTIVATION_HEADER, "gradient": Tag.GRADIENT_HEADER}


class _TorchTransfer(NamedTuple):
    """The tensors of a message, about to be sent or received, and the list that collects their works."""

    message: Message
    tensors: list[Tensor]
    works: list[Any]


class Opened(NamedTuple):
    """A receive in progress."""

    works: list[Any]
    values: BoundaryValues
    boundary: TensorSpecs
    checksum: Tensor | None
    # (buffer, host tensor in which its values arrive), for messages through host memory
    host: list[tuple[Tensor, Tensor]]


@dataclass
class _TorchInbox:
    """The receives of one channel: those not opened yet, in channel order; the first may have to wait for its header."""

    queue: deque[Message] = field(default_factory=deque)
    introduced: bool | None = None


class Links:
    """The process groups that a pipeline's messages use, and the group for headers on the CPU."""

    def __init__(self, mesh: PipelineMesh, channels: Sequence[Channel], device: torch.device, batched: bool) -> None:
        self.group = mesh.group
        self.device = device
        self._of: dict[Channel, tuple[Any, dict[int, int]]] = {}
        backends = str(dist.get_backend_config(mesh.group))
        has_gloo = "gloo" in backends
        self.control = mesh.group if has_gloo else group_of_members(mesh.ranks, backend="gloo")
        self.through_host = goes_through_host(device, mesh.group)
        if device.type == "cpu" or self.through_host:
            return
        if batched:  # a communicator's first call must include all its ranks, and a batch may leave some out
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            return
        whole = len(mesh.ranks) == dist.get_world_size()
        # In the same order on all ranks: torch derives a group's name from the number of groups of the process.
        for channel in channels:
            pair = sorted((mesh.ranks[channel.source], mesh.ranks[channel.destination]))
            make = dist.new_group if whole else group_of_members
            group = make(pair, group_desc=f"pipeloom {channel}")
            if mesh.rank not in (channel.source, channel.destination):
                continue
            numbers = {rank: dist.get_group_rank(group, mesh.ranks[rank]) for rank in channel[:2]}
            self._of[channel] = group, numbers
            # Connect now, channel by channel in one order: a first send blocks the host until the other end receives, and
            # torch keeps a communicator for such calls that no collective of the group makes.
            sends = mesh.rank == channel.source
            call, other = (group.send, channel.destination) if sends else (group.recv, channel.source)
            call([torch.zeros(1, device=device)], numbers[other], _TAGS[channel.kind]).wait()

    def peer(self, channel: Channel, rank: int) -> tuple[Any, int]:
        """Return the channel's group, and `rank`'s number in it."""
        if channel in self._of:
            group, numbers = self._of[channel]
            return group, numbers[rank]
        return self.group, rank


@dataclass(eq=False)
class TorchTransport:
    """Transport of one rank: each message in a separate call, or in `batches`."""

    links: Links
    releases_sends: dict[Message, tuple[Message, ...]]
    shapes: ShapeCache
    pool: BufferPool
    batches: BatchQueue | None = None
    checksums: bool = False
    _inboxes: dict[Channel, _TorchInbox] = field(default_factory=dict)
    _opened: dict[Message, Opened] = field(default_factory=dict)
    _sending: dict[Message, tuple[list[Any], list[Tensor]]] = field(default_factory=dict)
    _headers: dict[Message, tuple[Any, Tensor]] = field(default_factory=dict)  # of gradients, in transit

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        if self.batches is not None:
            for batch in self.batches.due(sends, posts):
                self._start_batch(batch)
            return
        for outgoing in sends:
            self._start(self._send(outgoing), outgoing.message.channel.destination)
        for message in posts:
            self._inboxes.setdefault(message.channel, _TorchInbox()).queue.append(message)
        # All of them: the shapes that a receive waits for may have become known since it was posted.
        for inbox in self._inboxes.values():
            if inbox.queue:
                self._open(inbox)

    def arrived(self, message: Message) -> bool:
        return True

    def take(self, message: Message) -> Delivery:
        while message not in self._opened:
            inbox = self._inboxes[message.channel]
            self._introduce(inbox.queue[0])
            self._open(inbox)
        works, values, boundary, checksum, host = self._opened.pop(message)
        for work in works:
            work.wait()
        for buffer, arrived in host:
            buffer.copy_(arrived)
        if works:
            for sent in self.releases_sends.get(message, ()):
                self._release(sent)
        if message.channel.kind == "gradient" and values:
            values = self._without_zeros(message, values)
        return Delivery(values, boundary, None if checksum is None else int(checksum))

    def _without_zeros(self, message: Message, values: BoundaryValues) -> BoundaryValues:
        """Return a gradient message's values, with None in place of the zeros of a missing gradient."""
        without = self.shapes.missing_gradients(message)
        while without is None:  # headers arrive in the channel's order
            first = next(other for other in self._headers if other.channel == message.channel)
            work, header = self._headers.pop(first)
            work.wait()
            self.shapes.set_missing_gradients(
                first, tuple(at for at, spec in enumerate(decode(header)) if spec is None)
            )
            without = self.shapes.missing_gradients(message)
        if not without:
            return values
        self.recycle(tuple(values[at] for at in without))
        return tuple(None if at in without else value for at, value in enumerate(values))

    def recycle(self, values: BoundaryValues) -> None:
        for value in values:
            if value is not None:
                self.pool.give(value)

    def finish(self) -> None:
        for message in list(self._sending):
            self._release(message)
        if self._opened or any(inbox.queue for inbox in self._inboxes.values()):
            # A bug in Pipeloom: the plan posts exactly the receives that are used.
            raise DistributedError("receives were left open at the end of the step")

    def _release(self, message: Message) -> None:
        works, _ = self._sending.pop(message, ((), ()))
        for work in works:
            work.wait()

    def _send(self, outgoing: Outgoing) -> _TorchTransfer:
        """Send a message's header; return the transfer of its values."""
        message = outgoing.message
        works: list[Any] = []
        values, kind = outgoing.values, message.channel.kind
        needs_header = self.shapes.needs_header(message)
        if kind == "gradient" and values:
            values = self._filled(message, values, needs_header)
        sent = buffers = tensors(values)
        if self.checksums and sent:
            sent = buffers = [*sent, torch.tensor([outgoing.checksum], device=self.links.device)]
        if self.links.through_host:  # the copy waits for the stream that computes the values
            sent = buffers = [tensor.cpu() for tensor in sent]
        if needs_header and (values or kind == "activation"):
            header = encode(outgoing.boundary if kind == "activation" else boundary_of(outgoing.values))
            works.append(self.links.control.send([header], message.channel.destination, _HEADER_TAGS[kind]))
            buffers = [*sent, header]
        self._sending[message] = works, buffers
        return _TorchTransfer(message, sent, works)

    def _filled(self, message: Message, values: BoundaryValues, needs_header: bool) -> BoundaryValues:
        """Return the gradients to send, zeros for one that is None: receives are posted before it is known which are."""
        without = tuple(at for at, value in enumerate(values) if value is None)
        if needs_header:
            self.shapes.set_missing_gradients(message, without)
        else:
            self.shapes.require_same_missing(message, without)
        specs = self.shapes.of(message)
        if not without or specs is None:
            return values
        return tuple(
            spec.empty(self.links.device).zero_() if value is None and spec is not None else value
            for value, spec in zip(values, specs, strict=True)
        )

    def _open(self, inbox: _TorchInbox) -> None:
        """Open receives as long as their shapes are known."""
        while inbox.queue:
            message = inbox.queue[0]
            if inbox.introduced is None:
                inbox.introduced = self.shapes.needs_header(message)
            boundary = self.shapes.of(message)
            if boundary is None:
                break
            introduced, inbox.introduced = inbox.introduced, None
            inbox.queue.popleft()
            self._start(self._receive(message, boundary, introduced), message.channel.source)

    def _introduce(self, message: Message) -> None:
        """Wait for the header of `message`, the next one of its channel with a header."""
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
        self.links.control.recv([header], message.channel.source, _HEADER_TAGS["activation"]).wait()
        self.shapes.remember(message.edge, self.shapes.unit(message), decode(header))

    def _receive(self, message: Message, boundary: TensorSpecs, introduced: bool) -> _TorchTransfer:
        """Return the transfer into buffers for a message; if a gradient's header comes with it, post the header's receive."""
        if introduced and boundary and message.channel.kind == "gradient":
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
            tag = _HEADER_TAGS["gradient"]
            self._headers[message] = self.links.control.recv([header], message.channel.source, tag), header
        works: list[Any] = []
        values = [None if spec is None else self.pool.take(spec) for spec in boundary]
        buffers = [value for value in values if value is not None]
        checksum = None
        if self.checksums and buffers:
            checksum = torch.empty(1, dtype=torch.int64, device=self.links.device)
            buffers.append(checksum)
        host = []
        if self.links.through_host:
            host = [(buffer, torch.empty_like(buffer, device="cpu")) for buffer in buffers]
            buffers = [arrived for _, arrived in host]
        self._opened[message] = Opened(works, tuple(values), boundary, checksum, host)
        return _TorchTransfer(message, buffers, works)

    def _start(self, transfer: _TorchTransfer, other: int) -> None:
        """Start a single message to or from rank `other`."""
        message = transfer.message
        group, peer = self.links.peer(message.channel, other)
        start = group.send if other == message.channel.destination else group.recv
        for tensor in transfer.tensors:
            transfer.works.append(start([as_sent(tensor)], peer, _TAGS[message.channel.kind]))

    def _start_batch(self, batch: Sequence[Outgoing | Message]) -> None:
        """Start the messages of `batch` in one call, or in several if it must wait for the header of a receive.

        The call is split there: the sender may need an earlier message of the batch to compute that one.
        """
        sends = {item.message: self._send(item) for item in batch if isinstance(item, Outgoing)}
        transfers: list[tuple[_TorchTransfer, bool]] = []
        for item in batch:
            if isinstance(item, Outgoing):
                transfers.append((sends[item.message], True))
                continue
            introduced = self.shapes.needs_header(item)
            if introduced and item.channel.kind == "activation":
                self._start_together(transfers)
                transfers = []
                self._introduce(item)
            boundary = self.shapes.of(item)
            assert boundary is not None  # of a gradient: this rank has sent the activations
            transfers.append((self._receive(item, boundary, introduced), False))
        self._start_together(transfers)

    def move(self, sends: Sequence[Outgoing], receives: Sequence[Message]) -> dict[Message, float]:
        """Start these messages in one call and wait for all of them; return when each had moved, on the host's clock."""
        self._start_batch([*sends, *receives])
        works = {outgoing.message: self._sending[outgoing.message][0] for outgoing in sends}
        works |= {message: self._opened[message].works for message in receives}

        def waited(started: list[Any]) -> float:
            while started:  # none is waited for again
                started.pop(0).wait()
            return time.perf_counter()

        with ThreadPoolExecutor(len(works)) as threads:
            return dict(zip(works, threads.map(waited, works.values()), strict=True))

    def _start_together(self, transfers: Sequence[tuple[_TorchTransfer, bool]]) -> None:
        """Start messages, each sent (True) or received (False), in one call."""
        operations: list[dist.P2POp] = []
        works_of: list[list[Any]] = []
        for (message, buffers, works), sent in transfers:
            call, other = (dist.isend, message.channel.destination) if sent else (dist.irecv, message.channel.source)
            for tensor in buffers:
                group, tag = self.links.group, _TAGS[message.channel.kind]
                operations.append(dist.P2POp(call, as_sent(tensor), group=group, tag=tag, group_peer=other))
                works_of.append(works)
        if operations:
            started = dist.batch_isend_irecv(operations)
            for at, works in enumerate(works_of):
                works.append(started[at if len(started) == len(operations) else 0])  # NCCL returns one work for all


class CoupledTransport:
    """Transport of one rank that moves the messages between two computations in one call, and returns at its end.

    Args:
        transport: what moves them.
        leave: is called with each message of a call and when it had moved, before the call ends.
    """

    def __init__(self, transport: TorchTransport, leave: Callable[[dict[Message, float]], object]) -> None:
        self._transport, self._leave = transport, leave
        self.arrived, self.take = transport.arrived, transport.take
        self.recycle, self.finish = transport.recycle, transport.finish

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        if sends or posts:
            self._leave(self._transport.move(sends, posts))
