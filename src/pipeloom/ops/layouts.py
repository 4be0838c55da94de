"""Tensors that are not one strided block of memory: sparse and nested ones."""

from __future__ import annotations

import torch
from torch import Tensor


def is_strided(value: Tensor) -> bool:
    """Return whether a tensor is a view of one block of memory."""
    return value.layout is torch.strided and not value.is_nested


def layout_name(value: Tensor) -> str:
    """Return the tensor's layout in a word, such as "strided", "nested" or "sparse_coo"."""
    return "nested" if value.is_nested else str(value.layout).removeprefix("torch.")


def strided_parts(value: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold the values of `value`: itself, or those inside a sparse or nested one.

    Empty for a layout that shows none (MKL-DNN).
    """
    if value.is_nested:
        return list(value.unbind())
    if value.layout is torch.strided:
        return [value]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []
