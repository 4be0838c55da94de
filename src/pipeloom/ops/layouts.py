"""Tensors that are not one strided block of memory: sparse and nested ones, and subclasses that wrap other tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def is_strided(value: Tensor) -> bool:
    """Return whether a tensor is a view of one block of memory."""
    return value.layout is torch.strided and not value.is_nested


def memory_of(value: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for one that has none of its own, as wrappers such as quantized weights."""
    if not is_strided(value) or value.is_meta:
        return None
    try:
        return value.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def layout_name(value: Tensor) -> str:
    """Return in a word what a tensor is: its layout, such as "strided", "nested" or "sparse_coo", or the class of a wrapper."""
    if is_strided(value) and not value.is_meta and memory_of(value) is None:
        return type(value).__name__
    return "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
