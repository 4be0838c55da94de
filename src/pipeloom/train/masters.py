"""What an optimizer steps: the parameters themselves, or masters: fp32 copies or slices of the parameters of each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.zero import FlatParameters

Counts = Callable[[str], bool]  # whether this process counts a parameter in norms and checkpoints


@dataclass(frozen=True)
class Piece:
    """Elements of one parameter inside a master.

    Attributes:
        name: the parameter's global name.
        shape: of what this process holds of it.
        start, stop: which of its elements, counted row by row.
        master: the tensor that an optimizer steps.
        at: where they begin in the master, flattened.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    master: nn.Parameter
    at: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor of the master's shape: a flat view where that is contiguous."""
        return tensor.reshape(-1)[self.at : self.at + self.stop - self.start]


class Masters(Protocol):
    """What is stepped, and how its gradients come and its values go."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The trained parameters' elements that are stepped here, each once."""

    @property
    def decayed(self) -> Sequence[nn.Parameter]:
        """The masters with weight decay."""

    @property
    def undecayed(self) -> Sequence[nn.Parameter]:
        """Those without."""

    def arrange(self) -> None:
        """Puts the reduced gradients into the masters' `.grad`."""

    def publish(self) -> None:
        """Makes the parameters, here and on the ranks that share them, what the masters are now."""

    def read(self) -> None:
        """Makes the masters what the parameters are now."""

    def hold(self) -> Callable[[], None]:
        """Keeps the step's gradients beyond the next step; the result brings them back."""

    def changing(self) -> list[Tensor]:
        """Every tensor that `publish` or a step of the masters writes to."""


class Parameters:
    """The parameters are stepped as they are."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._parameters = [p for _, p in trained]
        self.pieces = [Piece(name, p.shape, 0, p.numel(), p, 0) for name, p in trained]
        self.decayed = [p for p in self._parameters if p.ndim >= 2]
        self.undecayed = [p for p in self._parameters if p.ndim < 2]

    def arrange(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def read(self) -> None:
        pass

    def hold(self) -> Callable[[], None]:
        held = [(p, p.grad) for p in self._parameters]

        def put_back() -> None:
            for parameter, gradient in held:
                parameter.grad = gradient

        return put_back

    def changing(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters]


class Buckets:
    """A bucket's parameters stand in one buffer; its masters are views of it, fp32 copies for bf16, or slices of either."""

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._flats = [FlatParameters(bucket, sync.sharded) for bucket in sync.buckets]
        self._masters: list[tuple[FlatParameters, slice, nn.Parameter]] = []
        self.decayed: list[nn.Parameter] = []
        self.undecayed: list[nn.Parameter] = []
        self.pieces: list[Piece] = []
        for flat in self._flats:
            for decays, run, master in flat.masters():
                (self.decayed if decays else self.undecayed).append(master)
                self._masters.append((flat, run, master))
                for slot in flat.bucket.slots:
                    first, last = max(slot.start, run.start), min(slot.stop, run.stop)
                    if first < last:
                        begin, end = first - slot.start, last - slot.start
                        shape = slot.held.parameter.shape
                        self.pieces.append(Piece(slot.held.name, shape, begin, end, master, first - run.start))

    def arrange(self) -> None:
        for flat, run, master in self._masters:
            master.grad = flat.gradient(run)

    def publish(self) -> None:
        for flat, run, master in self._masters:
            flat.publish(run, master)
        for pending in [flat.share() for flat in self._flats]:
            if pending is not None:
                pending.wait()

    @torch.no_grad()
    def read(self) -> None:
        for flat, run, master in self._masters:
            if master.dtype != flat.flat.dtype:
                master.copy_(flat.flat[run])

    def hold(self) -> Callable[[], None]:
        # the next step writes to the same buffers, so this takes a copy
        copies = [bucket.part.clone() for bucket in self._sync.buckets]

        def put_back() -> None:
            for bucket, copy in zip(self._sync.buckets, copies, strict=True):
                bucket.part.copy_(copy)
            self._sync.put_back()

        return put_back

    def changing(self) -> list[Tensor]:
        narrow = [master.detach() for flat, _, master in self._masters if master.dtype != flat.flat.dtype]
        return [*(flat.flat for flat in self._flats), *narrow]
