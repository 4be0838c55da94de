"""Flat parameters: those of a bucket in one buffer, of which each rank may step a slice (ZeRO stage 1, arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeloom.parallel.buckets import Bucket
from pipeloom.parallel.collectives import PendingCollective, start_gather_slices
from pipeloom.parallel.mesh import Axis, group_of_members


class FlatParameters:
    """The parameters of one bucket as views of one buffer, laid out as the bucket's gradients.

    Attributes:
        bucket: whose.
        sharded: whether this rank steps its slice only; the others' come by a WeightGathers.
        flat: the buffer, in the parameters' dtype.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, sharded: bool) -> None:
        self.bucket = bucket
        self.sharded = sharded and bucket.axis.size > 1
        first = bucket.slots[0].held.parameter
        self.flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for slot, view in bucket.views(self.flat):
            view.copy_(slot.held.parameter)
            slot.held.parameter.data = view

    @property
    def mine(self) -> slice:
        """The elements that this rank steps."""
        return self.bucket.share if self.sharded else slice(0, self.bucket.size)

    def gradient(self, run: slice) -> Tensor:
        """The reduced gradient of the elements `run`, a part of `mine`."""
        return self.bucket.part[run.start - self.mine.start : run.stop - self.mine.start]

    def masters(self) -> list[tuple[slice, nn.Parameter]]:
        """Return what an optimizer steps: (its elements, their values), matrices apart from vectors.

        Values of fp32 and above are a view of the buffer; for others an fp32 copy, to be written with `publish`.
        """
        return [(run, nn.Parameter(self.flat[run].to(self.bucket.dtype))) for run in self.bucket.runs(self.mine)]

    @torch.no_grad()
    def publish(self, run: slice, master: Tensor) -> None:
        """Rounds a master's values into the buffer; nothing to do where the master is a view of it."""
        if master.dtype != self.flat.dtype:
            self.flat[run].copy_(master)


class WeightGathers:
    """The slices that other ranks have stepped, on their way to this one while it goes on to the next forward.

    Process groups of their own carry them: the small sums and exchanges of the next step would else queue behind them. Making
    it is collective over the buckets' axes, and so is `start`.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._axes: dict[tuple[int, ...], Axis] = {}
        for bucket in buckets:
            axis = bucket.axis
            if axis.size > 1 and axis.ranks not in self._axes:
                group = group_of_members(axis.ranks)
                self._axes[axis.ranks] = replace(axis, group=group)
        self._pending: dict[Bucket, PendingCollective] = {}

    @property
    def pending(self) -> bool:
        """Return whether any slice is on its way."""
        return bool(self._pending)

    def start(self, flats: Sequence[FlatParameters]) -> None:
        """Starts to bring the other ranks' slices, after all of this rank's have been written: those of the first layers first.

        Args:
            flats: in the order in which their gradients are reduced, the same on all ranks of an axis.
        """
        self.wait()
        for flat in reversed(flats):
            if flat.sharded:
                axis = self._axes[flat.bucket.axis.ranks]
                self._pending[flat.bucket] = start_gather_slices(flat.flat, axis)

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Waits for the slices of the parameters in these buckets, or for all (None)."""
        for bucket in list(self._pending) if buckets is None else buckets:
            if bucket in self._pending:
                self._pending.pop(bucket).wait()
