"""Exact copies of the state that a training step changes, so that a step can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.stage_state import StageState
from pipeloom.runtime import Pipeline
from pipeloom.train.optimizer import Optimizer


class Copies:
    """Exact copies of tensors, in memory that the next `take` reuses."""

    def __init__(self) -> None:
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors; the copies replace those of the last call."""
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        self._originals = [tensor.detach() for tensor in tensors]
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back into the tensors."""
        if self._copies:
            torch._foreach_copy_(self._originals, self._copies)


class OptimizerCopy:
    """A copy of an optimizer's parameters and state."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._states: list[dict[Any, dict[str, Any]]] = []

    def take(self, optimizer: Optimizer) -> None:
        self._states = [{master: dict(state) for master, state in each.state.items()} for each in optimizer.optimizers]
        state = [state for states in self._states for state in states.values()]
        values = [value for each in state for value in each.values() if isinstance(value, Tensor)]
        self._copies.take([*optimizer.changing(), *values])  # also parameters that other ranks step for this one

    def restore(self, optimizer: Optimizer) -> None:
        optimizer.wait()  # a transfer under way would overwrite what is restored
        self._copies.restore()
        for inner, states in zip(optimizer.optimizers, self._states, strict=True):
            inner.state.clear()  # a parameter's first gradient may have added state
            inner.state.update({master: dict(state) for master, state in states.items()})


class ForwardSideEffects:
    """Side effects of a forward pass besides gradients: the state of the layers, and torch's random state."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._modules = list(pipeline.modules.values())
        self._device = pipeline.device

    def take(self) -> None:
        self._state = StageState(self._modules)
        self._random = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self._device))

    def restore(self) -> None:
        self._state.restore()
        torch.set_rng_state(self._random[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1], self._device)
