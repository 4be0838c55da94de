"""Injected faults, to test and show what happens then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.runtime.tensor_spec import BoundaryValues
from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message

if TYPE_CHECKING:
    from pipeloom.runtime.p2p.base import Outgoing, Transport


class InjectedFault(RuntimeError):
    """Raised by an injected fault."""


class Faults:
    """One rank's part of a fault (an object with `kind`, and the values of that kind); without a fault, no effect.

    Kinds: swap-microbatches (a, b): the first stage gets their inputs exchanged. drop-send (rank, number): that rank's send
    of this number, from 0, is lost. flip-bit (rank, number): of that send one bit arrives flipped. raise (rank, action): an
    exception there. kill (rank, step): SIGKILL as that step starts. An error calls the fault by its `name`, if it has one.
    """

    def __init__(self, fault: Any, rank: int) -> None:
        self._kind = getattr(fault, "kind", None)
        self._fault = fault
        self._name = getattr(fault, "name", "a fault")
        self._mine = getattr(fault, "rank", None) == rank
        self._sent = 0

    def inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return micro-batch -> its inputs."""
        if self._kind != "swap-microbatches":
            return inputs
        swapped: dict[int, int] = {self._fault.a: self._fault.b, self._fault.b: self._fault.a}
        return [inputs[swapped.get(at, at)] for at in range(len(inputs))]

    def over(self, transport: Transport) -> Transport:
        """Return the transport that loses or damages a send, if that is the fault."""
        if self._kind not in ("drop-send", "flip-bit") or not self._mine:
            return transport
        faulty: Any = _FaultyTransport(transport, self.sent)
        return faulty  # type: ignore[no-any-return]

    def sent(self, values: BoundaryValues) -> BoundaryValues | None:
        """Return the values of the next send, with a flipped bit if that is the fault; None if the send is lost."""
        number, self._sent = self._sent, self._sent + 1
        if number != self._fault.number:
            return values
        return None if self._kind == "drop-send" else self._with_a_bit_flipped(values)

    def _with_a_bit_flipped(self, values: BoundaryValues) -> BoundaryValues:
        at = next((at for at, value in enumerate(values) if value is not None and value.numel()), None)
        if at is None:
            return values
        value = values[at]
        assert value is not None
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        data = copy.view(-1).view(torch.uint8)
        data[data.numel() // 2 // copy.element_size() * copy.element_size()] ^= 1  # in a number's lowest byte
        return (*values[:at], copy, *values[at + 1 :])

    def before(self, action: Action) -> None:
        if self._kind == "raise" and self._mine and str(action) == str(self._fault.action):
            raise InjectedFault(f"{self._name} raised at {action}")

    def at_step(self, step: int) -> None:
        if self._kind == "kill" and self._mine and step == self._fault.step:
            os.kill(os.getpid(), signal.SIGKILL)


class _FaultyTransport:
    """A transport whose sends `sent` changes or, where it returns None, loses."""

    def __init__(self, transport: Transport, sent: Callable[[BoundaryValues], BoundaryValues | None]) -> None:
        self._transport = transport
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, sends: Sequence[Outgoing], posts: Sequence[Message]) -> None:
        values = [self._sent(outgoing.values) for outgoing in sends]
        passed = zip(sends, values, strict=True)
        self._transport.exchange([each._replace(values=sent) for each, sent in passed if sent is not None], posts)
