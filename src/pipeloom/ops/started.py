"""A communication that autograd sees as two nodes, its start and its end, so that computation runs in between.

In the backward the end's node starts the communication of the gradients, and the start's node waits for it. Autograd runs the
nodes that are ready in reverse order of their making, so what was between start and end of the forward mirrored is between
start and end of the backward: nobody has to write the overlap of the backward down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.segments import Communication, Pending, Values, carries, saved_of


def begin(communication: Communication, values: Values) -> Callable[[], Values]:
    """Starts it; returns what waits for it and gives its results, differentiable, to be called once."""
    moving = [at for at, value in enumerate(values) if carries(value)] if torch.is_grad_enabled() else []
    if not moving:
        return communication.start(values).wait
    call = _Call(communication, values, moving)
    marks = _Begin.apply(call, *(values[at] for at in moving))  # type: ignore[no-untyped-call]

    def finish() -> Values:
        carried = _End.apply(call, *marks)  # type: ignore[no-untyped-call]
        results = list(call.results)
        for at, value in zip(moving, carried, strict=True):
            results[at] = value
        return tuple(results)

    return finish


class _Call:
    """One communication under way, there and (its gradients) back."""

    def __init__(self, communication: Communication, values: Values, moving: Sequence[int]) -> None:
        self.communication = communication
        self.moving = moving
        self.saved = saved_of(values)
        self.results: Values = ()
        self.pending: Pending | None = None

    def placed(self, tensors: Sequence[Any], among: Values) -> Values:
        filled = list(among)
        for at, tensor in zip(self.moving, tensors, strict=True):
            filled[at] = tensor
        return tuple(filled)

    def arrived(self) -> Values:
        pending, self.pending = self.pending, None
        assert pending is not None, "a communication was waited for before its start"
        return pending.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        call.pending = call.communication.start(call.placed([t.detach() for t in tensors], call.saved))
        # nothing has arrived yet: these only hold the two nodes together
        return tuple(tensor.new_empty(0) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *marks: Tensor) -> Any:
        found = ctx.call.arrived()
        return None, *(found[at] for at in ctx.call.moving)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *marks: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        results = call.arrived()
        call.results = tuple(None if at in call.moving else value for at, value in enumerate(results))
        return tuple(results[at] for at in call.moving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call: _Call = ctx.call
        given = call.placed(gradients, (None,) * len(call.saved))
        call.pending = call.communication.start_backward(given, call.saved)
        return None, *(gradient.new_zeros(0) for gradient in gradients)
