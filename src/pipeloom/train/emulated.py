"""Layers that take given times instead of computing: they sleep, or spin on a GPU, and pass on their input."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Compute, Pending, Segment, Values, in_order
from pipeloom.schedule.segments import LayerSegments, PhaseTimes

_BACK_TO_BACK = 0.002
"""Seconds between two computations within which the second makes up for the oversleeping of the first. The executor needs
about 0.3 ms from one action to the next; after a longer gap the rank waited for a message, and has nothing to make up for."""

_CALIBRATION_CYCLES = 50_000_000


class Clock:
    """The device of one process, as its emulated layers use it.

    On a CPU a computation sleeps until a deadline. The deadline of a computation that follows another at once is counted from
    the other's deadline, not from its end, so that the errors of sleeps do not add up. On a GPU a computation is a spinning
    kernel.

    Args:
        device: device that the computations occupy; None: the CPU.

    Attributes:
        seconds: (part of a layer, "F", "I" or "W") -> durations of its computations on a CPU.
        free: time (`perf_counter`) at which the last communication started so far ends.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.free = 0.0
        self._due = self._woken = 0.0
        self._cycles = cycles_per_second(device) if device is not None and device.type == "cuda" else 0.0

    def compute(self, name: str, kind: str, seconds: float) -> None:
        """Occupy the device for `seconds`; on a GPU, enqueue a kernel that does. `name` and `kind` are the key in `seconds`."""
        if self._cycles:
            torch.cuda._sleep(round(seconds * self._cycles))  # type: ignore[no-untyped-call]
            return
        begun = time.perf_counter()
        overslept = self._woken - self._due if begun - self._woken < _BACK_TO_BACK else 0.0
        self._due = begun + seconds - overslept
        time.sleep(max(0.0, self._due - begun))
        self._woken = time.perf_counter()
        self.seconds[name, kind].append(self._woken - begun)

    def times(self, name: str) -> PhaseTimes:
        """Return the mean durations of F, I and W of the part `name`, in seconds."""
        return PhaseTimes(*(fmean(self.seconds[name, kind]) for kind in "FIW"))


def cycles_per_second(device: torch.device) -> float:
    """Return the cycles per second that a spinning kernel counts on this GPU.

    Only the last of four kernels is timed: a GPU that was idle raises its clock during the first ones.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for _ in range(4):
            begin.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return _CALIBRATION_CYCLES / (milliseconds * 1e-3)


@dataclass(frozen=True)
class _Work:
    """The times of one part of a layer for one micro-batch, and the queue for its W; None: W runs at once."""

    clock: Clock
    name: str
    times: PhaseTimes
    queue: WeightGradQueue | None


class _Emulated(torch.autograd.Function):
    """Passes on a copy of its input, and takes the times of F, I and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: _Work) -> Tensor:
        ctx.work = work
        work.clock.compute(work.name, "F", work.times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        work: _Work = ctx.work
        work.clock.compute(work.name, "I", work.times.input_grad)
        later = partial(work.clock.compute, work.name, "W", work.times.weight_grad)
        if work.queue is None:
            later()
        else:
            work.queue.put(later)
        return gradients[0], gradients[0].new_zeros(()), None


class EmulatedLayer(nn.Module):
    """A layer with given times of F, I and W.

    Args:
        times: times of one micro-batch, in seconds.
        factors: factor on the times of each micro-batch; empty: 1 for all.
    """

    def __init__(self, clock: Clock, times: PhaseTimes, factors: Sequence[float] = ()) -> None:
        super().__init__()
        self.clock, self.times, self.factors = clock, times, factors
        self.weight = nn.Parameter(torch.zeros(()))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        times = _times(self.times, _factor(self.factors, microbatch))
        return _Emulated.apply(x, self.weight, _Work(self.clock, "layer", times, self.grad_context.queue))  # type: ignore[no-any-return, no-untyped-call]


class EmulatedBlock(nn.Module):
    """A block of attention, dispatch, experts and combine with given times; each all-to-all is a timer.

    Args:
        times: times of one micro-batch, in seconds.
        split: whether its weight gradients can be deferred to W.
        factors: factor on the times of each micro-batch; empty: 1 for all.
    """

    def __init__(self, clock: Clock, times: LayerSegments, split: bool = True, factors: Sequence[float] = ()) -> None:
        super().__init__()
        self.clock, self.times, self.split, self.factors = clock, times, split, factors
        self.weight = nn.Parameter(torch.zeros(()))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def segments(self, microbatch: MicrobatchContext | None = None) -> Sequence[Segment]:
        times, factor = self.times, _factor(self.factors, microbatch)
        combine_backward, dispatch_backward = times.backward_talk
        return (
            self._part("attention", _times(times.attention, factor)),
            _Timed("dispatch", self.clock, factor * times.dispatch, factor * dispatch_backward),
            self._part("experts", _times(times.experts, factor)),
            _Timed("combine", self.clock, factor * times.combine, factor * combine_backward),
        )

    def _part(self, name: str, times: PhaseTimes) -> Compute:
        def run(values: Values) -> Values:
            queue = self.grad_context.queue if self.split else None  # queue of the micro-batch whose forward runs now
            return (_Emulated.apply(values[0], self.weight, _Work(self.clock, name, times, queue)),)  # type: ignore[no-untyped-call]

        return Compute(name, run)

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        (out,) = in_order(self.segments(microbatch), (x,))
        return out  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Timer:
    """An all-to-all whose end is known from its start."""

    values: Values
    end: float

    def wait(self) -> Values:
        time.sleep(max(self.end - time.perf_counter(), 0.0))
        return self.values


@dataclass(frozen=True)
class _Timed:
    """An emulated all-to-all; those of one process run one after the other, as on one link."""

    name: str
    clock: Clock
    seconds: float
    backward_seconds: float
    quick = False

    def start(self, values: Values) -> Pending:
        return self._start(values, self.seconds)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return self._start(gradients, self.backward_seconds)

    def _start(self, values: Values, seconds: float) -> Pending:
        self.clock.free = max(time.perf_counter(), self.clock.free) + seconds
        return _Timer(values, self.clock.free)


def _factor(factors: Sequence[float], microbatch: MicrobatchContext | None) -> float:
    return factors[microbatch.index] if factors and microbatch is not None else 1.0


def _times(times: PhaseTimes, factor: float) -> PhaseTimes:
    return times if factor == 1 else PhaseTimes(*(factor * time for time in times))
