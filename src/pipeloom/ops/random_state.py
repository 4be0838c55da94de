"""Random numbers as a function of where they are used: no state to save, replay or fork.

A dropout mask depends on the seed, the step, the micro-batch and the layer's global name only. So recomputation draws the
same mask again, the order in which a schedule runs micro-batches does not matter, a resumed run goes on exactly, and every
layout drops what one process drops: a rank that holds a part of the tokens takes its part of the same mask.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.microbatch import MicrobatchContext


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of `parts`: equal in every process, on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Source:
    """Where a layer's random numbers come from: the run's seed, and the layer's global name."""

    seed: int
    name: str

    def generator(self, microbatch: MicrobatchContext, device: torch.device) -> torch.Generator:
        """A fresh generator for this layer and micro-batch. CPU and CUDA draw different numbers from it."""
        seed = stable_seed("random", self.seed, microbatch.step, microbatch.index, self.name)
        return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class TokenPart:
    """Which part of the tokens [..., tokens, width] a rank holds: part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1


class Dropout(nn.Module):
    """Sets each element to 0 with the given probability and scales the others by 1 / (1 - probability), in training.

    Args:
        part: of the tokens that come in; the mask of all is drawn, and this part of it used.

    Attributes:
        source: whoever builds the layer sets it.
    """

    def __init__(self, probability: float, part: TokenPart | None = None) -> None:
        super().__init__()
        self.probability = probability
        self.part = part or TokenPart()
        self.source: Source | None = None

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None) -> Tensor:
        """x [..., tokens, width] -> the same shape. Raises UsageError in training where it cannot tell what to draw."""
        if not self.training or self.probability == 0:
            return x
        if self.source is None or microbatch is None:
            raise UsageError("dropout must know its place: set `source`, and give the keyword argument `microbatch`")
        tokens = x.shape[-2]
        whole = (*x.shape[:-2], tokens * self.part.count, x.shape[-1])
        keep = torch.empty(whole, dtype=torch.bool, device=x.device)
        keep.bernoulli_(1 - self.probability, generator=self.source.generator(microbatch, x.device))
        if self.part.count > 1:
            keep = keep.narrow(-2, self.part.index * tokens, tokens).clone()  # the rest need not stay for the backward
        return x * keep * (1 / (1 - self.probability))


@runtime_checkable
class Drawing(Protocol):
    """A layer that draws: whoever builds it sets its source."""

    source: Source | None


def set_sources(module: nn.Module, seed: int, name: str) -> None:
    """Tells each layer inside `module` that draws, `name` being the module's global name, where its numbers come from."""
    for path, part in module.named_modules():
        if isinstance(part, Drawing):
            part.source = Source(seed, f"{name}.{path}" if path else name)
