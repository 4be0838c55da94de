"""The batched transport under NCCL's rule, in one process: every family, its gradients and its evaluation."""

from __future__ import annotations

import pytest
import torch

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import UsageError
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.batch import split_sizes
from pipeloom.runtime.p2p.base import BatchQueue, Communicator, InProcessBatches, Outgoing
from pipeloom.schedule.channels import Channel, Edge, Message
from pipeloom.schedule.families import FAMILIES


@pytest.mark.parametrize("shapes", ["once", "each"])  # the latter posts no receive ahead
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 4), (3, 7), (4, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_nccls_rule(family: str, ranks: int, microbatches: int, shapes: str) -> None:
    try:
        schedule = pl.schedules.build(family, ranks, microbatches)
    except UsageError as refused:
        pytest.skip(str(refused))
    layers, (x, y) = blocks(schedule.stages), batch(2 * microbatches + 1)
    options = RuntimeOptions(transport="batched", shapes=shapes)  # type: ignore[arg-type]
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=options)
    loss = pipeline.step(x, y)
    want_loss, want = serial(layers, x, y, split_sizes(len(x), microbatches))
    assert abs(loss - want_loss) <= 1e-6
    assert worst(gradients(pipeline), want) <= 1e-6
    assert abs(pipeline.evaluate(x, y) - want_loss) <= 1e-6


DOWN, UP = Channel(0, 1, "activation"), Channel(1, 0, "gradient")
FIRST, SECOND = (Message(DOWN, Edge(0, 1, "output"), number, number) for number in range(2))
BACK = Message(UP, Edge(0, 1, "output"), 0, 0)


def sent(message: Message) -> Outgoing:
    return Outgoing(message, (torch.ones(1),), ())


def test_a_batch_ends_when_all_its_messages_have_moved() -> None:
    both = Communicator(2)
    ranks = [InProcessBatches(both, 0, [(FIRST,), (BACK,)]), InProcessBatches(both, 1, [(FIRST, SECOND), (BACK,)])]
    ranks[0].exchange([sent(FIRST)], [BACK])
    ranks[1].exchange([sent(BACK)], [FIRST, SECOND])
    assert not ranks[1].arrived(FIRST)  # its batch holds a message that nobody has sent
    assert not ranks[0].arrived(BACK)  # and the batch behind it waits
    with pytest.raises(RuntimeError, match="rank 0 has batches left"):
        ranks[0].finish()
    both.issue(0, [sent(SECOND)])  # but behind the receive of BACK, which waits for rank 1's first batch
    assert not ranks[1].arrived(FIRST)


def test_messages_between_two_ranks_match_in_order() -> None:
    both = Communicator(2)
    both.issue(0, [sent(SECOND), sent(FIRST)])
    with pytest.raises(
        RuntimeError, match="output of stage 0 micro-batch 1 met the receive of the output of stage 0 micro"
    ):
        both.issue(1, [FIRST, SECOND])


def test_a_batch_is_due_once_all_its_sends_are_made_and_its_receives_posted() -> None:
    queue = BatchQueue([(FIRST, BACK), (SECOND,)])
    assert queue.due([sent(FIRST)], []) == []
    assert queue.due([sent(SECOND)], []) == []
    assert [[type(each) for each in each] for each in queue.due([], [BACK])] == [[Outgoing, Message], [Outgoing]]
    assert not queue
