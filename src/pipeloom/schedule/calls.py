"""Calls: where a rank stands between two computations until its messages have moved, for senders that wait (`Costs.sends`).

The messages that a rank sends from one computation and receives for its next one are one call, which it reaches as the first of
them ends, and leaves as the second one starts. What travels between two ranks belongs to a call on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeloom.schedule.actions import COMPUTE
from pipeloom.schedule.channels import Message, traffic
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule

Call = tuple[int, int]
"""Rank, and the entry of its program before which the call stands; the program's length: behind the last one."""


@dataclass(frozen=True)
class Calls:
    """All calls of a step; none where senders do not wait.

    Attributes:
        waits: call -> the calls that must have been reached, itself among them, and how long before the next computation.
        before: call -> the computation before it, None for the first of a rank.
    """

    waits: Mapping[Call, Mapping[Call, float]]
    before: Mapping[Call, int | None]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Calls:
        """Return the calls under `Costs.sends`. The schedule must have passed `check` with free sends."""
        waits: dict[Call, dict[Call, float]] = {}
        before: dict[Call, int | None] = {}
        if costs.sends == "free":
            return cls(waits, before)
        sent: dict[Message, Call] = {}
        received: dict[Message, Call] = {}
        for rank, program in enumerate(traffic(schedule)):
            computations = schedule.queues[rank][COMPUTE]
            ends = (*computations, len(program))
            before |= {(rank, at): last for at, last in zip(ends, (None, *computations), strict=True)}
            for at, following in zip(computations, ends[1:], strict=True):
                received |= dict.fromkeys(program[at].receives, (rank, at))
                sent |= dict.fromkeys(program[at].sends, (rank, following))
        factors = costs.size_factors(schedule)
        for message, source in sent.items():
            if message not in received:
                continue  # it is used beside computation
            destination = received[message]
            unit = message.microbatch * schedule.slices + (message.slice or 0)
            hop = costs.hop(source[0], destination[0], factors[unit], message.edge.name)
            late = {source: hop, destination: hop}
            for call, others in (source, late if costs.sends == "coupled" else {destination: 0.0}), (destination, late):
                held = waits.setdefault(call, {})
                held |= {other: max(time, held.get(other, 0.0)) for other, time in others.items()}
        return cls(waits, before)

    @cached_property
    def number(self) -> dict[Call, int]:
        """call -> its number."""
        return {call: number for number, call in enumerate(self.waits)}

    @cached_property
    def after(self) -> dict[Call, Call]:
        """(rank, computation) -> the call behind it, where there is one."""
        return {(rank, last): (rank, at) for rank, at in self.waits if (last := self.before[rank, at]) is not None}

    def firsts(self) -> Iterator[Call]:
        """Yield the calls before the first computations of ranks."""
        return (call for call in self.waits if self.before[call] is None)


NO_CALLS = Calls({}, {})
