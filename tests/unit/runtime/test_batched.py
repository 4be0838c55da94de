"""When the batched transport starts a batch; that the batches of all ranks meet is tested with the schedules."""

from __future__ import annotations

import torch

from pipeloom.runtime.p2p.base import BatchQueue, Outgoing
from pipeloom.schedule.channels import Channel, Edge, Message

FIRST, SECOND = (Message(Channel(0, 1, "activation"), Edge(0, 1, "output"), number, number) for number in range(2))
BACK = Message(Channel(1, 0, "gradient"), Edge(0, 1, "output"), 0, 0)


def sent(message: Message) -> Outgoing:
    return Outgoing(message, (torch.ones(1),), ())


def test_a_batch_is_due_once_all_its_sends_are_made_and_its_receives_posted() -> None:
    queue = BatchQueue([(FIRST, BACK), (SECOND,)])
    assert queue.due([sent(FIRST)], []) == []
    assert queue.due([sent(SECOND)], []) == []
    assert [[type(each) for each in each] for each in queue.due([], [BACK])] == [[Outgoing, Message], [Outgoing]]
    assert not queue
