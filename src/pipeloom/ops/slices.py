"""Slices of sequences: the state that a layer keeps of one slice for the later slices of the same sequences.

A micro-batch cut into slices along its sequences passes through a stage slice by slice, and backward in reverse (TeraPipe, arXiv
2102.07988; Seq1F1B, arXiv 2406.03488). A layer in which a token sees earlier ones declares a keyword argument `slice_state`.
The forward of slice k reads the pieces that the layer kept of the slices before it, such as their keys and values, and keeps
its own. Pieces are leaves of the later slices' graphs; the sum of their gradients enters the backward of their own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.ops.block_attention import Keys, Open
from pipeloom.ops.host_memory import HostBuffers, HostCopy
from pipeloom.ops.layer import SlicePlace

STATE = "slice_state"

StatePiece = tuple[Tensor, ...]


class HeldPiece:
    """The piece of one slice, and the sums of its gradients over the later slices, in fp32 at least.

    Floating-point tensors of it may move to host memory. A later slice then reads each of them from there where it needs it, and
    adds its gradient to the sum there.
    """

    def __init__(self, tensors: StatePiece) -> None:
        self._tensors = list(map(self._leaf, range(len(tensors)), tensors))
        self._sums: dict[int, Tensor | HostCopy] = {}
        self._on_host: dict[int, HostCopy] = {}
        self._host_memory: HostBuffers | None = None
        self._shapes = [each.shape for each in tensors]
        self._gives = [each.requires_grad for each in tensors]
        self._lock = Lock()  # it moves in a thread, and a backward may add to it meanwhile

    @property
    def leaves(self) -> StatePiece:
        """Return its tensors as leaves on the device; those in host memory are read."""
        with self._lock:
            return tuple([self._read(at) if at in self._on_host else leaf for at, leaf in enumerate(self._tensors)])

    @property
    def on_device(self) -> StatePiece:
        """Return those of its tensors that are on the device."""
        return tuple([leaf for at, leaf in enumerate(self._tensors) if at not in self._on_host])

    def shape(self, at: int) -> torch.Size:
        """Return the shape of tensor `at`."""
        return self._shapes[at]

    def opened(self, at: int, opening: Open) -> tuple[Tensor, Open]:
        """Return tensor `at` as `block_attention` takes keys and values: one in host memory is there only while it is used."""
        with self._lock:
            if at not in self._on_host:
                return self._tensors[at], opening
            place = torch.empty(0, dtype=self._tensors[at].dtype, device=self._tensors[at].device)
            return place, partial(_Streamed, self, at, opening)

    def read(self, at: int) -> Tensor:
        """Return a copy on the device of tensor `at`, which is in host memory."""
        return self._on_host[at].read()

    def add(self, at: int, gradient: Tensor) -> None:
        """Add a later slice's gradient of tensor `at`."""
        with self._lock:
            total = self._sums.get(at)
            if total is not None:
                total.add(gradient) if isinstance(total, HostCopy) else total.add_(gradient)
                return
            wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
            self._sums[at] = wide if self._host_memory is None else HostCopy(wide, self._host_memory)

    def gradient(self, at: int) -> Tensor | None:
        """Return the sum of the gradients of tensor `at`; None: no later slice has used it."""
        total = self._sums.get(at)
        if total is None:
            return None
        return (total.read() if isinstance(total, HostCopy) else total).to(self._tensors[at].dtype)

    def to_host(self, buffers: HostBuffers, wait: Callable[[], None]) -> None:
        """Move the floating-point tensors and the sums so far to host memory.

        Args:
            wait: returns once the copies on the current stream have ended.
        """
        copies = {at: HostCopy(leaf, buffers) for at, leaf in enumerate(self._tensors) if leaf.is_floating_point()}
        wait()
        with self._lock:
            self._sums |= {at: HostCopy(each, buffers) for at, each in self._sums.items() if isinstance(each, Tensor)}
            wait()
            self._host_memory, self._on_host = buffers, copies
            for at in copies:
                self._tensors[at] = self._tensors[at].detach().new_empty(0)

    def free(self) -> None:
        """Give its host memory back."""
        for each in (*self._on_host.values(), *self._sums.values()):
            if isinstance(each, HostCopy):
                each.free()

    def _read(self, at: int) -> Tensor:
        return self._leaf(at, self._on_host[at].read().requires_grad_(self._gives[at]))

    def _leaf(self, at: int, tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(partial(_take, ref(self), at))  # type: ignore[no-untyped-call]
        return leaf


def _take(piece: ref[HeldPiece], at: int, leaf: Tensor) -> None:
    """Move a leaf's gradient into the sum of its piece, which holds the leaf."""
    gradient, leaf.grad, held = leaf.grad, None, piece()
    if held is not None and gradient is not None:
        held.add(at, gradient)


class _Streamed:
    """The exchange of keys and values in host memory: on the device for their turns alone, and so is their gradient."""

    def __init__(self, piece: HeldPiece, at: int, opening: Open, place: Tensor) -> None:
        self._piece, self._at, self._opening, self._place = piece, at, opening, place

    def turns(self) -> Iterator[Keys]:
        self._exchange = self._opening(self._piece.read(self._at))
        yield from self._exchange.turns()

    def add(self, gradient: Tensor) -> None:
        self._exchange.add(gradient)

    def total(self) -> Tensor:
        self._piece.add(self._at, self._exchange.total())
        del self._exchange
        return self._place


class SequenceHistory:
    """State of one layer for the slices of one micro-batch: their pieces, and numbers that are summed over them."""

    def __init__(self) -> None:
        self.pieces: dict[int, HeldPiece] = {}
        self.numbers: dict[int, Tensor] = {}


class PieceRoot(NamedTuple):
    """A place in a slice's graph at which its backward starts, with the gradient of the later slices.

    Attributes:
        edge: of a tensor of the slice's piece.
        piece, at: the piece, and the tensor's position in it.
    """

    edge: GradientEdge
    piece: HeldPiece
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
        return tuple([() if piece is None else piece.leaves for piece in self.held])

    @property
    def held(self) -> tuple[HeldPiece | None, ...]:
        """The pieces of the slices before this one, wherever their tensors are; None for a slice of which nothing is kept."""
        return tuple([self._history.pieces.get(at) for at in range(self.place.index)])

    def keep(self, *piece: Tensor) -> None:
        """Keep tensors of this slice for the later ones, until the backward of this slice. Once per forward.

        They must not be changed in place afterwards.
        """
        if self._roots is not None:  # a recomputed layer runs again
            return
        held = self._history.pieces.setdefault(self.place.index, HeldPiece(piece))
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
        piece = self._history.pieces.pop(self.place.index, None)
        if piece is not None:
            piece.free()
