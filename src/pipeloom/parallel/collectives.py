"""Collectives along one axis, each as something that was started and is waited for.

The tokens of [..., tokens, width] are the dimension that all-gather and reduce-scatter cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.segments import standstill
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.through_host import goes_through_host, start
from pipeloom.schedule.exposed import CommunicationKind

# torch 2.13 calls them so, and warns of the older names
_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


@dataclass(frozen=True)
class PendingCollective:
    """A collective under way.

    Attributes:
        work: torch's.
        finish: makes the result when the work is done.
        read: what other threads still read; it stays alive as long as this does.
        kind: the ranks that take part, for the account of where a step's time went.
    """

    work: Any
    finish: Callable[[], Tensor]
    read: Tensor
    kind: CommunicationKind = "tp"

    def wait(self) -> Tensor:
        """The result. On CUDA the current stream waits, not the process."""
        with standstill("collective", self.kind):
            self.work.wait()
        return self.finish()


def start_all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> PendingCollective:
    """The sum (or another `op`) over the axis, written into `x` itself, which must be contiguous."""
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
    """Every rank's slice of `flat`, [size · n], on every rank: rank r's own elements are r·n to (r+1)·n."""
    parts = flat.view(axis.size, -1)
    own = parts[axis.index].clone() if flat.device.type == "cpu" else parts[axis.index]  # NCCL works in place
    work = start(getattr(dist, _GATHER), flat, own, group=axis.group)
    return PendingCollective(work, lambda: flat, own, "dp")


def start_reduce_scatter(x: Tensor, axis: Axis) -> PendingCollective:
    """The sum over the axis of `x` [..., tokens, width], of which each rank gets its own tokens / size.

    Raises UsageError when the axis does not divide the tokens.
    """
    tokens = x.shape[-2]
    if tokens % axis.size:
        raise UsageError(
            f"sequence parallelism: {axis.size} tensor-parallel ranks must divide the {tokens} tokens of a sequence; "
            f"nearest: {' or '.join(str(n) for n in _multiples(tokens, axis.size))}"
        )
    parts = x.view(*x.shape[:-2], axis.size, tokens // axis.size, x.shape[-1]).movedim(-3, 0).contiguous()
    if parts.device.type == "cpu" or goes_through_host(parts.device, axis.group):
        return _exchange_and_sum(parts, axis)
    own = torch.empty_like(parts[0])
    work = start(getattr(dist, _SCATTER), _rows(own), _rows(parts), group=axis.group)
    return PendingCollective(work, lambda: own, parts)


def _exchange_and_sum(parts: Tensor, axis: Axis) -> PendingCollective:
    """gloo's own reduce-scatter is an all-reduce of which most is thrown away; this sends half, and sums in rank order."""
    received = torch.empty_like(parts)
    work = start(dist.all_to_all_single, _rows(received), _rows(parts), group=axis.group)
    return PendingCollective(work, lambda: received.sum(0), parts)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _multiples(count: int, of: int) -> list[int]:
    below = count // of * of
    return [n for n in (below, below + of) if n]
