"""First weights, drawn by global parameter name: the same bits whichever rank draws them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of `parts`: equal in every process, on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def draw(module: nn.Module, layer: str, seed: int, deviations: Mapping[str, float], same: Mapping[str, str]) -> None:
    """Fills the parameters of `module`, which is called `layer`.

    Matrices are normal with the standard deviation that `deviations` gives for the last part of their owner's name
    (`o_proj`), else 0.02; vectors (norms) are 1. Drawn on the CPU in fp32, then converted.

    Args:
        same: global name -> the name under which it is drawn, for weights that start as copies of another.
    """
    for inner, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        name = f"{layer}.{inner}"
        deviation = deviations.get(name.split(".")[-2], 0.02)
        parameter.copy_(_normal(parameter.shape, stable_seed(seed, same.get(name, name))) * deviation)


def _normal(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
