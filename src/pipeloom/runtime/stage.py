"""A stage at work: forward and backward of one micro-batch, and what stays alive in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.ops.deferred import Desk, Ledger, defer_weight_gradients
from pipeloom.runtime.boundary import Boundary, Values, as_values, boundary_of
from pipeloom.runtime.layers import StageModules


class Root(NamedTuple):
    """Where a backward starts: an output's place in the graph (its storage may be gone), or the loss."""

    at: GradientEdge | Tensor
    seed: Tensor | None


@dataclass
class InFlight:
    """What one micro-batch keeps alive on a stage between F and the end of its backward.

    Attributes:
        inputs: the stage's inputs; those that carry a gradient are leaves.
        roots: where the backward starts.
        kept: outputs that were asked to be kept.
        received: buffers to give back afterwards.
        ledger: the weight gradients that wait for W; None where the schedule does not split backwards.
    """

    inputs: Values
    roots: tuple[Root, ...]
    kept: Values
    received: Values
    ledger: Ledger | None


class Stage:
    """One stage on its rank: its layers, and the micro-batches that are alive on it."""

    def __init__(self, index: int, layers: StageModules, deallocate: bool, desk: Desk | None) -> None:
        self.index = index
        self.layers = layers
        self.deallocate = deallocate
        self.alive: dict[int, InFlight] = {}
        self._owing: dict[int, Ledger] = {}
        self._desk = desk
        if desk is not None:
            for module in layers.modules:
                defer_weight_gradients(module, desk)

    def compute(self, values: Values, keywords: Mapping[str, Any]) -> Any:
        """The layers one after the other; the last one's result as it is."""
        result: Any = values
        for at, module in enumerate(self.layers.modules):
            if at:
                values = as_values(result, f"layer {self.layers.names[at - 1]!r}")
            result = module(*values, **self.layers.accepted(at, keywords)) if keywords else module(*values)
        return result

    def forward(self, microbatch: int, values: Values, carries: Boundary | None, keywords: Mapping[str, Any]) -> Values:
        """F of a stage that is not its route's last: the outputs, attached to the graph.

        Args:
            values: the inputs; fresh tensors that nothing else writes to.
            carries: the specs that say which inputs carry a gradient; None: they come from the user, none does.
        """
        inputs = self._leaves(values, carries)
        ledger = self._open_ledger()
        outputs = as_values(self.compute(inputs, keywords), f"stage {self.index}")
        if torch.is_grad_enabled():
            carried = [
                v
                for v, spec in zip(outputs, boundary_of(outputs), strict=True)
                if v is not None and spec and spec.carries
            ]
            roots = tuple(Root(get_gradient_edge(v), None) for v in carried)
            received = values if carries is not None else ()
            self.alive[microbatch] = InFlight(inputs, roots, () if self.deallocate else outputs, received, ledger)
        return outputs

    def forward_to_loss(
        self, microbatch: int, values: Values, carries: Boundary | None, keywords: Mapping[str, Any], loss: Any
    ) -> tuple[Tensor, Any]:
        """F of a route's last stage: `loss(output)`, a micro-batch's share of the step's loss, and the output."""
        inputs = self._leaves(values, carries)
        ledger = self._open_ledger()
        output = self.compute(inputs, keywords)
        share = loss(output)
        if torch.is_grad_enabled():
            roots = (Root(share, None),) if share.requires_grad else ()
            self.alive[microbatch] = InFlight(inputs, roots, (), values if carries is not None else (), ledger)
        return share.detach(), output

    def backward(self, microbatch: int, gradients: Values) -> tuple[Values, Values]:
        """B: gradients of the inputs that carry one, and the receive buffers that are free now.

        Args:
            gradients: one for each output that carries one; empty for the last stage, whose root is the loss itself.
        """
        result = self.input_gradient(microbatch, gradients)
        self.weight_gradient(microbatch)
        return result

    def input_gradient(self, microbatch: int, gradients: Values) -> tuple[Values, Values]:
        """I: as B, but what the ledger owes waits for W. Everything else of the micro-batch is freed."""
        flight = self.alive.pop(microbatch)
        if self._desk is not None:
            self._desk.ledger = flight.ledger  # for layers that are recomputed now
        if flight.roots:
            seeds = list(gradients) if gradients else [None] * len(flight.roots)
            torch.autograd.backward([root.at for root in flight.roots], seeds)  # type: ignore[arg-type]
        if flight.ledger is not None:
            self._owing[microbatch] = flight.ledger
        return self._input_gradients(flight), flight.received

    def weight_gradient(self, microbatch: int) -> None:
        """W: the weight gradients that I left."""
        ledger = self._owing.pop(microbatch, None)
        if ledger is not None:
            ledger.pay()

    def _open_ledger(self) -> Ledger | None:
        if self._desk is None:
            return None
        self._desk.ledger = Ledger() if torch.is_grad_enabled() else None
        return self._desk.ledger

    def _input_gradients(self, flight: InFlight) -> Values:
        gradients: list[Tensor | None] = []
        for value in flight.inputs:
            if value is not None and value.requires_grad:
                gradients.append(value.grad if value.grad is not None else torch.zeros_like(value))
                value.grad = None
        return tuple(gradients)

    def _leaves(self, values: Values, carries: Boundary | None) -> Values:
        if carries is None or not torch.is_grad_enabled():
            return values
        return tuple(
            value.detach().requires_grad_() if value is not None and spec is not None and spec.carries else value
            for value, spec in zip(values, carries, strict=True)
        )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.layers.modules
