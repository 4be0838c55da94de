"""Bytes of stages: sums over their layers, of operations or measured."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.offload import offload_kept
from pipeloom.schedule.transforms import half_split, recompute
from pipeloom.shapes.ops import LayerOps, Op
from pipeloom.shapes.stage_bytes import LayerBytes, stage_bytes


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


def test_a_backward_frees_layer_by_layer() -> None:
    """Operations: the first keeps a and b, the second b and c; gradients 10 and 20, 5 of scratch in the first."""
    first = Op("first", (("a", 100.0), ("b", 40.0)), gradients=10, scratch=5)
    layer = LayerOps("t", (first, Op("second", (("b", 40.0), ("c", 7.0)), gradients=20)), residual=3, input=8)
    head = LayerOps("L", (Op("loss", (("logits", 50.0),), gradients=1, scratch=30),), 0.0)
    heavy = replace(layer, residual=200.0)
    for layers, most in ([layer, head], 31), ([layer, layer], 23), ([heavy, head], 220 - 50):  # the loss's are free
        sizes = stage_bytes(build("gpipe", 1, 1), [[LayerBytes.of_ops(each) for each in layers]])
        assert sizes["backward"] == (most,)


def test_what_waits_for_w_is_no_temporary_of_an_i_that_leaves_it() -> None:
    """Blocks of two layers: 20 again, 6 beside, and 15 of the other layer's W, where 30 wait in the end."""
    layer = LayerBytes(20.0, 1.0, 1.0, True, pending=15.0, backward=4.0, split=6.0, again=True)
    sizes = stage_bytes(recompute(half_split(build("1f1b", 1, 1))), [[layer, layer]])
    assert sizes["input_grad"] == (11.0,)
    timeline = simulate(recompute(half_split(build("1f1b", 1, 1))), Costs(bytes=sizes))
    assert timeline.peak_bytes["device"] == (sizes["pending"][0] + 11.0,)


def test_gradients_of_keys_and_values_are_summed_on_the_device_in_their_dtype() -> None:
    whole = build("seq1f1b", 2, 4, None, {"slices": 4})
    groups = [[LayerBytes(0.0, state=60.0), LayerBytes(0.0, state=40.0)]] * 2
    assert stage_bytes(whole, groups)["slice_grads"] == (100.0, 100.0)
    assert stage_bytes(whole, groups, 2.0)["slice_grads"] == (200.0, 200.0)
    assert stage_bytes(offload_kept(recompute(whole, True)), groups)["slice_grads"] == (0.0, 0.0)
    assert stage_bytes(build("1f1b", 2, 4), groups)["slice_grads"] == (0.0, 0.0)


def test_a_recomputed_layer_holds_what_is_between_its_communications() -> None:
    """Rows that arrived and that came back, and the hidden states beside them; without communications the input alone."""
    experts = Op("experts", (("received", 30.0), ("inner", 100.0), ("expert_outputs", 20.0)))
    layer = LayerOps("t", (Op("norm", (("input", 8.0),)), experts), residual=0.0, input=8.0)
    schedule = recompute(build("1f1b", 2, 2))
    for waits, kept in (True, 30.0 + 20.0 + 8.0), (False, 0.0):
        each = LayerBytes.of_ops(replace(layer, waits=waits), again=True)
        sizes = stage_bytes(schedule, [[each], [each]])
        assert sizes["kept"] == (kept, 8.0 + kept)
        assert sizes["layer"] == (150.0 - kept,) * 2
