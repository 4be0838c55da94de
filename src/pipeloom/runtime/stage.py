"""A stage at work: forward and backward of one micro-batch, and what stays alive in between.

F, B and I are walks (runtime/overlap.py): they stop where they would wait for a communication inside the stage. A stage
whose layers declare none is one piece, and its walks never stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.ops import products
from pipeloom.ops.deferred import Desk, Ledger, defer_weight_gradients
from pipeloom.ops.segments import Communication, carries, is_segmented, saved_of
from pipeloom.runtime.boundary import Boundary, Values, as_values
from pipeloom.runtime.deferral import HeadDeferral
from pipeloom.runtime.layers import StageModules
from pipeloom.runtime.overlap import Lane, Walk
from pipeloom.runtime.pieces import Piece, pieces_of


@dataclass
class Cut:
    """What a piece of one micro-batch's forward leaves for its backward.

    Attributes:
        inputs: what it was given; those that carry a gradient are leaves.
        roots: where its backward starts: its outputs' places in the graph (their storage may be gone), or the loss.
        after: the communication behind it.
        saved: what the backward of that is told.
    """

    inputs: tuple[Any, ...]
    roots: tuple[GradientEdge | Tensor, ...] = ()
    after: Communication | None = None
    saved: tuple[Any, ...] = ()


@dataclass
class InFlight:
    """What one micro-batch keeps alive on a stage between F and the end of its backward.

    Attributes:
        ledger: the weight gradients that wait for W; None where autograd computes them in I.
        head: those of the output layer, where they may wait for the cool-down.
        cuts: the pieces whose backward is to come, in order.
        kept: outputs that were asked to be kept.
        received: buffers to give back afterwards.
    """

    ledger: Ledger | None
    head: Ledger | None = None
    cuts: list[Cut] = field(default_factory=list)
    kept: Values = ()
    received: Values = ()


class Stage:
    """One stage on its rank: its layers, and the micro-batches that are alive on it.

    Args:
        desk: where linear layers learn of their ledger; shared by the stages of a thread.
        splits: whether the schedule splits backwards, so that W waits. Where it does not, weight gradients are put off only
            behind a communication of the same backward, which they then hide.
        lane: the rank's communications.
        deferral: keeps the last layer's weight gradients for the cool-down; None: they are as all others.
    """

    def __init__(
        self,
        index: int,
        layers: StageModules,
        deallocate: bool,
        desk: Desk,
        splits: bool,
        lane: Lane,
        deferral: HeadDeferral | None = None,
    ) -> None:
        self.index = index
        self.layers = layers
        self.deallocate = deallocate
        self.segmented = any(map(is_segmented, layers.modules))
        self.alive: dict[int, InFlight] = {}
        deferral = deferral if layers.modules else None
        self.deferral = deferral
        self._owing: dict[int, InFlight] = {}
        self._desk = desk
        self.splits = splits
        self.whole: frozenset[int] = frozenset()  # micro-batches whose backward is one B though others are split
        self._lane = lane
        usual = layers.modules if deferral is None else layers.modules[:-1]
        if splits or self.segmented or products.machine_prefers_onednn():  # else plain layers stay as they are
            for module in usual:
                defer_weight_gradients(module, desk)
        if deferral is not None:
            defer_weight_gradients(layers.modules[-1], deferral.desk)

    def add_in_place(self) -> None:
        """From now on linear layers add their weight gradients to the desks' main gradients."""
        for module in self.layers.modules[: -1 if self.deferral is not None else None]:
            defer_weight_gradients(module, self._desk)

    @property
    def one_backward(self) -> bool:
        """Whether B is one call of autograd's, after which all gradients are there."""
        return not (self.splits or self.segmented or self.deferral is not None)

    def compute(self, values: Values, keywords: Mapping[str, Any]) -> Any:
        """The layers one after the other; the last one's result as it is. No gradient, nothing stays alive."""
        self._write_to(None)
        result: Any = values
        for at, module in enumerate(self.layers.modules):
            if at:
                values = as_values(result, f"layer {self.layers.names[at - 1]!r}")
            result = module(*values, **self.layers.accepted(at, keywords))
        return result

    def forward(
        self, microbatch: int, values: Values, carried: Boundary | None, keywords: Mapping[str, Any]
    ) -> Walk[Values]:
        """F of a stage that is not its route's last: the outputs, attached to the graph.

        Args:
            values: the inputs; fresh tensors that nothing else writes to.
            carried: the specs that say which inputs carry a gradient; None: they come from the user, none does.
        """
        flight, result = yield from self._walk(microbatch, values, carried, keywords)
        outputs = as_values(result, f"stage {self.index}")
        if torch.is_grad_enabled():
            flight.cuts[-1].roots = _roots(outputs)
            flight.kept = () if self.deallocate else outputs
            flight.received = values if carried is not None else ()
            self.alive[microbatch] = flight
        return outputs

    def forward_to_loss(
        self,
        microbatch: int,
        values: Values,
        carried: Boundary | None,
        keywords: Mapping[str, Any],
        loss: Callable[[Any], Tensor],
    ) -> Walk[Tensor]:
        """F of a route's last stage: `loss(output)`, a micro-batch's share of the step's loss."""
        flight, output = yield from self._walk(microbatch, values, carried, keywords)
        share = loss(output)
        if torch.is_grad_enabled():
            flight.cuts[-1].roots = (share,) if share.requires_grad else ()
            flight.received = values if carried is not None else ()
            self.alive[microbatch] = flight
        return share.detach()

    def backward(self, microbatch: int, gradients: Values) -> Walk[tuple[Values, Values]]:
        """B: gradients of the inputs that carry one, and the receive buffers that are free now.

        Args:
            gradients: one for each output that carries one; empty for the last stage, whose root is the loss itself.
        """
        flight = self.alive.pop(microbatch)
        result = yield from self._walk_back(flight, gradients, pays=True)
        self._put_off(flight)
        return result

    def input_gradient(self, microbatch: int, gradients: Values) -> Walk[tuple[Values, Values]]:
        """I: as B, but what the ledger owes waits for W. Everything else of the micro-batch is freed."""
        flight = self.alive.pop(microbatch)
        result = yield from self._walk_back(flight, gradients, pays=False)
        if flight.ledger is not None:
            self._owing[microbatch] = flight
        return result

    def stops(self, microbatch: int) -> bool:
        """Whether the backward of this micro-batch has communications inside at which another action may compute."""
        return any(cut.after is not None and not cut.after.quick for cut in self.alive[microbatch].cuts)

    def weight_gradient(self, microbatch: int) -> None:
        """W: the weight gradients that I left."""
        flight = self._owing.pop(microbatch, None)
        if flight is not None and flight.ledger is not None:
            flight.ledger.pay()
            self._put_off(flight)

    def _put_off(self, flight: InFlight) -> None:
        if self.deferral is not None and flight.head is not None:
            self.deferral.hold(flight.head)

    def _write_to(self, flight: InFlight | None) -> None:
        """Linear layers that run now, for the first time or again, write down what they owe with this micro-batch."""
        self._desk.ledger = None if flight is None else flight.ledger
        if self.deferral is not None:
            self.deferral.desk.ledger = None if flight is None else flight.head

    def _walk(
        self, microbatch: int, values: Values, carried: Boundary | None, keywords: Mapping[str, Any]
    ) -> Walk[tuple[InFlight, Any]]:
        """All pieces; the last one's result, and what has been left for the backward, without the last roots."""
        inputs: tuple[Any, ...] = _leaves(values, carried)
        pieces = pieces_of(self.layers, keywords)
        training = torch.is_grad_enabled()
        owes = len(pieces) > 1 or (self.splits and microbatch not in self.whole)
        flight = InFlight(Ledger() if training and owes else None)
        if training and self.deferral is not None:
            flight.head = Ledger()
        for piece in pieces[:-1]:
            inputs = yield from self._compute_and_communicate(piece, inputs, flight, training)
        self._write_to(flight)
        result = pieces[-1].compute(inputs)
        if training:
            flight.cuts.append(Cut(inputs))
        return flight, result

    def _compute_and_communicate(
        self, piece: Piece, inputs: tuple[Any, ...], flight: InFlight, training: bool
    ) -> Walk[tuple[Any, ...]]:
        """A piece and the communication behind it; the next piece's inputs."""
        assert piece.after is not None
        self._write_to(flight)
        outputs = piece.compute(inputs)
        which = [training and carries(value) for value in outputs]
        if training:
            flight.cuts.append(Cut(inputs, _roots(outputs), piece.after, saved_of(outputs)))
        given = tuple(value.detach() if isinstance(value, Tensor) else value for value in outputs)
        pending = self._lane.start(partial(piece.after.start, given), given)
        del inputs, outputs, given  # while it is under way, only the graph and the communication itself hold tensors
        if not piece.after.quick:
            yield
        found = self._lane.wait(pending, piece.after.name)
        return tuple(v.detach().requires_grad_() if leaf else v for v, leaf in zip(found, which, strict=True))

    def _walk_back(self, flight: InFlight, gradients: Values, pays: bool) -> Walk[tuple[Values, Values]]:
        """The pieces from the last to the first, with a stop between two.

        `pays`: a piece's weight gradients are computed as soon as the communication that waited for it is under way.
        """
        seeds: list[Tensor | None] = list(gradients)
        while True:
            cut = flight.cuts.pop()
            self._write_to(flight)  # for layers that are recomputed now
            if cut.roots:
                torch.autograd.backward(cut.roots, seeds or [None] * len(cut.roots))  # type: ignore[arg-type]
            found = tuple(_gradient(value) if carries(value) else None for value in cut.inputs)
            which = [at for at, value in enumerate(cut.inputs) if carries(value)]
            before, pending = flight.cuts[-1] if flight.cuts else None, None
            if before is not None and before.after is not None and which:
                pending = self._lane.start(partial(before.after.start_backward, found, before.saved), found)
            del cut
            if pays and flight.ledger is not None:
                flight.ledger.pay()
            if before is None or before.after is None:
                return tuple(found[at] for at in which), flight.received
            del found
            if not before.after.quick:
                yield
            if pending is not None:
                results = self._lane.wait(pending, f"{before.after.name}'s backward")
                seeds = [results[at] for at in which]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.layers.modules


def _roots(outputs: tuple[Any, ...]) -> tuple[GradientEdge, ...]:
    return tuple(get_gradient_edge(value) for value in outputs if carries(value))


def _leaves(values: Values, carried: Boundary | None) -> Values:
    if carried is None or not torch.is_grad_enabled():
        return values
    return tuple(
        value.detach().requires_grad_() if value is not None and spec is not None and spec.carries else value
        for value, spec in zip(values, carried, strict=True)
    )


def _gradient(leaf: Tensor) -> Tensor:
    """The leaf's gradient, zeros where nothing used it; taken from it."""
    gradient, leaf.grad = leaf.grad, None
    return gradient if gradient is not None else torch.zeros_like(leaf)
