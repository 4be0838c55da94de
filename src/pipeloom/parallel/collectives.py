"""Collectives along one axis; each returns a handle to wait for.

The tokens of [..., tokens, width] are the dimension that all-gather and reduce-scatter cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeloom.errors import UsageError
from pipeloom.ops.segments import standstill
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.through_host import goes_through_host, start
from pipeloom.schedule.timeline import CommunicationKind

# torch 2.13 calls them so, and warns of the older names
_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


@dataclass(frozen=True)
class PendingCollective:
    """A collective in progress.

    Attributes:
        work: torch's handle.
        finish: returns the result once the work is done.
        read: the tensor that other threads may still read; the reference keeps it alive.
        kind: the ranks that take part, for the breakdown of a step's time.
    """

    work: Any
    finish: Callable[[], Tensor]
    read: Tensor
    kind: CommunicationKind = "tp"

    def wait(self) -> Tensor:
        """Wait for the collective and return its result. On CUDA the current stream waits, not the process."""
        with standstill("collective", self.kind):
            self.work.wait()
        return self.finish()


@dataclass(frozen=True)
class PendingParts:
    """A collective in progress whose result is one part from each rank.

    Attributes:
        finish: waits for the work, and returns the parts.
        read: the tensor that other threads may still read; the reference keeps it alive.
    """

    finish: Callable[[], list[Tensor]]
    read: Tensor | None = None

    def wait(self) -> list[Tensor]:
        """Wait for the collective and return the parts, in the order of the axis."""
        return self.finish()


def start_all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> PendingCollective:
    """Start the sum (or another `op`) over the axis in place: `x` must be contiguous, and holds the result."""
    return PendingCollective(start(dist.all_reduce, x, None, op, group=axis.group), lambda: x, x)


def start_all_gather(x: Tensor, axis: Axis) -> PendingCollective:
    """[..., t, width] of each rank -> [..., size · t, width]: the ranks' tokens one after the other."""
    part = x.contiguous()
    parts = part.new_empty((axis.size, *part.shape))
    work = start(getattr(dist, _GATHER), _rows(parts), _rows(part), group=axis.group)

    def finish() -> Tensor:
        # without leading dimensions, or with one sequence, this is a view
        return parts.movedim(0, -3).reshape(*part.shape[:-2], -1, part.shape[-1])

    return PendingCollective(work, finish, part)


def start_gather_slices(flat: Tensor, axis: Axis) -> PendingCollective:
    """Start to gather every rank's slice of `flat` [size · n] in place: rank r's slice is r·n to (r+1)·n."""
    parts = flat.view(axis.size, -1)
    part = parts[axis.index].clone() if flat.device.type == "cpu" else parts[axis.index]  # NCCL works in place
    work = start(getattr(dist, _GATHER), flat, part, group=axis.group)
    return PendingCollective(work, lambda: flat, part, "dp")


def start_gather_columns(x: Tensor, axis: Axis, sizes: Sequence[int]) -> PendingParts:
    """[..., own columns] of each rank, `sizes` of them -> every rank's, in the order of the axis."""
    widest = max(sizes)
    filled = F.pad(x, (0, widest - x.shape[-1])).unsqueeze(-1)
    pending = start_all_gather(filled, axis)

    def finish() -> list[Tensor]:
        columns = torch.split(pending.wait().squeeze(-1), widest, -1)
        return [column[..., :size] for column, size in zip(columns, sizes, strict=True)]

    return PendingParts(finish)


def start_tokens_for_columns(x: Tensor, axis: Axis, sizes: Sequence[int]) -> PendingParts:
    """[..., tokens, own columns] -> every rank's columns, `sizes` of them, of this rank's tokens / size; one all-to-all.

    Raises UsageError when the axis does not divide the tokens.
    """
    parts = _token_parts(x, axis)
    lead = parts.shape[1:-1]
    shapes = [(*lead, size) for size in sizes]
    return _exchange(list(parts), shapes, axis)


def start_columns_for_tokens(parts: Sequence[Tensor], axis: Axis) -> PendingParts:
    """Each rank's columns of this rank's tokens -> own columns of every rank's tokens: the inverse."""
    shape = parts[axis.index].shape
    return _exchange(parts, [tuple(shape)] * axis.size, axis)


def _exchange(parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], axis: Axis) -> PendingParts:
    """Send `parts[r]` to rank r, and receive a tensor of `shapes[r]` from it."""
    sending = torch.cat([part.reshape(-1) for part in parts])
    counts = [prod(shape) for shape in shapes]
    received = sending.new_empty(sum(counts))
    lengths = [part.numel() for part in parts]
    work = start(dist.all_to_all_single, received, sending, counts, lengths, group=axis.group)

    def finish() -> list[Tensor]:
        work.wait()
        return [piece.view(shape) for piece, shape in zip(torch.split(received, counts), shapes, strict=True)]

    return PendingParts(finish, sending)


def _token_parts(x: Tensor, axis: Axis) -> Tensor:
    """[..., tokens, width] -> [size, ..., tokens / size, width]. Raises UsageError when the axis does not divide the tokens."""
    tokens = x.shape[-2]
    if tokens % axis.size:
        raise UsageError(
            f"sequence parallelism: {axis.size} tensor-parallel ranks must divide the {tokens} tokens of a sequence; "
            f"nearest: {' or '.join(str(n) for n in _multiples(tokens, axis.size))}"
        )
    return x.reshape(*x.shape[:-2], axis.size, tokens // axis.size, x.shape[-1]).movedim(-3, 0)


def start_reduce_scatter(x: Tensor, axis: Axis) -> PendingCollective:
    """Start the sum of `x` [..., tokens, width] over the axis; each rank gets its tokens / size of the tokens.

    Raises UsageError when the axis does not divide the tokens.
    """
    parts = _token_parts(x, axis).contiguous()
    if parts.device.type == "cpu" or goes_through_host(parts.device, axis.group):
        return _exchange_and_sum(parts, axis)
    total = torch.empty_like(parts[0])
    out, given = (
        torch.view_as_real(x) if x.is_complex() else x for x in (total, parts)
    )  # as torch does in its other sums
    work = start(getattr(dist, _SCATTER), _rows(out), _rows(given), group=axis.group)
    return PendingCollective(work, lambda: total, parts)


def _exchange_and_sum(parts: Tensor, axis: Axis) -> PendingCollective:
    """Reduce-scatter by an all-to-all, summed in rank order: gloo's is an all-reduce, which sends twice as much."""
    received = torch.empty_like(parts)
    work = start(dist.all_to_all_single, _rows(received), _rows(parts), group=axis.group)
    return PendingCollective(work, lambda: received.sum(0), parts)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _multiples(count: int, of: int) -> list[int]:
    below = count // of * of
    return [n for n in (below, below + of) if n]
