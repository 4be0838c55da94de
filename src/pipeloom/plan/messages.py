"""Bytes of the messages that a rank holds along its program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.schedule import Schedule
from pipeloom.schedule.actions import KEPT, PENDING, kind_of, unit_words
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
    rows = []
    for rank, program in enumerate(programs):
        posts = [entry.receives for entry in program] if shared else posting_plan(program, depth, ahead)
        releases = {} if shared else released_sends(apart, rank)
        held: dict[tuple[str, int, str], list[Message]] = defaultdict(list)
        open_now, most, sent = Counter[float](), Counter[float](), dict[Message, float]()
        used, of_entries, sent_by = 0.0, list[float](), list[float]()
        for entry, posted in zip(program, posts, strict=True):
            open_now.update(map(size, posted))
            most |= open_now
            for message in entry.receives:
                unit = unit_words(message.microbatch, message.slice)
                held[message.channel.kind, message.consumer, unit].append(message)
                used += size(message)
                for released in releases.get(message, ()):
                    sent.pop(released, None)
            of_entries.append(used)
            sent_by.append(sum(sent.values()))
            for action in parts(entry.cell):
                kind = kind_of(action.kind)
                unit = unit_words(action.microbatch, action.slice)
                ended = held.pop(("activation", action.stage, unit), []) if KEPT in kind.frees else []
                if kind.is_backward and PENDING not in kind.makes:
                    ended += held.pop(("gradient", action.stage, unit), [])
                sizes = [size(message) for message in ended]
                open_now.subtract(sizes)
                used -= sum(sizes)
            sent |= {} if shared else {message: size(message) for message in entry.sends}
        rows.append(MessageBytes(sum(each * count for each, count in most.items()), tuple(of_entries), tuple(sent_by)))
    return rows
