"""Bytes of layers and of stages, for forwards that save nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeloom.runtime.layer_bytes import LayerBytes, measured_layer, stage_bytes
from pipeloom.schedule import Schedule

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


def test_a_stage_holds_the_input_of_a_layer_beside() -> None:
    schedule = Schedule.of([["0F0", "0R0", "0B0"]], placement=[0], microbatches=1)
    layers = LayerBytes(saved=1, unsaved=9, output=4), LayerBytes(saved=1, unsaved=7, output=1, input=4)
    assert stage_bytes(schedule, [layers])["forward"] == (11,)


def test_equal_parts_are_whole_layers() -> None:
    """The first half of three layers is two. The loss is not recomputed, nor is what the second returns held for the third."""
    block = LayerBytes(saved=100, input=5, output=5, saves_input=True, again=True, parts={"norms": 40})
    head = LayerBytes(saved=70, input=5, saves_input=True, again=True, loss=20)
    programs = [["0F0", "0R0:1/2", "0B0"], ["1F0", "1R0:norms", "1R0:2/2", "1B0"]]
    sizes = stage_bytes(Schedule.of(programs, placement=[0, 1], microbatches=1), [[block, block], [block, block, head]])
    assert sizes["saved"] == (205, 280)
    assert sizes["saved:1/2"] == (100 + 5, 200 + 5)
    assert sizes["saved:2/2"] == (100, 50)
    assert sizes["saved:norms"] == (80, 80)
    assert sizes["saved:2/2+norms"] == (100 + 40, 50 + 80)


def test_a_block_that_makes_less_than_has_gone_holds_nothing_more() -> None:
    """The output layer, which is not recomputed, saves 100; they are gone when the block makes its 10 again."""
    schedule = Schedule.of([["0F0", "(0R0;0B0)"]], placement=[0], microbatches=1)
    layers = LayerBytes(saved=10, input=1, again=True), LayerBytes(saved=100, input=1)
    assert stage_bytes(schedule, [layers])["layer"] == (0,)
