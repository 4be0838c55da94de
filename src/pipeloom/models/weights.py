"""First weights, drawn by global parameter name: the same bits whichever rank draws them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of `parts`: equal in every process, on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of matrices: `usual`, and others by the last part of their owner's name (`o_proj`)."""

    usual: float
    special: Mapping[str, float]

    def of(self, name: str) -> float:
        """That of the parameter with this global name."""
        return self.special.get(name.split(".")[-2], self.usual)


@torch.no_grad()
def draw(module: nn.Module, layer: str, seed: int, deviations: Deviations, same: Mapping[str, str]) -> None:
    """Fills the parameters of `module`, which is called `layer`: matrices normal, vectors (norms) 1.

    Drawn on the CPU in fp32, then converted, so that dtype and device change the rounding only.

    Args:
        same: global name -> the name under which it is drawn, for weights that start as copies of another.
    """
    for inner, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        name = f"{layer}.{inner}"
        standard = _normal(parameter.shape, stable_seed(seed, same.get(name, name)))
        parameter.copy_(standard * deviations.of(name))


def _normal(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
