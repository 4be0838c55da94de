"""Messages over torch.distributed: tags on gloo, a process group for each channel on NCCL."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime.boundary import HEADER_LENGTH, Boundary, Values, decode, encode
from pipeloom.runtime.buffers import BufferPool
from pipeloom.runtime.specs import SpecBook
from pipeloom.runtime.transport import Outgoing, tensors
from pipeloom.schedule.channels import Channel, Message

_TAGS = {"activation": 11, "gradient": 12}
_HEADER_TAG = 13


class _Batched(NamedTuple):
    """An operation of a batch, and the list that its work goes to."""

    operation: dist.P2POp
    works: list[Any]


class Opened(NamedTuple):
    """A receive that is under way."""

    works: list[Any]
    values: Values
    boundary: Boundary


@dataclass
class _Inbox:
    """A channel's receives: those not opened yet, in channel order; the first may have to wait for its header."""

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
        self.control = (
            mesh.group if has_gloo else dist.new_group(list(mesh.ranks), backend="gloo", use_local_synchronization=True)
        )
        if device.type == "cpu" or batched:
            return
        whole = len(mesh.ranks) == dist.get_world_size()
        # In one order on all ranks: torch names a group after those that the process has already.
        for channel in channels:
            pair = sorted((mesh.ranks[channel.source], mesh.ranks[channel.destination]))
            group = dist.new_group(pair, use_local_synchronization=not whole, group_desc=f"pipeloom {channel}")
            if mesh.rank not in (channel.source, channel.destination):
                continue
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # connect now: a first send would block
            self._of[channel] = group, {rank: dist.get_group_rank(group, mesh.ranks[rank]) for rank in channel[:2]}

    def peer(self, channel: Channel, rank: int) -> tuple[Any, int]:
        """The channel's group, and `rank`'s number in it."""
        if channel in self._of:
            group, numbers = self._of[channel]
            return group, numbers[rank]
        return self.group, rank


class TorchTransport:
    """One rank's messages. `batched` puts all that falls between two actions into one call."""

    def __init__(
        self,
        links: Links,
        acknowledges: dict[Message, tuple[Message, ...]],
        book: SpecBook,
        pool: BufferPool,
        batched: bool,
    ) -> None:
        self._links = links
        self._acknowledges = acknowledges
        self._book = book
        self._pool = pool
        self._batched = batched
        self._inboxes: dict[Channel, _Inbox] = {}
        self._opened: dict[Message, Opened] = {}
        self._sending: dict[Message, tuple[list[Any], list[Tensor]]] = {}

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        batch: list[_Batched] | None = [] if self._batched else None
        for outgoing in sends:
            self._send(outgoing, batch)
        for message in posts:
            self._inboxes.setdefault(message.channel, _Inbox()).queue.append(message)
        for inbox in self._inboxes.values():
            if inbox.queue:
                self._open(inbox, batch)
        if batch:
            works = dist.batch_isend_irecv([entry.operation for entry in batch])
            for at, entry in enumerate(batch):
                entry.works.append(works[at] if len(works) == len(batch) else works[0])  # NCCL: one work for all

    def arrived(self, message: Message) -> bool:
        return True

    def take(self, message: Message) -> tuple[Values, Boundary]:
        inbox = self._inboxes[message.channel]
        while message not in self._opened:
            self._introduce(inbox)
            self._open(inbox, None)
        works, values, boundary = self._opened.pop(message)
        for work in works:
            work.wait()
        if works:
            for sent in self._acknowledges.get(message, ()):
                self._release(sent)
        return values, boundary

    def recycle(self, values: Values) -> None:
        for value in values:
            if value is not None:
                self._pool.give(value)

    def finish(self) -> None:
        for message in list(self._sending):
            self._release(message)
        if self._opened or any(inbox.queue for inbox in self._inboxes.values()):
            raise DistributedError(
                "receives were left open at the end of the step"
            )  # a bug of ours: the plan posts what is used

    def _release(self, message: Message) -> None:
        works, _ = self._sending.pop(message, ((), ()))
        for work in works:
            work.wait()

    def _send(self, outgoing: Outgoing, batch: list[_Batched] | None) -> None:
        message = outgoing.message
        group, peer = self._links.peer(message.channel, message.channel.destination)
        tag = _TAGS[message.channel.kind]
        works: list[Any] = []
        kept = tensors(outgoing.values)
        introduces = self._book.introduces(message)
        if introduces:
            header = encode(outgoing.boundary)
            works.append(self._links.control.send([header], message.channel.destination, _HEADER_TAG))
            kept = [*kept, header]
        for tensor in kept[:-1] if introduces else kept:
            if batch is None or introduces:
                works.append(group.send([tensor], peer, tag))
            else:
                batch.append(_Batched(dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer), works))
        self._sending[message] = works, kept

    def _open(self, inbox: _Inbox, batch: list[_Batched] | None) -> None:
        """Opens receives while their shapes are known; one with a header of its own never goes into a batch."""
        while inbox.queue:
            message = inbox.queue[0]
            if inbox.introduced is None:
                inbox.introduced = self._book.introduces(message)
            boundary = self._book.of(message)
            if boundary is None:
                break
            introduced, inbox.introduced = inbox.introduced, None
            inbox.queue.popleft()
            self._opened[message] = self._receive(message, boundary, None if introduced else batch)

    def _introduce(self, inbox: _Inbox) -> None:
        """Waits for the header of the first message in the queue."""
        message = inbox.queue[0]
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
        self._links.control.recv([header], message.channel.source, _HEADER_TAG).wait()
        self._book.learn(message.stage, message.microbatch, decode(header))

    def _receive(self, message: Message, boundary: Boundary, batch: list[_Batched] | None) -> Opened:
        group, peer = self._links.peer(message.channel, message.channel.source)
        tag = _TAGS[message.channel.kind]
        works: list[Any] = []
        values: list[Tensor | None] = []
        for spec in boundary:
            value = None if spec is None else self._pool.take(spec)
            values.append(value)
            if value is None:
                continue
            if batch is None:
                works.append(group.recv([value], peer, tag))
            else:
                batch.append(_Batched(dist.P2POp(dist.irecv, value, group=group, tag=tag, group_peer=peer), works))
        return Opened(works, tuple(values), boundary)
