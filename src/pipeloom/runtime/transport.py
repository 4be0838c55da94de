"""The transport protocol, and the one that stays inside a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from pipeloom.runtime.boundary import Boundary, Values
from pipeloom.schedule.channels import Channel, Message


class Outgoing(NamedTuple):
    """A message on its way: its values (for a gradient: one tensor for each that carries) and their specs."""

    message: Message
    values: Values
    boundary: Boundary


class PeerGone(RuntimeError):
    """The connection to `rank` is closed."""

    def __init__(self, rank: int, reason: object) -> None:
        super().__init__(str(reason))
        self.rank = rank


class Transport(Protocol):
    """How messages move. One object a rank."""

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        """Starts these sends and opens these receives; returns at once."""

    def arrived(self, message: Message) -> bool:
        """False: `take` would block, and the engine lets another rank of this thread run instead."""

    def take(self, message: Message) -> tuple[Values, Boundary]:
        """The message's values, in buffers that are the caller's, waiting for them if need be."""

    def recycle(self, values: Values) -> None:
        """These received values are no longer used."""

    def finish(self) -> None:
        """Waits until every send of the step has left."""


@dataclass
class Mailroom:
    """Shared by all ranks of one process: channel -> messages in flight, first in, first out."""

    boxes: dict[Channel, dict[int, Outgoing]] = field(default_factory=dict)


class InProcessTransport:
    """All ranks in one thread: notebooks, debuggers, tests. Honours the channels' order and the open receives."""

    def __init__(self, mailroom: Mailroom) -> None:
        self._boxes = mailroom.boxes
        self._open: set[Message] = set()

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        for outgoing in sends:
            values = tuple(None if v is None else v.detach() for v in outgoing.values)
            self._boxes.setdefault(outgoing.message.channel, {})[outgoing.message.number] = outgoing._replace(
                values=values
            )
        self._open.update(posts)

    def arrived(self, message: Message) -> bool:
        return message in self._open and message.number in self._boxes.get(message.channel, {})

    def take(self, message: Message) -> tuple[Values, Boundary]:
        self._open.discard(message)
        outgoing = self._boxes[message.channel].pop(message.number)
        if outgoing.message != message:
            raise RuntimeError(f"channel {message.channel} brought {outgoing.message.words} instead of {message.words}")
        return outgoing.values, outgoing.boundary

    def recycle(self, values: Values) -> None:
        """Nothing to do: the values belonged to the sender's graph."""

    def finish(self) -> None:
        """Nothing to wait for."""


def tensors(values: Values) -> list[Tensor]:
    """The tensors among the values, detached and in one piece each, ready to be sent."""
    return [value.detach().contiguous() for value in values if value is not None]
