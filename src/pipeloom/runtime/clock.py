"""Clocks for timing the actions of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class ActionClock(Protocol):
    """Clock that marks moments of a step; afterwards each mark has a time, in seconds of `time.perf_counter`."""

    def begin(self) -> None:
        """Start a step."""

    def now(self) -> Any:
        """Return a mark of the present moment."""

    def seconds(self, marks: Iterable[Any]) -> list[float]:
        """Return the times of marks of this step."""


class HostClock:
    """Clock of the host. For actions on a GPU it gives the times of their launches."""

    now = staticmethod(time.perf_counter)

    def begin(self) -> None:
        """Do nothing."""

    def seconds(self, marks: Iterable[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """Clock of a CUDA device: the time at which it reaches a mark on its current stream. Reading a time waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Wait for the device, to align its time with the host's."""
        torch.cuda.synchronize(self._device)
        self._at = time.perf_counter()
        self._origin = self.now()

    def now(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def seconds(self, marks: Iterable[Any]) -> list[float]:
        return list(map(self._seconds, marks))

    def _seconds(self, mark: Any) -> float:
        mark.synchronize()
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._at + milliseconds / 1e3


def clock_for(device: torch.device, traced: bool) -> ActionClock:
    """Return the clock for actions on `device`; `traced`: a step may wait for the device at its ends."""
    return DeviceClock(device) if traced and device.type == "cuda" else HostClock()
