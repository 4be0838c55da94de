"""Random numbers as a function of where they are used: no state to save, replay or fork.

A dropout mask depends on the seed, the step, the sample's number in the whole batch and the layer's global name only. So
recomputation draws the same mask again, the order in which a schedule runs micro-batches does not matter, a resumed run goes on
exactly, and every layout drops the elements that one process drops, for any number of micro-batches and replicas: a rank
that holds a part of the tokens takes its part of the same mask.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.layer import MicrobatchContext, SharesTokens


def stable_seed(*parts: object) -> int:
    """Return a 63-bit seed from the text of `parts`: equal in every process, on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class RandomSource:
    """Source of a layer's random numbers: the run's seed, and the layer's global name."""

    seed: int
    name: str

    def generators(self, microbatch: MicrobatchContext, device: torch.device) -> Iterator[torch.Generator]:
        """Yield this layer's generator, seeded for each sample of the micro-batch; finish with one sample before taking the next.

        It is one generator, reseeded. CPU and CUDA generators draw different numbers.
        """
        generator = torch.Generator(device)
        for sample in range(microbatch.first, microbatch.first + microbatch.samples):
            yield generator.manual_seed(stable_seed("random", self.seed, microbatch.step, sample, self.name))


class OfMicrobatch:
    """A module whose forward uses the micro-batch's context: it draws random numbers, or has losses.

    Attributes:
        source: of the random numbers; set by the code that builds the layer.
    """

    source: RandomSource | None = None

    @property
    def has_losses(self) -> bool:
        """Return whether it has losses, which count by the micro-batch's share."""
        return False


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers drawn inside with `seed`; afterwards the caller's generators continue as if nothing had been drawn.

    Covers torch's generators of the CPU and of CUDA devices in use, Python's `random` and NumPy's global one if it is imported.
    """
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    generators = [torch.default_generator, *devices]
    states, others = [generator.get_state() for generator in generators], random_states()
    try:
        for generator in generators:
            generator.manual_seed(seed)
        seed_random(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        set_random_states(others)


def random_states() -> tuple[Any, Any]:
    """Return the states of Python's generator and of NumPy's global one (None: NumPy is not imported)."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def set_random_states(states: tuple[Any, Any]) -> None:
    """Set both generators to what `random_states` returned."""
    python, numpy = states
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(numpy)


def seed_random(seed: int) -> None:
    """Seed both generators."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


@dataclass(frozen=True)
class TokenPart:
    """A rank's part of the tokens of a sequence.

    Attributes:
        index, count: part `index` of `count` equal ones.
    """

    index: int = 0
    count: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of this part of the tokens, which are the last dimension but one of `whole`."""
        return whole.chunk(self.count, -2)[self.index]


class Dropout(OfMicrobatch, SharesTokens, nn.Module):
    """Sets each element to 0 with the given probability and scales the others by 1 / (1 - probability), in training.

    Args:
        part: the part of the tokens in the input (of those of a slice, where sequences are cut, and of those of this rank, where
            ranks share them); the mask of all tokens is drawn, and this part of it used.

    Attributes:
        source: set by the code that builds the layer, such as a `Pipeline`.
    """

    def __init__(self, probability: float, part: TokenPart | None = None) -> None:
        super().__init__()
        self.probability = probability
        self.part = part or TokenPart()

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None) -> Tensor:
        """x [samples, ..., tokens, width] -> the same shape; the same number of rows for each sample of the micro-batch.

        Raises UsageError in training without `source` or `microbatch`, and for a shape that does not fit the samples.
        """
        if not self.training or self.probability == 0:
            return x
        if self.source is None or microbatch is None or x.shape[0] % microbatch.samples:
            raise UsageError(
                f"Dropout of {list(x.shape)} needs `source`, and `microbatch` with samples that divide the rows, in training"
            )
        ranks = 1 if self.context is None else self.context.axis.size
        tokens, place = x.shape[-2] * self.part.count * ranks, microbatch.place
        whole = (*x.shape[:-2], tokens if place is None else place.length, x.shape[-1])
        keep = torch.empty(whole, dtype=torch.bool, device=x.device)
        rows = keep.chunk(microbatch.samples) if x.shape[0] else ()
        for row, generator in zip(rows, self.source.generators(microbatch, x.device), strict=True):
            row.bernoulli_(1 - self.probability, generator=generator)
        if place is not None:
            keep = keep.narrow(-2, place.start, tokens)
        if self.context is not None:
            keep = self.context.own_tokens(keep, -2)
        if keep.shape != x.shape:
            keep = self.part.of(keep)
        if keep.numel() < math.prod(whole):
            keep = keep.clone()  # the rest need not stay for the backward
        return x * keep * (1 / (1 - self.probability))


def set_sources(module: nn.Module, seed: int, name: str) -> None:
    """Set the source of each part of `module` that draws random numbers and has none; `name` is the module's global name."""
    for path, part in module.named_modules():
        if isinstance(part, OfMicrobatch) and part.source is None:
            part.source = RandomSource(seed, f"{name}.{path}" if path else name)
