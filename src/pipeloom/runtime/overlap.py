"""Overlap: walks that stop where they would wait for a communication, so that another one computes meanwhile.

A walk is an action cut at its communications: a generator that yields once a communication is under way, and waits for it
when it is resumed. An action alone is walked through; a pair's two walks take turns, the backward first. With blocks of
attention, dispatch, experts and combine that gives, for each pair of layers,

    computation      F.attention, B.experts, W.experts, F.experts, B.attention, W.attention
    communication    B.combine, F.dispatch, B.dispatch, F.combine

where every computation stands behind the communication that it needs and in front of one that it hides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeloom.ops.segments import Pending, Values
from pipeloom.runtime.status import Status

Result = TypeVar("Result")
Walk = Generator[None, None, Result]


def walk_through(walk: Walk[Result]) -> Result:
    """Runs one walk to its end; returns what it returns."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def take_turns(walks: Sequence[Walk[Any]]) -> tuple[list[Any], list[float]]:
    """Runs walks in turns, each to its next stop, the first one first; returns their results, and each one's own seconds."""
    results: list[Any] = [None] * len(walks)
    seconds = [0.0] * len(walks)
    going = list(range(len(walks)))
    now = time.perf_counter()
    while going:
        for at in tuple(going):
            try:
                next(walks[at])
            except StopIteration as end:
                results[at] = end.value
                going.remove(at)
            before, now = now, time.perf_counter()
            seconds[at] += now - before
    return results, seconds


class Lane:
    """The resource on which one rank's communications run beside its computation.

    On a CPU a communication is asynchronous by itself, and `wait` blocks. On a GPU it is issued on a stream of its own behind an
    event of the compute stream, whole (what is computed between two exchanges runs there too), and `wait` makes the
    compute stream wait for an event of that stream; the host goes on.

    All communications of a rank are issued in program order. The ranks of one expert group have the same place in their
    pipelines and run the same program, so the order is the same on all of them.
    """

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        """`timed`: measure the exposed time on a GPU too, which waits for the device when it is read."""
        self.status: Status | None = None  # told what the rank waits for
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._timed = timed
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def start(self, begin: Callable[[], Pending], reads: Values) -> Pending:
        """Begins a communication that reads `reads`."""
        with torch.no_grad():
            return begin() if self._stream is None else _OnStream(self._stream, begin, reads)

    def wait(self, pending: Pending, name: str) -> Values:
        """The results of the communication called `name`; the time that computation stands still for it is counted."""
        with torch.no_grad():
            if self._stream is None:
                begun = time.perf_counter()
                if self.status is not None:
                    self.status.wait_inside(f"the {name} of its expert group")
                values = pending.wait()
                if self.status is not None:
                    self.status.wait_inside(None)
                self._seconds += time.perf_counter() - begun
                return values
            if not self._timed:
                return pending.wait()
            stopped, resumed = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            stopped.record()
            values = pending.wait()
            resumed.record()
            self._events.append((stopped, resumed))
            return values

    def exposed(self) -> float | None:
        """Seconds for which computation stood still for communications since the last call; None: not measured."""
        if self._stream is not None and not self._timed:
            return None
        seconds, self._seconds = self._seconds, 0.0
        events, self._events = self._events, []
        for stopped, resumed in events:
            resumed.synchronize()
            seconds += stopped.elapsed_time(resumed) / 1e3
        return seconds


class _OnStream:
    """A communication on a stream of its own. Waiting for its parts there holds up that stream alone, not the host."""

    def __init__(self, stream: Any, begin: Callable[[], Pending], reads: Values) -> None:
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._values = begin().wait()
            self._done = stream.record_event()
        for value in reads:  # computed on the other stream: their storage may not be used anew before this one is past
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)

    def wait(self) -> Values:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._done)
        for value in self._values:
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(current)
        return self._values
