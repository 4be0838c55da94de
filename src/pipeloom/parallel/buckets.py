"""Gradient buckets: flat buffers with the gradients of several parameters, so that one collective reduces them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding

# Elements; 128 bytes in fp32, so that kernels load aligned vectors, and slices of two ranks share no cache line.
_ALIGNMENT = 32


@dataclass(frozen=True)
class BucketParameter:
    """A parameter that this process holds.

    Attributes:
        name: name in the whole model.
        parameter: the parameter, or this process's shard of it.
        stages: stages whose backward adds to its gradient.
        sharding: layout of the parameter over ranks.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    sharding: ParameterSharding = WHOLE


@dataclass(frozen=True)
class BucketSlot:
    """Position of a parameter's elements in its bucket: from `start` up to, not including, `stop`."""

    held: BucketParameter
    start: int
    stop: int


class Bucket:
    """Parameters of one dtype whose gradients are reduced over the same ranks at the same time.

    `content` names the state of `flat`: `empty` (no gradients), `local` (gradients that this rank has accumulated) or `reduced`
    (the sum over all ranks). A new step accumulates into local gradients. It adds to reduced gradients only after its own
    reduction, so no gradient is reduced twice.

    Attributes:
        axis: ranks that the gradients are summed over.
        partial: whether the gradients are also summed over tp.
        slots: position of each parameter.
        stop: end of the parameters' elements. Elements between slots are padding and are zero.
        size: number of elements, a multiple of the aligned share of each rank of the axis. It includes one mark per parameter
            after `stop`, see `mark`.
        flat: the gradients, [size].
        before: reduced gradients of earlier steps, which are added to those of the current step; None if there are none.
        absent_before: parameters without a gradient in `before`.
        part: this rank's reduced slice if gradients are sharded, else `flat`.
    """

    def __init__(self, members: Sequence[BucketParameter], axis: Axis) -> None:
        first = members[0]
        self.slots = _slots(members)
        self.axis = axis
        self.partial = first.sharding.partial
        self.stages = frozenset(first.stages)
        self.stop = _aligned(self.slots[-1].stop)
        self.size = _aligned(-(-(self.stop + len(self.slots)) // axis.size)) * axis.size
        self.dtype = main_dtype(first.parameter.dtype)
        self.flat = torch.zeros(self.size, dtype=self.dtype, device=first.parameter.device)
        self.part = self.flat
        self.before: Tensor | None = None
        self.absent_before: frozenset[nn.Parameter] = frozenset()
        self.content: Literal["empty", "local", "reduced"] = "empty"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [slot.held.parameter for slot in self.slots]

    @property
    def marks(self) -> slice:
        """The elements after those of the parameters, one per parameter."""
        return slice(self.stop, self.stop + len(self.slots))

    def mark(self, absent: AbstractSet[nn.Parameter]) -> None:
        """Write 1 for each parameter with a gradient on this rank and 0 for the `absent`; their sum is 0 if no rank has one."""
        if absent.isdisjoint(self.parameters):
            self.flat[self.marks].fill_(1)
        else:
            present = [float(parameter not in absent) for parameter in self.parameters]
            self.flat[self.marks] = torch.tensor(present, dtype=self.dtype, device=self.flat.device)

    @property
    def share(self) -> slice:
        """This rank's share of the elements when they are split over the axis."""
        count = self.size // self.axis.size
        return slice(self.axis.index * count, (self.axis.index + 1) * count)

    @property
    def visible(self) -> bool:
        """Return whether `.grad` can be a view of the buffer: torch requires it to have the parameter's dtype."""
        return all(slot.held.parameter.dtype == self.dtype for slot in self.slots)

    def views(self, flat: Tensor) -> Iterator[tuple[BucketSlot, Tensor]]:
        """Yield each slot with its elements of `flat` in the shape of the parameter."""
        for slot in self.slots:
            yield slot, flat[slot.start : slot.stop].view(slot.held.parameter.shape)

    def sections(self, elements: slice) -> Iterator[tuple[BucketSlot, slice]]:
        """Yield each slot that has some of these elements, and which."""
        for slot in self.slots:
            section = slice(max(slot.start, elements.start), min(slot.stop, elements.stop))
            if section.start < section.stop:
                yield slot, section


class FlatParameters:
    """The parameters of one bucket as views of one buffer, laid out as the bucket's gradients.

    Attributes:
        bucket: the bucket that holds the gradients.
        sharded: whether this rank steps only its slice; `WeightGathers` brings the other ranks' slices.
        flat: the buffer, in the parameters' dtype.
        stays: whether the elements of other ranks stay between steps; `WeightGathers` then brings their new values.
    """

    stays = True

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

    @property
    def held(self) -> Tensor:
        """The elements that stay between steps."""
        return self.flat

    def values(self, section: slice) -> Tensor:
        """The values of the elements `section`, a part of `mine`."""
        return self.flat[section]

    def read(self) -> None:
        """Take over values that were written to the parameters by something other than an optimizer."""

    def release(self) -> None:
        """Free what does not stay."""

    def gradient(self, section: slice) -> Tensor:
        """The gradient of the elements `section`, a part of `mine`: reduced, or what this rank has accumulated."""
        if self.bucket.content == "local":
            return self.bucket.flat[section]
        return self.bucket.part[section.start - self.mine.start : section.stop - self.mine.start]

    def stepped(self) -> Iterator[tuple[BucketSlot, slice]]:
        """Yield each slot of which this rank steps elements, and those elements."""
        return self.bucket.sections(self.mine)


def make_buckets(held: Sequence[BucketParameter], mesh: Mesh, capacity: int) -> tuple[Bucket, ...]:
    """Return buckets for the trainable parameters in the order of their reductions, which is the same on all ranks of an axis.

    The parameters of a bucket have the same stages, axis, dtype and device, and either all or none are partial. Parameters
    sharded over ep are reduced over edp, others over dp.

    Args:
        held: parameters in forward order.
        mesh: the mesh with these axes.
        capacity: largest size of a bucket in bytes of gradients; a larger parameter gets a separate bucket.
    """
    # Backward, the last layers' gradients are complete first, so buckets are filled and reduced from the last parameter on.
    groups: dict[tuple[object, ...], list[list[BucketParameter]]] = {}
    for candidate in reversed(held):
        if candidate.parameter.requires_grad:
            parameter, expert = candidate.parameter, candidate.sharding.over("ep") is not None
            key = (candidate.stages, expert, candidate.sharding.partial, parameter.dtype, parameter.device)
            members = groups.setdefault(key, [[]])
            elements = sum(other.parameter.numel() for other in (*members[-1], candidate))
            if members[-1] and elements * main_dtype(parameter.dtype).itemsize > capacity:
                members.append([])
            members[-1].append(candidate)
    place = {candidate.name: at for at, candidate in enumerate(reversed(held))}
    buckets = [
        Bucket(members, mesh.edp if members[0].sharding.over("ep") is not None else mesh.dp)
        for group in groups.values()
        for members in group
    ]
    return tuple(sorted(buckets, key=lambda bucket: max(place[slot.held.name] for slot in bucket.slots)))


def _slots(members: Sequence[BucketParameter]) -> tuple[BucketSlot, ...]:
    """Return the positions of a bucket's parameters; each begins at a multiple of _ALIGNMENT elements."""
    slots, start = [], 0
    for member in members:
        slots.append(BucketSlot(member, start, start + member.parameter.numel()))
        start = _aligned(slots[-1].stop)
    return tuple(slots)


def _aligned(elements: int) -> int:
    """Return `elements` rounded up to a multiple of _ALIGNMENT."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of main gradients and master weights for parameters of `dtype`: at least fp32."""
    return dtype if dtype.itemsize >= 4 else torch.float32
