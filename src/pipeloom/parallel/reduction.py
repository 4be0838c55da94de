"""Reduction of one process's buckets: by collectives, or through memory that the ranks of a machine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipeloom.cores import usable_cores
from pipeloom.parallel.buckets import Bucket
from pipeloom.parallel.collectives import start_all_reduce, start_reduce_scatter
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.shared_memory_sum import SharedBuffers


class Reduction(Protocol):
    """A reduction in progress."""

    def wait(self) -> Tensor:
        """Wait for the reduction; return the sum, or this rank's slice of it."""


@dataclass(frozen=True)
class _Through:
    """A reduction through shared memory, of the bucket that is buffer `at`."""

    buffers: SharedBuffers
    at: int
    bucket: Bucket
    timeout: float

    def wait(self) -> Tensor:
        self.buffers.wait(self.at, self.timeout)
        return self.bucket.flat[self.bucket.share] if self.buffers.sharded else self.bucket.flat


@dataclass(frozen=True)
class _Nothing:
    """The reduction over a single rank: nothing to do."""

    flat: Tensor

    def wait(self) -> Tensor:
        return self.flat


class Reducer:
    """Starts the reductions of buckets. Every rank of their axes constructs a Reducer with the same buckets.

    Args:
        sharded: whether a rank gets only its slice of each bucket.
        share_memory: sum through shared memory where all ranks of a bucket's axis can; the buckets then live there.
        timeout: seconds to wait for another rank's gradients in shared memory before that rank is taken for dead.
    """

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, *, sharded: bool, share_memory: bool, timeout: float
    ) -> None:
        self._sharded = sharded
        self._through: dict[Bucket, _Through] = {}
        for axis in dict.fromkeys(bucket.axis for bucket in buckets) if share_memory else ():
            mine = [bucket for bucket in buckets if bucket.axis == axis]
            if axis.size == 1 or any(bucket.flat.device.type != "cpu" for bucket in mine):
                continue
            shared = SharedBuffers.connect(axis, [b.size for b in mine], [b.dtype for b in mine])
            if shared is None:
                continue
            shared.sharded = sharded
            shared.spins = mesh.everyone.size <= usable_cores()
            for at, bucket in enumerate(mine):
                bucket.flat = bucket.part = shared.own[at]
                self._through[bucket] = _Through(shared, at, bucket, timeout)

    def start(self, bucket: Bucket) -> Reduction:
        """Start the reduction of a bucket that holds all its gradients."""
        through = self._through.get(bucket)
        if through is not None:
            through.buffers.start(through.at)
            return through
        if bucket.axis.size == 1:
            return _Nothing(bucket.flat)
        if self._sharded:
            return start_reduce_scatter(bucket.flat.view(bucket.axis.size, -1), bucket.axis)
        return start_all_reduce(bucket.flat, bucket.axis)
