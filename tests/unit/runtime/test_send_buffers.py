"""Send buffers stay as they are until the receiver has what was sent, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.runtime import RuntimeOptions
from pipeloom.runtime.p2p.base import BufferPool, Outgoing
from pipeloom.runtime.p2p.torch_p2p import TorchTransport
from pipeloom.runtime.program import lower
from pipeloom.runtime.tensor_spec import ShapeCache, boundary_of, encode
from pipeloom.schedule.channels import Channel, Message
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import unpair

FAMILIES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev", "1f1b-overlap", "chimera"]
SCHEDULES = [*(pl.schedules.build(name, 4, 8) for name in FAMILIES), pl.schedules.build("interleaved", 2, 4)]


def positions(schedule: Schedule) -> dict[tuple[str, int, int], tuple[int, int]]:
    """(F or I, stage, micro-batch) -> its rank and place, the parts of a pair one after the other."""
    return {
        ("F" if action.kind == "F" else "I", action.stage, action.microbatch): (rank, at)
        for rank, program in enumerate(unpair(schedule).programs)
        for at, action in enumerate(program)
        if action.kind != "W"
    }


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_message_acknowledges_what_its_maker_has_used_and_nothing_else(schedule: Schedule) -> None:
    places = positions(schedule)
    steps = {  # message -> what makes it, what uses it
        kind: {
            (stage, mb): (places[part, stage, mb], places[part, following, mb])
            for mb, route in ((mb, schedule.routes[schedule.route_of[mb]]) for mb in range(schedule.microbatches))
            for stage, following in zip(*pairs(route, kind), strict=True)
        }
        for kind, part in (("activation", "F"), ("gradient", "I"))
    }
    for rank in range(schedule.ranks):
        program = lower(schedule, rank, RuntimeOptions())
        sent = [m for step in program.instructions for m in step.sends]
        acknowledged: dict[int, set[Message]] = {}
        latest = [-1] * schedule.ranks  # how far each peer's program must have come
        for step in program.instructions:
            for message in step.receives:
                peer = message.channel.source
                mine = acknowledged.setdefault(peer, set())
                mine.update(program.releases_sends[message])
                made = steps[message.channel.kind][message.producer, message.microbatch][0]
                assert made[0] == peer
                latest[peer] = max(latest[peer], made[1])
                uses = {m: steps[m.channel.kind][m.producer, m.microbatch][1] for m in sent}
                assert mine == {m for m, (user, at) in uses.items() if user == peer and at <= latest[peer]}, (
                    message.words
                )


def pairs(route: Sequence[int], kind: str) -> tuple[Sequence[int], Sequence[int]]:
    return (route[:-1], route[1:]) if kind == "activation" else (route[1:], route[:-1])


class Work:
    """A send or receive of the fake group below."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.waited = False

    def wait(self) -> None:
        assert self.tensor() is not None, "the buffer was let go before its operation was waited for"
        self.waited = True


class Group:
    """A process group that holds nothing alive itself."""

    def __init__(self) -> None:
        self.sends: list[Work] = []

    def send(self, tensors: list[Tensor], *_: Any) -> Work:
        self.sends.append(Work(tensors[0]))
        return self.sends[-1]

    def recv(self, tensors: list[Tensor], *_: Any) -> Work:
        if tensors[0].dtype == torch.int64:
            tensors[0].copy_(encode(boundary_of((torch.ones(3),))))
        return Work(tensors[0])


def test_a_sent_tensor_lives_until_its_acknowledgement() -> None:
    schedule = pl.schedules.build("1f1b", 2, 3)
    program = lower(schedule, 0, RuntimeOptions())
    group = Group()

    class Links:
        control = group
        through_host = False

        def peer(self, channel: Channel, rank: int) -> tuple[Group, int]:
            return group, rank

    book, pool = ShapeCache("once"), BufferPool(torch.device("cpu"))
    book.begin([0, 0, 0])
    transport = TorchTransport(Links(), program.releases_sends, book, pool)  # type: ignore[arg-type]
    waiting: dict[Message, list[Work]] = {}
    seen = 0
    for step in program.instructions:
        transport.exchange((), step.post_receives)
        for message in step.receives:
            transport.take(message)
            for sent in program.releases_sends[message]:
                assert all(work.waited for work in waiting.pop(sent))
                seen += 1
        for message in step.sends:
            value = torch.ones(3, requires_grad=True) * message.microbatch
            book.remember(message.edge, message.microbatch, boundary_of((value,)))
            before = len(group.sends)
            transport.exchange([Outgoing(message, (value,), boundary_of((value,)))], ())
            waiting[message] = group.sends[before:]
            del value
        gc.collect()
        assert all(work.tensor() is not None and not work.waited for works in waiting.values() for work in works)
    assert seen == 3
    assert not waiting
    transport.finish()
    gc.collect()
    assert all(work.tensor() is None for work in group.sends)
