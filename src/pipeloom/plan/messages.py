"""Bytes of the messages that a rank holds along its program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

from pipeloom.schedule import Schedule
from pipeloom.schedule.actions import KEPT, PENDING
from pipeloom.schedule.channels import Message, posting_plan, released_sends, traffic
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import unpair


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of one rank's messages.

    Attributes:
        buffers: of receives, which stay once they are there.
        used: entry of its program -> bytes in these buffers that are counted as values of a stage too: inputs that it keeps, and
            gradients that it works on or that wait for W.
        sent: entry -> bytes of sends that may not have arrived.
    """

    buffers: float
    used: tuple[float, ...]
    sent: tuple[float, ...]

    @property
    def most(self) -> float:
        """The buffers that are not used when the most are, and the most that is sent."""
        return self.buffers - max(self.used, default=0.0) + max(self.sent, default=0.0)

    @property
    def beside(self) -> tuple[float, ...]:
        """Bytes beside the values of stages during each entry, and at the end."""
        rows = zip(self.used, self.sent, strict=True)
        return *(self.buffers - used + sent for used, sent in rows), self.buffers


def message_bytes(
    schedule: Schedule, size: Callable[[Message], float], *, depth: int, ahead: bool, shared: bool
) -> list[MessageBytes]:
    """Return each rank's.

    Args:
        size: bytes of a message.
        depth, ahead: as of `posting_plan`.
        shared: sends are copied to memory that ranks share, and received from there when they are needed.
    """
    programs = traffic(schedule)
    # A peer may run the two actions of a pair one after the other.
    apart = traffic(unpair(schedule)) if schedule.has_pairs else programs
    ended = dict[str, list[str]]()  # by an action of each kind: the messages to its stage that it is the last to use
    for kind in schedule.kinds:
        last = KEPT in kind.frees, kind.is_backward and PENDING not in kind.makes
        ended[kind.letter] = [*compress(("activation", "gradient"), last)]
    rows = []
    for rank, program in enumerate(programs):
        posts = [entry.receives for entry in program] if shared else posting_plan(program, depth, ahead)
        releases = {} if shared else released_sends(apart, rank)
        held = defaultdict[tuple[Any, ...], list[float]](list)  # sizes by kind, consumer and unit
        open_now, most, sent = defaultdict[float, int](int), defaultdict[float, int](int), dict[Message, float]()
        used, under_way, of_entries, sent_by = 0.0, 0.0, list[float](), list[float]()
        for entry, posted in zip(program, posts, strict=True):
            for each in map(size, posted):
                open_now[each] += 1
                most[each] = max(most[each], open_now[each])
            for message in entry.receives:
                each = size(message)
                held[message.channel.kind, message.consumer, message.microbatch, message.slice].append(each)
                used += each
                for released in releases.get(message, ()):
                    under_way -= sent.pop(released, 0.0)
            of_entries.append(used)
            sent_by.append(under_way if sent else 0.0)
            for action in parts(entry.cell):
                for value in ended[action.kind]:
                    for each in held.pop((value, *action[1:]), ()):
                        open_now[each] -= 1
                        used -= each
            for message in () if shared else entry.sends:
                sent[message] = size(message)
                under_way += sent[message]
        rows.append(MessageBytes(sum(each * count for each, count in most.items()), tuple(of_entries), tuple(sent_by)))
    return rows
