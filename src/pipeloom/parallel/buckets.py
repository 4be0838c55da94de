"""Buckets: the gradients of several parameters in one flat buffer, so that one collective reduces them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding

_ALIGNMENT = 32  # elements


@dataclass(frozen=True)
class BucketParameter:
    """A parameter that this process holds.

    Attributes:
        name: global name.
        parameter: it.
        stages: those whose backward adds to its gradient.
        sharding: how it is laid over ranks.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    sharding: ParameterSharding = WHOLE

    @property
    def matrix(self) -> bool:
        """Return whether it has two dimensions or more: optimizers treat those alike, and vectors otherwise."""
        return self.parameter.ndim >= 2


@dataclass(frozen=True)
class BucketSlot:
    """Position of a parameter's elements in its bucket."""

    held: BucketParameter
    start: int
    stop: int


class Bucket:
    """Parameters of one dtype whose gradients are reduced over the same ranks at the same time.

    What `flat` holds: `empty`: nothing yet; `local`: what this rank has added up; `reduced`: the sum over all ranks. A new
    step adds its own part to what is local, and to what is reduced only after the reduction: nothing is reduced twice.

    Attributes:
        axis: the ranks that the gradients are summed over.
        partial: whether they are summed over tp too.
        slots: where each parameter stands.
        stop: where the parameters' elements end; those between slots belong to no parameter and are zeros.
        size: elements, in equal aligned shares for the axis: behind `stop` stands one for each parameter, see `mark`.
        flat: the gradients.
        before: reduced gradients of earlier steps, which the present step's are added to.
        absent_before: parameters that have none in `before`.
        part: with sharded gradients the reduced slice of this rank, else `flat`.
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
        """The elements behind the parameters, one for each."""
        return slice(self.stop, self.stop + len(self.slots))

    def mark(self, absent: AbstractSet[nn.Parameter]) -> None:
        """Writes 1 for each parameter that has a gradient here and 0 for the `absent`: the sum says whether any rank has one."""
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

    def runs(self, section: slice) -> Iterator[slice]:
        """The stretches of `section` elements that belong to matrices and to vectors, at most one of each."""
        border = next((slot.start for slot in self.slots if not slot.held.matrix), self.stop)
        for start, stop in ((0, border), (border, self.stop)):
            start, stop = max(start, section.start), min(stop, section.stop)
            if start < stop:
                yield slice(start, stop)

    @property
    def visible(self) -> bool:
        """Return whether `.grad` can be a view of the buffer: torch wants it to have the parameter's dtype."""
        return all(slot.held.parameter.dtype == self.dtype for slot in self.slots)

    def views(self, flat: Tensor) -> Iterator[tuple[BucketSlot, Tensor]]:
        """Each slot, and its part of `flat` in the parameter's shape."""
        for slot in self.slots:
            yield slot, flat[slot.start : slot.stop].view(slot.held.parameter.shape)


def make_buckets(held: Sequence[BucketParameter], mesh: Mesh, capacity: int) -> tuple[Bucket, ...]:
    """Buckets for the parameters that train, in the order in which they are reduced: the same on all ranks of an axis.

    A bucket holds parameters of the same stages, axis and dtype. Those sharded over ep are reduced over edp, others over dp.

    Args:
        held: in order of the forward.
        capacity: bytes of gradients after which a bucket is full; a larger parameter has one of its own.
    """
    groups: dict[tuple[object, ...], list[list[BucketParameter]]] = {}
    for candidate in reversed(held):
        if candidate.parameter.requires_grad:
            parameter, expert = candidate.parameter, candidate.sharding.over("ep") is not None
            key = (candidate.stages, expert, candidate.sharding.partial, parameter.dtype, parameter.device)
            members = groups.setdefault(key, [[]])
            size = (
                sum(other.parameter.numel() for other in (*members[-1], candidate))
                * main_dtype(parameter.dtype).itemsize
            )
            if members[-1] and size > capacity:
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
    """Matrices first, so that they are one run; each parameter begins at a multiple of 64 bytes at least."""
    slots, start = [], 0
    for member in sorted(members, key=lambda member: not member.matrix):
        slots.append(BucketSlot(member, start, start + member.parameter.numel()))
        start = _aligned(slots[-1].stop)
    return tuple(slots)


def _aligned(elements: int) -> int:
    """`elements` rounded up."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the main gradients and master weights of parameters of `dtype`: fp32 at least."""
    return dtype if dtype.itemsize >= 4 else torch.float32
