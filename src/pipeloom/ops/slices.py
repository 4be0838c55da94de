"""Slices of sequences: the state that a layer keeps of one slice for the later slices of the same sequences.

A micro-batch cut into slices along its sequences passes through a stage slice by slice, and backward in reverse (TeraPipe, arXiv
2102.07988; Seq1F1B, arXiv 2406.03488). A layer in which a token sees earlier ones declares a keyword argument `slice_state`.
The forward of slice k reads the pieces that the layer kept of the slices before it, such as their keys and values, and keeps
its own. Pieces are leaves of the later slices' graphs; the sum of their gradients enters the backward of their own slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.ops.layer import SlicePlace

STATE = "slice_state"

StatePiece = tuple[Tensor, ...]


class _HeldPiece:
    """The piece of one slice, as leaves, and the sums of their gradients over the later slices, in fp32 at least."""

    def __init__(self, tensors: StatePiece) -> None:
        self.leaves = tuple([each.detach().requires_grad_(each.requires_grad) for each in tensors])
        self._wide: dict[int, Tensor] = {}
        for leaf in self.leaves:
            if leaf.requires_grad and leaf.dtype.itemsize < 4:
                leaf.register_post_accumulate_grad_hook(self._widen)  # type: ignore[no-untyped-call]

    def gradient(self, at: int) -> Tensor | None:
        """Return the sum of the gradients of tensor `at`; None: no later slice has used it."""
        leaf = self.leaves[at]
        total = self._wide.get(id(leaf), leaf.grad)
        return None if total is None else total.to(leaf.dtype)

    def _widen(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient, leaf.grad = leaf.grad, None
        if id(leaf) in self._wide:
            self._wide[id(leaf)] += gradient
        else:
            self._wide[id(leaf)] = gradient.float()


class SequenceHistory:
    """State of one layer for the slices of one micro-batch: their pieces, and numbers that are summed over them."""

    def __init__(self) -> None:
        self.pieces: dict[int, _HeldPiece] = {}
        self.numbers: dict[int, Tensor] = {}


class PieceRoot(NamedTuple):
    """A place in a slice's graph at which its backward starts, with the gradient of the later slices.

    Attributes:
        edge: of a tensor of the slice's piece.
        piece, at: the piece, and the tensor's position in it.
    """

    edge: GradientEdge
    piece: _HeldPiece
    at: int


class SliceState:
    """State of one layer for one slice of a micro-batch's sequences; the runtime passes it as the keyword `slice_state`.

    Attributes:
        place: which part of the sequences the slice is.
    """

    def __init__(self, history: SequenceHistory, place: SlicePlace) -> None:
        self.place = place
        self._history = history
        self._roots: tuple[PieceRoot, ...] | None = None

    @property
    def earlier(self) -> tuple[StatePiece, ...]:
        """The pieces of the slices before this one, in order; () for a slice of which the layer kept nothing."""
        pieces = self._history.pieces
        return tuple([pieces[at].leaves if at in pieces else () for at in range(self.place.index)])

    def keep(self, *piece: Tensor) -> None:
        """Keep tensors of this slice for the later ones, until the backward of this slice. Once per forward.

        They must not be changed in place afterwards.
        """
        if self._roots is not None:  # a recomputed layer runs again
            return
        held = self._history.pieces.setdefault(self.place.index, _HeldPiece(piece))
        graph = torch.is_grad_enabled()
        self._roots = tuple(
            [PieceRoot(get_gradient_edge(t), held, at) for at, t in enumerate(piece) if graph and t.requires_grad]
        )

    def total(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the sum of `numbers` over all slices of the micro-batch, detached.

        It may be called in the backward only: the forwards of all slices precede the first backward.
        """
        held = self._history.numbers
        held[self.place.index] = numbers.detach()
        return lambda: torch.stack([held[at] for at in range(self.place.count)]).sum(0)

    # -- for the runtime -----------------------------------------------------------------------------------------------------

    def take_roots(self) -> tuple[PieceRoot, ...]:
        """Return the roots of what the forward has kept since the last call."""
        roots, self._roots = self._roots or (), None if self._roots is None else ()
        return roots

    def release(self) -> None:
        """Drop the slice's piece: its backward has run, and so have those of all later slices."""
        self._history.pieces.pop(self.place.index, None)
