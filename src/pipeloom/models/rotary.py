"""Rotary position embedding (RoFormer, arXiv 2104.09864), with Hugging Face's pairing: i turns with i + width / 2."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotary_table(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position t times theta^(-2 i / width): each [length, width / 2]; computed in fp32."""
    # the beginning of a table of the next power of two: batches of many lengths share few tables
    cos, sin = _table(1 << max(length - 1, 0).bit_length(), width, theta, dtype, device)
    return cos[:length], sin[:length]


@lru_cache(maxsize=16)
def _table(length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_rows(position_ids: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `rotary_table`, for the given positions [batch, length]: each [batch, 1, length, width / 2]."""
    device = position_ids.device
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = position_ids[:, None, :, None].to(torch.float32) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [..., length, width] with the pair (i, i + width / 2) turned by the angles whose cosines and sines are given."""
    cos, sin = table
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
