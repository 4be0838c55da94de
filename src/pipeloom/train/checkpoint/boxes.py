"""Boxes: axis-parallel parts of a tensor, given by the offset of their first element and their shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """A part of a tensor: `offset` and `shape` have one entry per dimension; a 0-dim tensor has one box, `((), ())`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def moved(self, by: Sequence[int]) -> Box:
        """Return this box with `by` added to its offset: its place in a tensor where the present tensor starts at `by`."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both share, or None where they share no element."""
        first = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(first, stop, strict=True))
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor with the values of `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements `start` to `stop` (exclusive) of a tensor of `shape`, in row-major order.

    Each box is contiguous in memory; a tensor of n dimensions needs at most 2n - 1 of them.
    """
    # Elements of a part at one place in the leading dimensions, by their number.
    sizes = [math.prod(shape[dim:]) for dim in range(len(shape) + 1)]
    while start < stop:
        dim = next(dim for dim, size in enumerate(sizes) if start % size == 0 and start + size <= stop)
        if dim == 0:
            yield Box.whole(shape)
            return
        offset = [int(at) for at in np.unravel_index(start // sizes[dim], shape[:dim])]
        count = min((stop - start) // sizes[dim], shape[dim - 1] - offset[-1])
        yield Box((*offset, *[0] * (len(shape) - dim)), (*[1] * (dim - 1), count, *shape[dim:]))
        start += count * sizes[dim]


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return the reason why `boxes` do not cover each element of a tensor of `shape` exactly once; "" if they do."""
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            return f"a part has {len(box.offset)} dimensions, the tensor {len(shape)}"
        if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(box.offset, box.shape, shape, strict=True)):
            return f"the part {list(box.shape)} at {list(box.offset)} is outside {list(shape)}"
    held_elements, wanted = sum(box.elements for box in boxes), math.prod(shape)
    if held_elements != wanted:
        return f"its parts hold {held_elements:,} elements of {wanted:,}"
    ordered = sorted(box for box in boxes if box.elements)
    for at, box in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if box.intersection(other) is not None:
                return f"the parts at {list(box.offset)} and {list(other.offset)} overlap"
    return ""
