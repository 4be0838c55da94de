"""A segmented layer whose all-to-all is traffic through the copy engines to pinned host memory and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values, in_order
from pipeloom.runtime import Layer


class Delays:
    """Called wherever a stream gets work; a stress test puts delays of random length there."""

    on: Callable[[], None] | None = None

    @classmethod
    def pause(cls) -> None:
        if cls.on is not None:
            cls.on()


class Copies:
    """What communications move, and how long they take.

    Attributes:
        share: of its rows that a communication moves there and back; 0: none, as if it were free.
        events: (start, end) of each communication on its stream; None: they are not timed.
    """

    share = 1.0
    events: list[tuple[Any, Any]] | None = None


class HostTrip:
    """Moves the first value to pinned host memory and back, on the stream that it is started on."""

    quick = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, values: Values) -> Pending:
        return Done((self._there_and_back(values[0]), *values[1:]))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return Done((self._there_and_back(gradients[0]), *gradients[1:]))

    def _there_and_back(self, rows: Tensor) -> Tensor:
        if Copies.share == 0:
            return rows
        begun = _event()
        Delays.pause()
        arrived = torch.empty_like(rows) if Copies.share == 1 else rows.clone()
        if Delays.on is not None:
            arrived.fill_(math.nan)  # seen by whoever reads it before its rows have arrived
        flat, moved = rows.reshape(-1), round(rows.numel() * Copies.share)
        host = torch.empty(moved, dtype=rows.dtype, device="cpu", pin_memory=rows.is_cuda)
        host.copy_(flat[:moved], non_blocking=True)
        Delays.pause()
        arrived.view(-1)[:moved].copy_(host, non_blocking=True)
        Delays.pause()
        if begun is not None and Copies.events is not None:
            Copies.events.append((begun, _event()))
        return arrived


def _event() -> Any:
    """A CUDA event with a time on the current stream; None where communications are not timed."""
    if Copies.events is None or not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Block(nn.Module):
    """Attention's and the experts' products with a communication before and behind the latter: [tokens, width]."""

    def __init__(self, width: int, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention, self.up, self.down = (
            nn.Linear(width, width, dtype=dtype, device=device),
            nn.Linear(width, 2 * width, dtype=dtype, device=device),
            nn.Linear(2 * width, width, dtype=dtype, device=device),
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)

    def segments(self, **keywords: Any) -> Sequence[Segment]:
        return (
            Compute("attention", self._attend),
            HostTrip("dispatch"),
            Compute("experts", self._compute),
            HostTrip("combine"),
            Compute("sum", lambda values: (values[0] + values[1],)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.segments(), (x,))[0]  # type: ignore[no-any-return]

    def _attend(self, values: Values) -> Values:
        Delays.pause()
        attended = values[0] + torch.tanh(self.attention(values[0]))
        return attended * 0.5, attended

    def _compute(self, values: Values) -> Values:
        Delays.pause()
        return self.down(F.silu(self.up(values[0]))), *values[1:]


def blocks(count: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    return [Layer(f"block{at}", partial(Block, width, at, dtype, device)) for at in range(count)]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target.float()) ** 2).mean()
