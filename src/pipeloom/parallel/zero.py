"""Parameters and gradients that the actions of a schedule gather, free and reduce (ZeRO stages 2 and 3, arXiv 1910.02054).

A stage that gathers has its parameters whole only between UNSHARD and RESHARD; at all other times a replica holds its share. The
storage of the whole is resized in place, so what autograd saved of a parameter is there again after the next gather. torch's
`fully_shard` does not serve: its hooks gather, free and reduce in an order of their own, and it knows no main gradients.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.buckets import Bucket, FlatParameters
from pipeloom.parallel.collectives import start_gather_slices, start_reduce_scatter
from pipeloom.parallel.mesh import Axis, group_of_members


class ShardedParameters(FlatParameters):
    """The parameters of one bucket, whole only while they are gathered.

    A step gathers them into `flat`. Between steps they are gathered into memory of their own, which whoever reads it may keep
    (a checkpoint that is being written).

    Attributes:
        share: this replica's elements, in the parameters' dtype.
    """

    def __init__(self, bucket: Bucket, axis: Axis) -> None:
        super().__init__(bucket, sharded=True)
        self.share = self.flat[self.mine].clone()
        self._axis = axis
        self._whole: Tensor | None = self.flat  # between steps
        self._changed = True  # the whole, by something other than an optimizer
        self.flat = torch.empty_like(self.flat)
        self._views = [(slot.held.parameter, view) for slot, view in bucket.views(self.flat)]
        self._gathered = True
        self._free()

    @property
    def stays(self) -> bool:
        return False

    @property
    def held(self) -> Tensor:
        return self.share

    def values(self, section: slice) -> Tensor:
        return self.share[section.start - self.mine.start : section.stop - self.mine.start]

    def gather(self) -> None:
        """Gather the whole for a step from the shares of all replicas; collective over the bucket's axis."""
        self.release()
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        self._gathered = True
        self._gather_into(self.flat)

    @torch.no_grad()
    def gather_between(self) -> None:
        """Gather the whole between steps, unless it is there; collective as `gather`."""
        if self._whole is None:
            self._whole = torch.empty(self.flat.shape, dtype=self.flat.dtype, device=self.flat.device)
            self._gather_into(self._whole)
            for slot, view in self.bucket.views(self._whole):
                slot.held.parameter.data = view

    @torch.no_grad()
    def _gather_into(self, flat: Tensor) -> None:
        start_gather_slices(flat, self._axis, self.share).work.wait()

    def note_change(self) -> None:
        """Note that the whole was written to, not by the optimizer: its values go to the share."""
        self._changed = self._whole is not None

    @torch.no_grad()
    def read(self) -> None:
        if self._changed and self._whole is not None:
            self.share.copy_(self._whole[self.mine])
        self._changed = False

    def release(self) -> None:
        """Free the whole."""
        self.read()
        if self._whole is not None:
            self._whole = None
            for parameter, view in self._views:
                parameter.data = view
        self._free()

    def _free(self) -> None:
        if self._gathered:
            self.flat.untyped_storage().resize_(0)
            self._gathered = False


class StageShards:
    """The buckets of one process's stages that follow a schedule's UNSHARD, RESHARD and REDUCE_GRAD.

    Those of weights that several stages hold do not. Construction is collective over the buckets' axes; so are `gather` and
    `reduce`, which one thread at a time calls, in the order of the schedule, in process groups of their own.

    Args:
        buckets: of all stages.
        main: what accumulates the gradients.
        gathered: the stages that gather their parameters.
        reduced: the stages whose gradients are reduced by actions.

    Attributes:
        parameters: bucket -> its parameters, of the stages that gather them.
        reduced: the buckets whose gradients are reduced by actions.
    """

    def __init__(
        self, buckets: Sequence[Bucket], main: MainGradients, gathered: Collection[int], reduced: Collection[int]
    ) -> None:
        self._main = main
        self._axes: dict[tuple[int, ...], Axis] = {}
        self.parameters: dict[Bucket, ShardedParameters] = {}
        self._gathered: dict[int, list[ShardedParameters]] = defaultdict(list)
        self._reduced: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in buckets:
            stage = min(bucket.stages)
            if len(bucket.stages) > 1 or bucket.axis.size == 1:
                continue
            if stage in gathered:
                self.parameters[bucket] = ShardedParameters(bucket, self._axis(bucket))
                self._gathered[stage].append(self.parameters[bucket])
            if stage in reduced:
                self._axis(bucket)
                self._reduced[stage].append(bucket)
                self._attach(bucket, bucket.flat.new_empty(0))
                bucket.part = bucket.flat
        self.reduced = frozenset(bucket for buckets in self._reduced.values() for bucket in buckets)
        self.begin()

    def _axis(self, bucket: Bucket) -> Axis:
        axis = bucket.axis
        if axis.ranks not in self._axes:
            self._axes[axis.ranks] = replace(axis, group=group_of_members(axis.ranks))
        return self._axes[axis.ranks]

    # -- parameters ------------------------------------------------------------------------------------------------------

    def gather(self, stage: int) -> None:
        """UNSHARD: gather the parameters of a stage."""
        for flat in self._gathered[stage]:
            flat.gather()

    def release(self, stage: int) -> None:
        """RESHARD: free them."""
        for flat in self._gathered[stage]:
            flat.release()

    def gather_all(self) -> None:
        """Gather the parameters of all stages, between steps."""
        for flat in self.parameters.values():
            flat.gather_between()

    def release_all(self) -> None:
        """Free the parameters of all stages."""
        for flat in self.parameters.values():
            flat.release()

    def note_change(self) -> None:
        """Note that parameters that are whole now were written to, not by the optimizer."""
        for flat in self.parameters.values():
            flat.note_change()

    # -- gradients -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a step: drop what an earlier one left."""
        self._full: dict[int, deque[list[Tensor]]] = defaultdict(deque)
        self._summed: set[Bucket] = set()
        self._present: dict[Bucket, set[nn.Parameter]] = defaultdict(set)

    def open(self, stage: int) -> None:
        """Make the buffers to which the next backwards of a stage add, before the first of these."""
        for bucket in self._reduced[stage]:
            self._attach(bucket, torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.flat.device))
            self._main.reset(bucket.parameters)

    def take(self, stage: int) -> None:
        """Take over what the backwards of a stage have added, behind the last one before a REDUCE_GRAD."""
        for bucket in self._reduced[stage]:
            self._main.finalize(bucket.parameters)
            self._present[bucket] |= set(bucket.parameters) - self._main.absent
        self._full[stage].append([bucket.flat for bucket in self._reduced[stage]])
        for bucket in self._reduced[stage]:
            self._attach(bucket, bucket.flat.new_empty(0))

    @torch.no_grad()
    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: add the sum over the replicas of what was taken to this replica's share."""
        fulls = self._full[stage].popleft()
        for at, bucket in enumerate(self._reduced[stage]):
            axis = self._axes[bucket.axis.ranks]
            pending = start_reduce_scatter(fulls[at].view(axis.size, -1), axis)
            pending.work.wait()
            part = pending.finish().view(-1)
            fulls[at] = part  # the full gradients are freed
            if bucket in self._summed:
                bucket.part += part
            else:
                bucket.part = part
                self._summed.add(bucket)

    def marks(self, bucket: Bucket) -> Tensor:
        """Return 1 for each parameter of the bucket with a gradient here in this step, else 0: [parameters]."""
        present = [float(parameter in self._present[bucket]) for parameter in bucket.parameters]
        return torch.tensor(present, dtype=torch.float32, device=bucket.flat.device)

    def absent(self, buckets: Iterable[Bucket]) -> set[nn.Parameter]:
        """Return the parameters without a gradient here in this step."""
        return {p for bucket in buckets for p in bucket.parameters if p not in self._present[bucket]}

    def _attach(self, bucket: Bucket, flat: Tensor) -> None:
        bucket.flat = flat
        for slot in bucket.slots:
            whole = flat[slot.start : slot.stop].view(slot.held.parameter.shape) if len(flat) else flat
            self._main.attach(slot.held.parameter, whole)
