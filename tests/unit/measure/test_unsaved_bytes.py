"""Bytes of layers, for forwards that save nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeloom.measure.layer_bytes import measured_layer

ROWS, WIDTH = 8, 16


class Doubles(nn.Module):
    """Makes a table in its first forward, and computes from three tensors of the size of its input."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.ones(1000) if self.table is None else self.table
        sine, cosine = x.sin(), x.cos()
        return sine * cosine


def test_a_layer_holds_what_it_computes_from() -> None:
    measured, _ = measured_layer(Doubles(), (torch.ones(ROWS, WIDTH, requires_grad=True),), {}, split=True)
    assert measured.unsaved == 3 * 4 * ROWS * WIDTH
