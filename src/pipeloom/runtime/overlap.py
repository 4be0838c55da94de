"""Overlap: a stage split at its communications, so that another action computes while one is in progress.

A segmented stage's forward and backward are coroutines: generators that yield once a communication has started, and wait
for it when they are resumed. A single action runs to its end; the two of an overlapped pair are interleaved, the backward
first. For blocks of attention, dispatch, experts and combine, the order for each pair of layers is

    computation      F.attention, B.experts, W.experts, F.experts, B.attention, W.attention
    communication    B.combine, F.dispatch, B.dispatch, F.combine

where every computation follows the communication that it needs and hides the next one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeloom.ops.parts import run_part
from pipeloom.ops.recompute import recomputed
from pipeloom.ops.segments import Communication, Compute, Pending, Values, is_segmented
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.program import SAVES_ALL, Saving
from pipeloom.runtime.stage_modules import StageModules
from pipeloom.runtime.tensor_spec import as_values
from pipeloom.schedule.timeline import CommunicationKind

CoroutineResult = TypeVar("CoroutineResult")
Coroutine = Generator[None, None, CoroutineResult]


# -- a stage cut at its communications -----------------------------------------------------------------------------------


class Computation(NamedTuple):
    """One computation of a group; `layer`: the name of the layer that it ends, None inside a layer."""

    call: Callable[[Values], Any]
    layer: str | None


@dataclass(frozen=True)
class ComputeGroup:
    """Consecutive computations, possibly of several layers, without a communication in between, and the communication after."""

    computations: tuple[Computation, ...]
    after: Communication | None

    def compute(self, values: Values) -> Any:
        """Return the values after the last computation; if that ends a layer, the layer's result as it is."""
        result: Any = values
        for at, computation in enumerate(self.computations):
            before = self.computations[at - 1].layer if at else None
            result = computation.call(result if before is None else as_values(result, f"layer {before!r}"))
        return result


def split_at_communications(
    layers: StageModules, keywords: Mapping[str, Any], saving: Saving = SAVES_ALL
) -> list[ComputeGroup]:
    """Return the groups of the stage for one micro-batch: at least one, the last of them without a communication.

    Computations run again as `saving` says.

    A segmented layer with hooks runs as a whole: hooks belong to a call of the layer, which its segments do not make. So does one
    without a communication: in segments, each of them would be recomputed on its own, and its inputs kept.
    """
    groups: list[ComputeGroup] = []
    computations: list[Computation] = []
    for at, (module, name) in enumerate(zip(layers.modules, layers.names, strict=True)):
        accepted = layers.accepted(at, keywords)
        wrapped = _plain
        if saving.blocks and name in layers.recomputed:
            wrapped = partial(partial, _recomputed, module)
        elif (part := saving.part_of(at, len(layers.modules))) is not None:
            wrapped = partial(partial, _in_part, part, module)
        whole = not is_segmented(module) or _has_hooks(module)
        segments = () if whole else module.segments(**accepted)  # type: ignore[operator]
        if all(isinstance(segment, Compute) for segment in segments):
            computations.append(Computation(wrapped(partial(_forward, module, accepted)), name))
            continue
        for segment in segments:
            if isinstance(segment, Compute):
                computations.append(Computation(wrapped(segment.run), None))
            else:
                groups.append(ComputeGroup(tuple(computations), segment))
                computations = []
        computations.append(Computation(_unwrapped, name))
    return [*groups, ComputeGroup(tuple(computations), None)]


def _has_hooks(module: Any) -> bool:
    """Return whether `module(...)` does more than its forward."""
    # torch has no public way to see a module's hooks. An overlapped pair calls segments, not `module(...)`.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _forward(module: Any, keywords: Mapping[str, Any], values: Values) -> Any:
    return module(*values, **keywords)


def _plain(run: Callable[[Values], Any]) -> Callable[[Values], Any]:
    return run


def _recomputed(module: Any, run: Callable[[Values], Any], values: Values) -> Any:
    return recomputed(lambda *given: run(given), values, module)


def _in_part(part: str, module: Any, run: Callable[[Values], Any], values: Values) -> Any:
    return run_part(part, run, module, (values,), {})


def _unwrapped(values: Values) -> Any:
    """Return a layer's outputs as the layer returns them: a single value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else values


# -- coroutines ----------------------------------------------------------------------------------------------------------


def run_to_end(coroutine: Coroutine[CoroutineResult]) -> CoroutineResult:
    """Run one coroutine to its end; return its result."""
    while True:
        try:
            next(coroutine)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def interleave(coroutines: Sequence[Coroutine[None]]) -> list[float]:
    """Resume coroutines in turns, the first one first, until all end; return the seconds of each."""
    seconds = [0.0] * len(coroutines)
    running = list(range(len(coroutines)))
    now = time.perf_counter()
    while running:
        for at in tuple(running):
            try:
                next(coroutines[at])
            except StopIteration:
                running.remove(at)
            before, now = now, time.perf_counter()
            seconds[at] += now - before
    return seconds


# -- communications beside computation -----------------------------------------------------------------------------------


class CommStream:
    """The stream on which one rank's communications run concurrently with its computation.

    On a CPU a communication is asynchronous by itself, and `wait` blocks. On a GPU all of it, including computation between two
    exchanges, is issued on a separate stream after an event of the compute stream, and `wait` makes the compute stream wait
    for an event of that stream; the host continues.

    All communications of a rank are issued in program order. The ranks of one expert group have the same place in their
    pipelines and run the same program, so the order is the same on all of them.
    """

    def __init__(self, device: torch.device, timed: bool = False, status: Status | None = None) -> None:
        """
        Args:
            timed: measure the exposed time on a GPU too, which waits for the device when it is read.
            status: receives the name of what the rank waits for.

        `timed` can be set between steps.
        """
        self.device = device
        self._status = status
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.timed = timed
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self._still = False

    def start(self, begin: Callable[[], Pending], reads: Values) -> Pending:
        """Start a communication that reads `reads`."""
        with torch.no_grad():
            return begin() if self._stream is None else _OnStream(self._stream, begin, reads)

    def wait(self, pending: Pending, name: str) -> Values:
        """Return the results of the communication called `name`; the time for which computation waits for it is counted."""
        with torch.no_grad(), self.standing_still(name):
            return pending.wait()

    @contextlib.contextmanager
    def standing_still(self, name: str, kind: CommunicationKind = "all-to-all") -> Iterator[None]:
        """Count the time inside as exposed: computation waits for the communication called `name`. Nested calls are not
        counted.
        """
        if self._still or (self._stream is not None and not self.timed):
            yield
            return
        self._still = True
        try:
            if self._stream is None:
                status = self._status if kind == "all-to-all" else None
                begun = time.perf_counter()
                if status is not None:
                    status.wait_inside(f"the {name} of its expert group")
                yield
                if status is not None:
                    status.wait_inside(None)
                self._seconds[kind] = self._seconds.get(kind, 0.0) + time.perf_counter() - begun
            else:
                stopped, resumed = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                computing = torch.cuda.current_stream(self._stream.device)
                stopped.record(computing)
                yield
                resumed.record(computing)
                self._events.append((kind, stopped, resumed))
        finally:
            self._still = False

    def exposed(self) -> dict[str, float] | None:
        """Return kind -> seconds for which computation waited for communications since the last call; None: not measured."""
        if self._stream is not None and not self.timed:
            return None
        seconds, self._seconds = self._seconds, {}
        events, self._events = self._events, []
        for kind, stopped, resumed in events:
            resumed.synchronize()  # only here, after the step: a time is known once the device has passed the event
            seconds[kind] = seconds.get(kind, 0.0) + stopped.elapsed_time(resumed) / 1e3
        return seconds


class _OnStream:
    """A communication on a separate stream. Waiting for its parts there blocks only that stream, not the host."""

    def __init__(self, stream: Any, begin: Callable[[], Pending], reads: Values) -> None:
        self._stream = stream
        # References that are kept until the compute stream waits, so that their memory needs no other protection.
        self._kept = tuple(value for value in reads if not isinstance(value, Tensor))
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._values = begin().wait()
            self._done = stream.record_event()
        # Computed on the other stream: their storage must not be reused before this stream has read it.
        for value in reads:
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)

    def wait(self) -> Values:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._done)  # the stream waits, not the host, which goes on issuing computation
        for value in self._values:
            if not any(value is source for source in self._kept):
                for tensor in _device_tensors(value):
                    tensor.record_stream(current)
        self._kept = ()
        return self._values


def _device_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every CUDA tensor in `value`: itself, or inside tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _device_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _device_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _device_tensors(getattr(value, field.name))
