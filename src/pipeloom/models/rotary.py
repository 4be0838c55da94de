"""Rotary position embedding (RoFormer, arXiv 2104.09864), with Hugging Face's pairing: i turns with i + width / 2."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def rotary_table(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position t times theta^(-2 i / width): each [length, width / 2]; computed in fp32."""
    with torch.inference_mode(False):
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, theta: float) -> Tensor:
    """`x` [..., length, width] with the pair (i, i + width / 2) at position t turned by t theta^(-2 i / width)."""
    cos, sin = rotary_table(x.shape[-2], x.shape[-1], theta, x.dtype, x.device)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
