"""Signals between ranks: an entry of a program has ended whose values an action of another rank needs, and no message brings.

Only kinds that `register_kind` adds need values of another rank in this way: those of the built-in kinds are messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeloom.parallel.collectives import Tag
from pipeloom.schedule.actions import kind_of
from pipeloom.schedule.model import Schedule, parts


@dataclass(frozen=True)
class Signal:
    """The end of an entry of rank `source` that one of rank `destination` waits for; `number`: among those of the schedule."""

    number: int
    source: int
    destination: int
    words: str = field(compare=False)

    @property
    def tag(self) -> int:
        return Tag.SIGNAL + self.number


EntrySignals = Mapping[tuple[int, int], tuple[Signal, ...]]
"""(rank, position) -> the signals of that entry."""


def signals_of(schedule: Schedule) -> tuple[EntrySignals, EntrySignals]:
    """Return the signals that each entry waits for, and those that it sends when it has ended. The schedule must be checked."""
    awaits: dict[tuple[int, int], tuple[Signal, ...]] = defaultdict(tuple)
    sends: dict[tuple[int, int], tuple[Signal, ...]] = defaultdict(tuple)
    if not any(_needs_signals(kind.letter) for kind in schedule.kinds):
        return awaits, sends
    before, after = schedule.neighbours
    entries = [
        (rank, at, action)
        for rank, program in enumerate(schedule.programs)
        for at, cell in enumerate(program)
        for action in parts(cell)
    ]
    makers = {
        (value, action.stage, schedule.unit_of(action)): (rank, at, action)
        for rank, at, action in entries
        for value in schedule._values_of(action).makes
    }
    count = 0
    for rank, at, action in entries:
        for need in kind_of(action.kind).needs if _needs_signals(action.kind) else ():
            stage = None if not need.step else (before if need.step < 0 else after)[action.stage]
            maker = None if stage is None else makers.get((need.value, stage, schedule.unit_of(action)))
            if maker is None or maker[0] == rank:
                continue
            signal = Signal(count, maker[0], rank, f"the end of {maker[2]} on rank {maker[0]}")
            count += 1
            awaits[rank, at] += (signal,)
            sends[maker[0], maker[1]] += (signal,)
    return awaits, sends


def _needs_signals(letter: str) -> bool:
    kind = kind_of(letter)
    return not kind.produces and not kind.group and any(need.step for need in kind.needs)


class SignalsInProcess:
    """Signals where all ranks are in one process, which share it; made for one step.

    `send` returns at once, `wait` once a signal has been sent in this step, and `arrived` says whether it would at once. Threads
    may call them at once, with other signals.
    """

    def __init__(self) -> None:
        self._sent: dict[Signal, Future[None]] = {}

    def _future(self, signal: Signal) -> Future[None]:
        return self._sent.setdefault(signal, Future())

    def send(self, signal: Signal) -> None:
        self._future(signal).set_result(None)

    def wait(self, signal: Signal) -> None:
        self._future(signal).result()

    def arrived(self, signal: Signal) -> bool:
        return self._future(signal).done()


class SignalsBetweenProcesses:
    """Signals through a gloo group of the pipeline's ranks that nothing else uses."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._unfinished: dict[Signal, Any] = {}

    def send(self, signal: Signal) -> None:
        if (earlier := self._unfinished.pop(signal, None)) is not None:  # of the step before
            earlier[0].wait()  # at most one of a tag is under way, so a receive matches the signal of its own step
        empty = torch.zeros(1, dtype=torch.uint8)
        self._unfinished[signal] = self._group.send([empty], signal.destination, signal.tag), empty

    def wait(self, signal: Signal) -> None:
        self._group.recv([torch.zeros(1, dtype=torch.uint8)], signal.source, signal.tag).wait()


Signals = SignalsInProcess | SignalsBetweenProcesses
"""Sends and receives the signals of one rank."""
