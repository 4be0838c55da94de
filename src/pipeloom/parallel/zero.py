"""Flat parameters: those of a bucket in one buffer, of which each rank may step a slice (ZeRO stage 1, arXiv 1910.02054)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeloom.parallel.buckets import Bucket
from pipeloom.parallel.collectives import PendingCollective, start_gather_slices


class FlatParameters:
    """The parameters of one bucket as views of one buffer, laid out as the bucket's gradients.

    Attributes:
        bucket: whose.
        sharded: whether this rank steps its slice only; then `share` sends it to the others.
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
        """What an optimizer steps: (its elements, their values), matrices apart from vectors.

        Values of fp32 and above are a view of the buffer; for others an fp32 copy, to be written with `publish`.
        """
        return [(run, nn.Parameter(self.flat[run].to(self.bucket.dtype))) for run in self.bucket.runs(self.mine)]

    @torch.no_grad()
    def publish(self, run: slice, master: Tensor) -> None:
        """Rounds a master's values into the buffer; nothing to do where the master is a view of it."""
        if master.dtype != self.flat.dtype:
            self.flat[run].copy_(master)

    def share(self) -> PendingCollective | None:
        """Starts to bring the other ranks' slices, after all of this rank's have been written; None: it has them all."""
        return start_gather_slices(self.flat, self.bucket.axis) if self.sharded else None
