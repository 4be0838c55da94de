"""Sums and gathers over processes of one machine: every process maps all others' buffers, and sums one slice of them for all.

gloo sends tensors between processes of a machine through sockets, with two kernel copies per hop. Here a rank reads its slice
of every buffer and writes the sum back to every buffer: as many bytes as a ring all-reduce moves, without those copies.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import DistributedError
from pipeloom.limits import usable_cores
from pipeloom.parallel.collectives import PendingCollective
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.mesh import Axis

_PAGE = 4096  # tensors begin on pages of their own: no two processes write into one cache line
_BLOCK = 131072  # elements per block, so that a block stays in a core's cache while the other ranks' are added
_SUM_TOKEN_BYTES = 16  # random: another machine may have the same numbers of process and descriptor
_SPINS = 50  # polls of the flags before a process sleeps
_NAPS = 50e-6, 2e-3  # seconds, the shortest and the longest sleep between polls


Combine = Callable[[Sequence[Tensor]], object]
"""What a process does with a buffer of every process of its axis, in their order, once all are filled."""


class SharedBuffers:
    """Flat tensors of each process of an axis that can be summed in place, or combined otherwise.

    `start` marks a buffer of this process as filled, and `wait` returns when the buffer holds the sum, or when every process has
    combined it. Every process starts the same buffers in the same order, and refills a buffer only after its `wait`.

    Attributes:
        own: this process's tensors.
        sharded: whether each process receives only its slice of the sum: elements index·n to (index+1)·n of size·n.
        spins: whether to poll without sleeping at first; set it only if every process has a core.
    """

    def __init__(
        self, axis: Axis, maps: Sequence[mmap.mmap], sizes: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> None:
        self.sharded = False
        self.spins = False
        self._axis = axis
        # a flag is the number of the last reduction that a rank has filled its buffer for, or summed its slice of
        counts = [torch.frombuffer(each, dtype=torch.int64, count=2 * len(sizes), offset=_PAGE) for each in maps]
        self._filled = [count[: len(sizes)] for count in counts]
        self._summed = [count[len(sizes) :] for count in counts]
        starts = _starts(sizes, dtypes)
        self._tensors = [
            [
                torch.frombuffer(each, dtype=dtype, count=size, offset=start)
                for size, dtype, start in zip(sizes, dtypes, starts, strict=False)
            ]
            for each in maps
        ]
        self.own = self._tensors[axis.index]
        self._turn = [0] * len(sizes)
        self._pending: list[tuple[int, Combine | None]] = []
        self._fence = threading.Lock()

    @classmethod
    def connect(cls, axis: Axis, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> SharedBuffers | None:
        """Create and map buffers of `sizes` elements; return None if any process cannot. Collective over the axis.

        The memory is anonymous and is freed when the processes exit.
        """
        offer = offer_memory(_starts(sizes, dtypes)[-1]) if hasattr(os, "memfd_create") else None
        maps = [map_offered(each) for each in all_gather_json(offer, axis.group)]
        answers = all_gather_json(None not in maps, axis.group)
        if offer is not None:
            os.close(offer[1])
        opened = [each for each in maps if each is not None]
        return cls(axis, opened, sizes, dtypes) if all(answers) else None

    def start(self, at: int, combine: Combine | None = None) -> None:
        """Mark buffer `at` of this process as filled, and sum the buffers that all processes have filled.

        Args:
            combine: called in place of the sum.
        """
        self._turn[at] += 1
        with self._fence:  # a memory barrier: earlier writes are visible before the flag on every processor
            self._filled[self._axis.index][at] = self._turn[at]
        self._pending.append((at, combine))
        self._advance()

    def wait(self, at: int, timeout: float) -> None:
        """Wait until buffer `at` of this process holds the sum. Raises DistributedError after `timeout` seconds."""
        begin = time.monotonic()
        for look in itertools.count():
            self._advance()
            filling = any(at == number for number, _ in self._pending)  # or one before it
            late = self._behind(self._filled, self._pending[0][0]) if filling else self._behind(self._summed, at)
            if not late and not filling:
                break
            if not late:
                continue  # the last process has filled its buffer in the meantime
            if self.spins and look < _SPINS:
                continue
            waited = time.monotonic() - begin
            if waited > timeout:
                rank = self._axis.ranks[late[0]]
                raise DistributedError(
                    f"timed out after {timeout:g} s waiting for rank {rank} in a sum through shared memory"
                )
            time.sleep(min(max(waited / 8, _NAPS[0]), _NAPS[1]))
        with self._fence:
            return

    def _behind(self, flags: Sequence[Tensor], at: int) -> list[int]:
        return [index for index, flag in enumerate(flags) if int(flag[at]) < self._turn[at]]

    def _advance(self) -> None:
        """Sum this process's slice of the buffers that all processes have filled, in the order of their starts."""
        while self._pending and not self._behind(self._filled, self._pending[0][0]):
            at, combine = self._pending.pop(0)
            with self._fence:
                pass
            if combine is None:
                self._sum(at)
            else:
                combine([each[at] for each in self._tensors])
            with self._fence:
                self._summed[self._axis.index][at] = self._turn[at]

    def _sum(self, at: int) -> None:
        size = self.own[at].numel()
        share = math.ceil(size / self._axis.size)
        first, last = self._axis.index * share, min((self._axis.index + 1) * share, size)
        for start in range(first, last, _BLOCK):
            parts = [each[at][start : min(start + _BLOCK, last)] for each in self._tensors]
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part  # one rank sums each slice, in rank order, so results are bitwise equal everywhere
            for part in [parts[self._axis.index]] if self.sharded else parts:
                part.copy_(total)


@dataclass(eq=False)
class SharedMemoryAllReduce:
    """Sums tensors over an axis. Buffers for a size are created collectively at its first use, so all ranks use one order."""

    axis: Axis
    spins: bool
    timeout: float
    _tensors: dict[tuple[int, torch.dtype], SharedBuffers | None] = field(default_factory=dict)
    _busy: set[tuple[int, torch.dtype]] = field(default_factory=set)

    @classmethod
    def over(cls, axis: Axis, processes: int, timeout: float) -> SharedMemoryAllReduce | None:
        """Return the sums over `axis`, or None if its processes cannot share memory. Collective over the axis.

        Args:
            processes: number of processes on this machine; if each has a core, they poll briefly before they sleep.
            timeout: seconds that a sum may take.
        """
        if SharedBuffers.connect(axis, [1], [torch.uint8]) is None:
            return None
        return cls(axis, processes <= usable_cores(), timeout)

    def start(self, x: Tensor) -> PendingCollective[Tensor] | None:
        """Start summing `x` in place. Return None without shared memory, or while a sum of this size is pending."""
        key = x.numel(), x.dtype
        if key not in self._tensors:
            connected = self._tensors[key] = SharedBuffers.connect(self.axis, [key[0]], [key[1]])
            if connected is not None:
                connected.spins = self.spins
        buffers = self._tensors[key]
        if buffers is None or key in self._busy:
            return None
        self._busy.add(key)
        buffers.own[0].copy_(x.view(-1))
        buffers.start(0)

        def finish() -> Tensor:
            x.view(-1).copy_(buffers.own[0])
            self._busy.discard(key)
            return x

        return PendingCollective(SimpleNamespace(wait=lambda: buffers.wait(0, self.timeout)), finish, x)


def offer_memory(size: int) -> tuple[int, int, int, str]:
    """Create anonymous memory that other processes of the same user can map.

    Returns:
        (process id, descriptor, size in bytes, token in hex); the token at the start of the memory identifies it.
    """
    descriptor = os.memfd_create("pipeloom")
    os.ftruncate(descriptor, size)
    token = secrets.token_bytes(_SUM_TOKEN_BYTES)
    os.pwrite(descriptor, token, 0)
    return os.getpid(), descriptor, size, token.hex()


def map_offered(offer: Sequence[Any] | None) -> mmap.mmap | None:
    """Map the memory of another process; return None if it is on another machine, has another owner or cannot be opened."""
    if offer is None:
        return None
    process, descriptor, size, token = offer
    try:
        with open(f"/proc/{int(process)}/fd/{int(descriptor)}", "r+b") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            mapped = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None
    return mapped if mapped[:_SUM_TOKEN_BYTES] == bytes.fromhex(token) else None


def _starts(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the byte offset of each buffer, and the end.

    Page 0 has the token; the flags, two of 8 bytes for each buffer, begin at page 1; buffers are page-aligned.
    """
    starts = [_PAGE + math.ceil(2 * 8 * len(sizes) / _PAGE) * _PAGE]
    for size, dtype in zip(sizes, dtypes, strict=True):
        starts.append(starts[-1] + math.ceil(size * dtype.itemsize / _PAGE) * _PAGE)
    return starts
