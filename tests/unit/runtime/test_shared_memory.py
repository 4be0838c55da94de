"""Messages through shared memory: a rank may end before others have read what it sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.runtime.health.links import RunStore
from pipeloom.runtime.p2p.base import BufferPool, Outgoing, PeerGone
from pipeloom.runtime.p2p.shared_memory import SharedLinks, SharedMemoryTransport, _SharedSegment
from pipeloom.runtime.tensor_spec import boundary_of
from pipeloom.schedule.channels import Channel, Edge, Message

CHANNEL = Channel(0, 1, "activation")
BACK = Channel(1, 0, "gradient")


def message(number: int) -> Message:
    return Message(CHANNEL, Edge(0, 1, "output"), number, number)


def links() -> list[SharedLinks]:
    store = RunStore(dist.HashStore(), b"", 20.0)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(SharedLinks, store, "test", rank, (CHANNEL, BACK), 20.0, False) for rank in range(2)]
        return [each.result() for each in made]


def send(transport: SharedMemoryTransport, number: int) -> Tensor:
    value = torch.full((3,), float(number))
    transport.exchange([Outgoing(message(number), (value,), boundary_of((value,)))], ())
    return value


def test_what_a_rank_sent_before_it_ended_arrives() -> None:
    sender, receiver = links()
    pool = BufferPool(torch.device("cpu"))
    out, into = SharedMemoryTransport(sender, pool), SharedMemoryTransport(receiver, pool)
    sent = [send(out, number) for number in range(2)]
    sender.close()
    for number in (1, 0):
        values = into.take(message(number)).values
        assert values[0] is not None
        assert torch.equal(values[0], sent[number])
    with pytest.raises(PeerGone, match="closed its connection"):
        into.take(message(2))
    receiver.close()


def test_what_a_rank_sent_before_it_ended_arrives_although_it_did_not_read_all() -> None:
    """The system reports unread data of a closed socket as an error, ahead of what that socket had sent."""
    sender, receiver = links()
    pool = BufferPool(torch.device("cpu"))
    out, into = SharedMemoryTransport(sender, pool), SharedMemoryTransport(receiver, pool)
    sent = send(out, 0)
    unread = torch.zeros(3)
    answer = Message(BACK, Edge(0, 1, "output"), 0, 0)
    into.exchange([Outgoing(answer, (unread,), boundary_of((unread,)))], ())
    sender.close()
    (value,) = into.take(message(0)).values
    assert value is not None
    assert torch.equal(value, sent)
    with pytest.raises(PeerGone, match="closed its connection"):
        into.take(message(1))
    receiver.close()


def test_shared_memory_is_free_only_once_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender sends on while the receiver is about to copy."""
    sender, receiver = links()
    pool = BufferPool(torch.device("cpu"))
    out, into = SharedMemoryTransport(sender, pool), SharedMemoryTransport(receiver, pool)
    reading = False
    original = _SharedSegment.tensor
    sent: list[int] = []

    def send_next() -> None:
        sent.append(len(sent))
        send(out, sent[-1])

    def tensor(segment: _SharedSegment, like: Tensor) -> Tensor:
        nonlocal reading
        if reading and len(sent) < 6:
            reading = False
            send_next()
        return original(segment, like)

    monkeypatch.setattr(_SharedSegment, "tensor", tensor)
    send_next()
    for number in range(6):
        reading = True
        values = into.take(message(number)).values
        assert values[0] is not None
        assert values[0].tolist() == [float(number)] * 3
    assert len(sender.outboxes[1].segments) == 2
    sender.close()
    receiver.close()
