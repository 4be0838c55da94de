"""Tensors that an optimizer steps: the parameters, or masters: views, fp32 copies or slices of a bucket's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.parallel.buckets import BucketSlot, FlatParameters
from pipeloom.parallel.data import GradientSync

Counts = Callable[[str], bool]  # whether this process counts a parameter in norms and checkpoints


@dataclass(frozen=True)
class Setting:
    """Optimizer settings of a parameter; parameters with equal settings may share a master.

    Attributes:
        rule: the optimizer: "adamw", "sgd" or "muon".
        decay: weight decay.
        alone: the name of a parameter that needs its own master; "" where it may share one.
    """

    rule: str
    decay: float
    alone: str = ""


Settings = Callable[[str], Setting]  # of a parameter, by its global name


@dataclass(frozen=True)
class MasterPiece:
    """Elements of one parameter inside a master.

    Attributes:
        name: the parameter's global name.
        shape: shape of the part of the parameter that this process holds.
        start, stop: range of elements of that part, counted row by row.
        master: the tensor that an optimizer steps.
        at: index of the first of these elements in the flattened master.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    master: nn.Parameter
    at: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor that has the master's shape, flat; a view where the tensor is contiguous."""
        return tensor.reshape(-1)[self.at : self.at + self.stop - self.start]


Replaced = dict[
    nn.Parameter, list[tuple[nn.Parameter, slice]]
]  # master -> those that took its place, and its elements in them


class Parameters:
    """Masters that are the parameters themselves; the methods are those of Buckets, most of which have nothing to do here.

    Attributes:
        pieces: the elements of trained parameters that this process steps, each exactly once.
        settings: each master, and the settings of the parameters in it.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], settings: Settings) -> None:
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._trained = [p for _, p in trained]
        self.pieces = [MasterPiece(name, p.shape, 0, p.numel(), p, 0) for name, p in trained]
        self.settings: dict[nn.Parameter, Setting] = {p: settings(name) for name, p in trained}

    def arrange(self) -> Replaced:
        return {}

    def separate(self, steps: Mapping[str, float]) -> Replaced:
        return {}

    def publish(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def read(self) -> None:
        pass

    def hold(self) -> Callable[[], None]:
        held = [(p, p.grad) for p in self._trained]

        def put_back() -> None:
            for parameter, gradient in held:
                parameter.grad = gradient

        return put_back

    def changing(self) -> list[Tensor]:
        return [p.detach() for p in self._trained]


class Buckets:
    """Masters of parameters that are stored in one buffer per bucket: views of the buffer, fp32 copies of bf16 buffers, or
    slices of either.

    Attributes:
        settings: each master, and the settings of the parameters in it.
    """

    def __init__(self, sync: GradientSync, settings: Settings) -> None:
        self._sync = sync
        sync.changed.append(self.read)
        sync.fills_grad = False  # the masters take the fp32 sums from the buckets
        self._flats = [FlatParameters(bucket, sync.sharded) for bucket in sync.buckets]
        self._masters = [(flat, run, master) for flat in self._flats for run, master in flat.masters()]
        self._setting_of = settings
        self.settings: dict[nn.Parameter, Setting] = {}
        self._part(lambda slot: settings(slot.held.name))

    @property
    def pieces(self) -> list[MasterPiece]:
        """Return the elements of trained parameters that this process steps, each exactly once."""
        pieces = []
        for flat, run, master in self._masters:
            for slot, first, last in _inside(flat, run):
                begin, end = first - slot.start, last - slot.start
                pieces.append(
                    MasterPiece(slot.held.name, slot.held.parameter.shape, begin, end, master, first - run.start)
                )
        return pieces

    def arrange(self) -> Replaced:
        """Put the reduced gradients into the masters' `.grad`; return the masters that were replaced.

        The gradient of a parameter that no micro-batch used is None, so that the optimizer skips it. Where its master holds
        other parameters too, one master per parameter replaces it.
        """
        self.wait()  # slices still in transit would overwrite what the step changes
        replaced: Replaced = {}
        if self._sync.absent:
            replaced = self._part(lambda slot: slot.held.parameter in self._sync.absent)
        for flat, run, master in self._masters:
            absent = self._sync.absent and any(
                slot.held.parameter in self._sync.absent for slot, *_ in _inside(flat, run)
            )
            master.grad = None if absent else flat.gradient(run)
        return replaced

    def separate(self, steps: Mapping[str, float]) -> Replaced:
        """Replace each master whose parameters have made different numbers of steps by one master per parameter.

        Args:
            steps: name -> number of steps, of every trained parameter on this process.
        """
        return self._part(lambda slot: steps[slot.held.name])

    def _part(self, trait: Callable[[BucketSlot], object]) -> Replaced:
        """Replace each master whose parameters differ in `trait` by one master per parameter."""
        replaced: Replaced = {}
        masters, self._masters = self._masters, []
        for flat, run, master in masters:
            inside = _inside(flat, run)
            if len({trait(slot) for slot, *_ in inside}) < 2:
                self._masters.append((flat, run, master))
                continue
            replaced[master] = []
            for _, first, last in inside:
                elements = slice(first - run.start, last - run.start)
                part = nn.Parameter(master.detach()[elements])  # the same memory
                self._masters.append((flat, slice(first, last), part))
                replaced[master].append((part, elements))
        if replaced or not self.settings:
            self.settings = {
                master: self._setting_of(slot.held.name)
                for flat, run, master in self._masters
                for slot, *_ in _inside(flat, run)[:1]
            }
        return replaced

    def publish(self) -> None:
        """Copy the masters' values to the parameters. With sharded gradients, the other ranks' slices arrive later: call
        `wait` before you read parameters."""
        for flat, run, master in self._masters:
            flat.publish(run, master)
        self._sync.weights.start(self._flats)

    def wait(self) -> None:
        """Wait for the slices that other ranks have published."""
        self._sync.weights.wait()

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters' values to the masters."""
        self.wait()
        for flat, run, master in self._masters:
            if master.dtype != flat.flat.dtype:
                master.copy_(flat.flat[run])

    def hold(self) -> Callable[[], None]:
        """Keep this step's gradients while the next step computes its own; return a function that restores them."""
        # the next step writes to the same buffers, so the gradients are copied
        copies = [bucket.part.clone() for bucket in self._sync.buckets]
        absent = set(self._sync.absent)

        def put_back() -> None:
            for bucket, copy in zip(self._sync.buckets, copies, strict=True):
                bucket.part.copy_(copy)
            self._sync.put_back(absent)

        return put_back

    def changing(self) -> list[Tensor]:
        """Return every tensor that `publish` or a step of the masters writes to."""
        self.wait()
        narrow = [master.detach() for flat, _, master in self._masters if master.dtype != flat.flat.dtype]
        return [*(flat.flat for flat in self._flats), *narrow]


def _inside(flat: FlatParameters, run: slice) -> list[tuple[BucketSlot, int, int]]:
    """Return (slot, start, stop) of each parameter with elements in `run`; start and stop are positions in the buffer."""
    overlaps = [(slot, max(slot.start, run.start), min(slot.stop, run.stop)) for slot in flat.bucket.slots]
    return [(slot, first, last) for slot, first, last in overlaps if first < last]
