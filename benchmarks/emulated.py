"""A block whose computations sleep and whose all-to-alls are timers: attention, dispatch, experts, combine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.segments import Compute, Pending, Segment, Values, in_order
from pipeloom.schedule.segments import Times

UNIT = 0.010


@dataclass
class Clock:
    """What one process's emulated computations really took, and when its link is free again.

    Attributes:
        seconds: (part of the layer, F I or W) -> the times of its sleeps.
        free: when the last all-to-all started so far will have ended.
    """

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    free: float = 0.0

    def sleep(self, name: str, kind: str, seconds: float) -> None:
        begun = time.perf_counter()
        time.sleep(seconds)
        self.seconds[name, kind].append(time.perf_counter() - begun)

    def times(self, name: str) -> Times:
        """The means of one part's sleeps."""
        return Times(*(fmean(self.seconds[name, kind]) for kind in "FIW"))


class _Sleep(torch.autograd.Function):
    """x times a weight; F, I and W take a unit each. W waits if there is a queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, clock: Clock, queue: WeightGradQueue | None) -> Tensor:
        ctx.of = name, clock, queue
        ctx.save_for_backward(weight)
        clock.sleep(name, "F", UNIT)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, clock, queue = ctx.of
        (weight,) = ctx.saved_tensors
        clock.sleep(name, "I", UNIT)
        later = partial(clock.sleep, name, "W", UNIT)
        if queue is None:
            later()
        else:
            queue.put(later)
        return gradients[0] * weight, None, None, None, None


class _Timer:
    """An all-to-all that is over at a moment known from its start."""

    def __init__(self, values: Values, end: float) -> None:
        self.values, self.end = values, end

    def wait(self) -> Values:
        time.sleep(max(self.end - time.perf_counter(), 0.0))
        return self.values


class _Timed:
    """An emulated all-to-all; those of one process follow one another on its link."""

    quick = False

    def __init__(self, name: str, clock: Clock, seconds: float) -> None:
        self.name, self.clock, self.seconds = name, clock, seconds

    def start(self, values: Values) -> Pending:
        self.clock.free = max(time.perf_counter(), self.clock.free) + self.seconds
        return _Timer(values, self.clock.free)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return self.start(gradients)


class EmulatedBlock(nn.Module):
    """Attention, dispatch, experts, combine, with given times; `split`: whether its weight gradients can wait."""

    def __init__(self, clock: Clock, talk: float, split: bool) -> None:
        super().__init__()
        self.clock, self.split = clock, split
        self.talks = [_Timed(name, clock, talk) for name in ("dispatch", "combine")]
        self.scale = nn.Parameter(torch.ones(()))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def segments(self) -> Sequence[Segment]:
        dispatch, combine = self.talks
        return Compute("attention", self.part("attention")), dispatch, Compute("experts", self.part("experts")), combine

    def part(self, name: str) -> Callable[[Values], Values]:
        def run(values: Values) -> Values:
            queue = self.grad_context.queue if self.split else None
            return (_Sleep.apply(values[0] * self.scale, torch.ones(()), name, self.clock, queue),)  # type: ignore[no-untyped-call]

        return run

    def forward(self, x: Tensor) -> Tensor:
        (out,) = in_order(self.segments(), (x,))
        return out  # type: ignore[no-any-return]
