"""Tensors that an optimizer steps: the parameters, or masters: views, fp32 copies or slices of a bucket's parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.ops.checksum import version_of
from pipeloom.parallel.buckets import BucketSlot, FlatParameters
from pipeloom.parallel.data import GradientSync

Counts = Callable[[str], bool]  # whether this process counts a parameter in norms and checkpoints


@dataclass(frozen=True)
class Master:
    """A tensor that an optimizer steps: elements of one parameter.

    Attributes:
        name: the parameter's global name.
        shape: shape of the part of the parameter that this process holds.
        start, stop: range of elements of that part, counted row by row.
        tensor: these elements: the parameter itself, or flat.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    tensor: nn.Parameter

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the elements, flat."""
        return None if self.tensor.grad is None else self.tensor.grad.reshape(-1)


class Masters:
    """The masters of one process's trained parameters: each element that it steps belongs to exactly one.

    Without a GradientSync they are the parameters, and there is nothing to copy. With one they are views of the buffers that
    hold the parameters of a bucket, fp32 copies of bf16 buffers, or slices of either.

    Attributes:
        all: the masters.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], sync: GradientSync | None) -> None:
        self._sync = sync
        self._trained = [p for _, p in named if p.requires_grad]
        self._flats: list[FlatParameters] = []
        self._places: list[tuple[Master, FlatParameters, BucketSlot, slice]] = []
        self._taken: list[tuple[Tensor | None, int]] = []  # `.grad` of each master as taken, and its count of writes
        if sync is None:
            self.all = [Master(name, p.shape, 0, p.numel(), p) for name, p in named if p.requires_grad]
            return
        sync.changed.append(self.read)
        sync.fills_grad = False  # the masters take the fp32 sums from the buckets
        sync.stepped_by = self
        self._flats = sync.flat_parameters()
        for buffer in self._flats:
            buffer.read()
            for slot, section in buffer.stepped():
                held, values = slot.held, nn.Parameter(buffer.values(section).to(buffer.bucket.dtype))
                start, stop = section.start - slot.start, section.stop - slot.start
                master = Master(held.name, held.parameter.shape, start, stop, values)
                self._places.append((master, buffer, slot, section))
        self.all = [master for master, *_ in self._places]

    def take_gradients(self) -> None:
        """Put the gradients into the masters' `.grad`: None for a parameter that no micro-batch used."""
        self.wait()  # slices still in transit would overwrite what the step changes
        for master, buffer, slot, section in self._places:
            content = buffer.bucket.content
            # Before the sum another replica may have used what this one has not.
            absent = content == "reduced" and self._sync is not None and slot.held.parameter in self._sync.absent
            master.tensor.grad = None if absent or content == "empty" else buffer.gradient(section)
        self._taken = self._gradients()

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Before a step, put what the caller did to the masters' `.grad` into the buckets: None drops a gradient.

        Raises UsageError if some are changed that are not summed yet: other ranks hold parts of them.
        """
        if self._sync is not None and self._sync.unsummed:
            now = self._gradients()
            if now and all(gradient is None for gradient, _ in now):
                self._sync.zero_grad()
            elif any(
                new is not old or count != before for (new, count), (old, before) in zip(now, self._taken, strict=True)
            ):
                self._sync.require_summed()
            return
        present = {buffer.bucket for master, buffer, *_ in self._places if master.tensor.grad is not None}
        for master, buffer, slot, section in self._places:
            bucket, gradient = buffer.bucket, master.tensor.grad
            if bucket not in present:
                bucket.content, bucket.before = "empty", None
            elif gradient is None:
                buffer.gradient(section).zero_()
                self._sync.absent.add(slot.held.parameter)  # type: ignore[union-attr]
            else:
                buffer.gradient(section).copy_(gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters' values to the parameters. With sharded gradients, the other ranks' slices arrive later: call
        `wait` before you read parameters."""
        for values, copy in self._copies():
            values.copy_(copy)
        if self._sync is not None:
            self._sync.weights.start(self._flats)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters' values to the masters."""
        self.wait()
        for buffer in self._flats:
            buffer.read()
        for values, copy in self._copies():
            copy.copy_(values)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        gradients = [master.tensor.grad for master, *_ in self._places]
        return [(each, 0 if each is None else version_of(each)) for each in gradients]

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return the masters that are copies, each behind the elements of the buffer that it is a copy of."""
        places = [(buffer.values(section), master.tensor) for master, buffer, _, section in self._places]
        return [(values, master) for values, master in places if values.dtype != master.dtype]

    def wait(self) -> None:
        """Wait for the slices that other ranks have published."""
        if self._sync is not None:
            self._sync.weights.wait()

    def hold(self) -> Callable[[], None]:
        """Keep this step's gradients while the next step computes its own; return a function that restores them."""
        sync = self._sync
        if sync is None:
            held = [(p, p.grad) for p in self._trained]

            def put_back() -> None:
                for parameter, gradient in held:
                    parameter.grad = gradient

            return put_back
        # the next step writes to the same buffers, so the gradients are copied
        copies = [bucket.part.clone() for bucket in sync.buckets]
        absent = set(sync.absent)

        def copy_back() -> None:
            for bucket, copy in zip(sync.buckets, copies, strict=True):
                bucket.part.copy_(copy)
            sync.put_back(absent)

        return copy_back

    def changing(self) -> list[Tensor]:
        """Return every tensor that `publish` or a step of the masters writes to."""
        self.wait()
        if self._sync is None:
            return [p.detach() for p in self._trained]
        return [*(buffer.held for buffer in self._flats), *(copy.detach() for _, copy in self._copies())]
