"""Collectives along one axis; each returns a handle to wait for.

The tokens of [..., tokens, width] are the dimension that all-gather and reduce-scatter cut.

Several processes on one GPU have no NCCL, which refuses to run there: their collectives go through host memory and gloo, to
debug a layout on one device. These are slow: each call waits for the device before it starts, and copies its result back in
`wait`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeloom.errors import UsageError
from pipeloom.ops.segments import standstill
from pipeloom.parallel.mesh import Axis
from pipeloom.schedule.timeline import CommunicationKind


def goes_through_host(device: torch.device, group: Any) -> bool:
    """Return whether `group` cannot move tensors of `device` itself: they are on a GPU, and it has no NCCL."""
    return device.type == "cuda" and "nccl" not in str(dist.get_backend_config(group))


def carrier_of(device: torch.device, group: Any) -> torch.device:
    """Return the device from which small results of `device` are sent over `group`: the CPU if they go through host memory.

    gloo can sum GPU tensors itself, but its sends treat the address of a GPU tensor as host memory.
    """
    return torch.device("cpu") if group is not None and goes_through_host(device, group) else device


def as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in the form in which it is sent between two ranks: as bytes if NCCL lacks its dtype.

    NCCL refuses complex and 16-bit integer tensors; both ends have the same dtype, so both convert alike.
    """
    return tensor.view(-1).view(torch.uint8) if tensor.is_complex() or tensor.dtype == torch.int16 else tensor


def start_collective(call: Callable[..., Any], out: Tensor, given: Tensor | None, *rest: Any, group: Any) -> Any:
    """Start the collective `call(out, given, *rest)`, without `given` if that is None; return a handle with `wait()`."""
    operands = (out,) if given is None else (out, given)
    if not goes_through_host(out.device, group):
        return call(*operands, *rest, group=group, async_op=True)
    return ThroughHost(lambda *host: call(*host, *rest, group=group, async_op=True), operands)


class ThroughHost:
    """A collective on copies of `operands` in host memory, the first of which is its result."""

    def __init__(self, begin: Callable[..., Any], operands: tuple[Tensor, ...]) -> None:
        self._out = operands[0]
        # A copy to pageable memory waits for the current stream, so the operands have been computed by then.
        self._host = tuple(operand.detach().to("cpu", copy=True).contiguous() for operand in operands)
        self._work = begin(*self._host)

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._out.copy_(self._host[0])


Received = TypeVar("Received")

# torch 2.13 calls them so, and warns of the older names
_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


@dataclass(frozen=True)
class PendingCollective(Generic[Received]):
    """A collective in progress.

    Attributes:
        work: torch's handle.
        finish: returns the result once the work is done: a tensor, or one from each rank in the order of the axis.
        read: the tensor that other threads may still read; the reference keeps it alive.
        kind: the ranks that take part, for the breakdown of a step's time.
    """

    work: Any
    finish: Callable[[], Received]
    read: Tensor
    kind: CommunicationKind = "tp"

    def wait(self) -> Received:
        """Wait for the collective and return its result. On CUDA the current stream waits, not the process."""
        with standstill("collective", self.kind):
            self.work.wait()
        return self.finish()

    def result(self) -> Received:
        """As `wait`, where the caller counts the standstill, or another thread waits."""
        self.work.wait()
        return self.finish()


def start_all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> PendingCollective[Tensor]:
    """Start the sum (or another `op`) over the axis in place: `x` must be contiguous, and holds the result."""
    return PendingCollective(start_collective(dist.all_reduce, x, None, op, group=axis.group), lambda: x, x)


def start_all_gather(x: Tensor, axis: Axis) -> PendingCollective[Tensor]:
    """[..., t, width] of each rank -> [..., size · t, width]: the ranks' tokens one after the other."""
    part = x.contiguous()
    parts = part.new_empty((axis.size, *part.shape))
    work = start_collective(getattr(dist, _GATHER), _rows(parts), _rows(part), group=axis.group)

    def finish() -> Tensor:
        # without leading dimensions, or with one sequence, this is a view
        return parts.movedim(0, -3).reshape(*part.shape[:-2], -1, part.shape[-1])

    return PendingCollective(work, finish, part)


def start_gather_slices(flat: Tensor, axis: Axis, share: Tensor | None = None) -> PendingCollective[Tensor]:
    """Start to gather every rank's slice of `flat` [size · n]: rank r's slice is r·n to (r+1)·n.

    Args:
        share: the values of this rank's slice [n]; None: they are in `flat`.
    """
    part = share
    if part is None:
        part = flat.view(axis.size, -1)[axis.index]
        part = part.clone() if flat.device.type == "cpu" else part  # NCCL works in place
    work = start_collective(getattr(dist, _GATHER), flat, part, group=axis.group)
    return PendingCollective(work, lambda: flat, part, "dp")


def start_gather_columns(x: Tensor, axis: Axis, sizes: Sequence[int]) -> PendingCollective[list[Tensor]]:
    """[..., own columns] of each rank, `sizes` of them -> every rank's, in the order of the axis."""
    widest = max(sizes)
    filled = F.pad(x, (0, widest - x.shape[-1])).unsqueeze(-1)
    pending = start_all_gather(filled, axis)

    def finish() -> list[Tensor]:
        columns = torch.split(pending.finish().squeeze(-1), widest, -1)
        return [column[..., :size] for column, size in zip(columns, sizes, strict=True)]

    return PendingCollective(pending.work, finish, pending.read)


def start_tokens_for_columns(x: Tensor, axis: Axis, sizes: Sequence[int]) -> PendingCollective[list[Tensor]]:
    """[..., tokens, own columns] -> every rank's columns, `sizes` of them, of this rank's tokens / size; one all-to-all.

    Raises UsageError when the axis does not divide the tokens.
    """
    parts = _token_parts(x, axis)
    lead = parts.shape[1:-1]
    shapes = [(*lead, size) for size in sizes]
    return _exchange(list(parts), shapes, axis)


def start_columns_for_tokens(parts: Sequence[Tensor], axis: Axis) -> PendingCollective[list[Tensor]]:
    """Each rank's columns of this rank's tokens -> own columns of every rank's tokens: the inverse."""
    shape = parts[axis.index].shape
    return _exchange(parts, [tuple(shape)] * axis.size, axis)


def _exchange(
    parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], axis: Axis
) -> PendingCollective[list[Tensor]]:
    """Send `parts[r]` to rank r, and receive a tensor of `shapes[r]` from it."""
    sending = torch.cat([part.reshape(-1) for part in parts])
    counts = [prod(shape) for shape in shapes]
    received = sending.new_empty(sum(counts))
    lengths = [part.numel() for part in parts]
    work = start_collective(dist.all_to_all_single, received, sending, counts, lengths, group=axis.group)

    def finish() -> list[Tensor]:
        return [piece.view(shape) for piece, shape in zip(torch.split(received, counts), shapes, strict=True)]

    return PendingCollective(work, finish, sending)


def _token_parts(x: Tensor, axis: Axis) -> Tensor:
    """[..., tokens, width] -> [size, ..., tokens / size, width]. Raises UsageError when the axis does not divide the tokens."""
    tokens = x.shape[-2]
    if rest := tokens % axis.size:
        near = [str(n) for n in (tokens - rest, tokens - rest + axis.size) if n]
        raise UsageError(
            f"sequence parallelism: {axis.size} tensor-parallel ranks must divide the {tokens} tokens of a sequence; "
            f"nearest: {' or '.join(near)}"
        )
    return x.reshape(*x.shape[:-2], axis.size, tokens // axis.size, x.shape[-1]).movedim(-3, 0)


def start_reduce_scatter(x: Tensor, axis: Axis) -> PendingCollective[Tensor]:
    """Start the sum of `x` [..., tokens, width] over the axis; each rank gets its tokens / size of the tokens.

    Raises UsageError when the axis does not divide the tokens.
    """
    parts = _token_parts(x, axis).contiguous()
    if parts.device.type == "cpu" or goes_through_host(parts.device, axis.group):
        return _exchange_and_sum(parts, axis)
    total = torch.empty_like(parts[0])
    # As torch does in its other sums.
    out, given = (torch.view_as_real(x) if x.is_complex() else x for x in (total, parts))
    work = start_collective(getattr(dist, _SCATTER), _rows(out), _rows(given), group=axis.group)
    return PendingCollective(work, lambda: total, parts)


def _exchange_and_sum(parts: Tensor, axis: Axis) -> PendingCollective[Tensor]:
    """Reduce-scatter by an all-to-all, summed in rank order: gloo's is an all-reduce, which sends twice as much."""
    received = torch.empty_like(parts)
    work = start_collective(dist.all_to_all_single, _rows(received), _rows(parts), group=axis.group)
    return PendingCollective(work, lambda: received.sum(0), parts)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


@enum.unique
class Tag(enum.IntEnum):
    """The contents of a message in a process group. The numbers differ, so that no receive matches a message of another kind."""

    ACTIVATION = 11
    GRADIENT = 12
    ACTIVATION_HEADER = 13
    TIED_WEIGHT = 14
    CLOCK = 15
    LOSS = 16
    GRADIENT_HEADER = 18
    ROWS = 19
    SIGNAL = 1000  # and those above, one for each signal of a schedule
