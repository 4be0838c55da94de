"""Workarounds for what a backend cannot send: GPU tensors without NCCL, and dtypes that NCCL does not support.

Collectives of CUDA tensors through host memory and gloo are for several processes on one GPU, where NCCL refuses to run.

They are slow and simple, for debugging a layout on one device: each call waits for the device before it starts, and copies its
result back in `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def start(call: Callable[..., Any], out: Tensor, given: Tensor | None, *rest: Any, group: Any) -> Any:
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
