"""Flat parameters: a bucket's parameters in one buffer, of which each rank may step a slice (ZeRO stage 1, arXiv 1910.02054)."""

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
        bucket: the bucket that holds the gradients.
        sharded: whether this rank steps only its slice; `WeightGathers` brings the other ranks' slices.
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
        """Return the masters for an optimizer as (elements, values); matrices and vectors are separate.

        Values of fp32 and above are a view of the buffer; for others an fp32 copy, to be written with `publish`.
        """
        return [(run, nn.Parameter(self.flat[run].to(self.bucket.dtype))) for run in self.bucket.runs(self.mine)]

    @torch.no_grad()
    def publish(self, run: slice, master: Tensor) -> None:
        """Round a master's values into the buffer. A master that is a view of the buffer needs nothing."""
        if master.dtype != self.flat.dtype:
            self.flat[run].copy_(master)


class WeightGathers:
    """Gathers of the slices that other ranks have stepped, overlapped with this rank's next forward.

    They use separate process groups; otherwise the small sums and exchanges of the next step would queue behind them.
    Construction is collective over the buckets' axes, and so is `start`.
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
        """Return whether any gather is still to be waited for."""
        return bool(self._pending)

    def start(self, flats: Sequence[FlatParameters]) -> None:
        """Start to gather the other ranks' slices, once all of this rank's are written: those of the first layers first.

        Args:
            flats: in the order in which their gradients are reduced, the same on all ranks of an axis.
        """
        self.wait()
        for flat in reversed(flats):
            if flat.sharded:
                axis = self._axes[flat.bucket.axis.ranks]
                self._pending[flat.bucket] = start_gather_slices(flat.flat, axis)

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for the slices of the parameters in these buckets, or for all of them (None)."""
        for bucket in list(self._pending) if buckets is None else buckets:
            if bucket in self._pending:
                self._pending.pop(bucket).wait()
