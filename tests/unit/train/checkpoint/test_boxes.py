"""Boxes: runs of elements as boxes, intersections, and what makes up a tensor."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.parallel.sharding import ParameterSharding, Shard, shard_of
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.checkpoint.boxes import Box, boxes_of_run, tiling_problem
from pipeloom.train.checkpoint.state import Holder, pieces_of

shapes = st.lists(st.integers(1, 4), max_size=4)


@settings(max_examples=100, deadline=None)
@given(shapes, st.data())
def test_a_run_is_boxes_in_the_order_of_its_elements(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(boxes_of_run(shape, start, stop))
    around = Box((0,) * len(shape), tuple(shape))
    elements = [int(e) for box in boxes for e in whole[box.slices_in(around)].reshape(-1)]
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    rest = [*boxes_of_run(shape, 0, start), *boxes, *boxes_of_run(shape, stop, whole.numel())]
    assert tiling_problem(shape, rest) == ""


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.data())
def test_an_intersection_holds_what_both_hold(ndim: int, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    a, b = (Box(data.draw(sizes), data.draw(sizes)) for _ in range(2))
    marks = torch.zeros((8,) * ndim, dtype=torch.int64)
    around = Box((0,) * ndim, (8,) * ndim)
    for box in (a, b):
        marks[box.slices_in(around)] += 1
    common = a.intersection(b)
    assert common == b.intersection(a)
    assert (0 if common is None else common.elements) == int((marks == 2).sum())
    if common is not None:
        assert bool((marks[common.slices_in(around)] == 2).all())


def test_parts_that_do_not_make_up_a_tensor_are_described() -> None:
    whole = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert tiling_problem((4, 3), whole) == ""
    assert tiling_problem((4, 3), whole[:1]) == "its parts hold 6 elements of 12"
    assert "overlap" in tiling_problem((4, 3), [whole[0], Box((1, 0), (2, 3))])
    assert "overlap" in tiling_problem((4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))])
    assert "outside" in tiling_problem((4, 3), [whole[0], Box((3, 0), (2, 3))])
    assert "dimensions" in tiling_problem((4, 3), [Box((0,), (12,))])
    assert tiling_problem((), [Box((), ())]) == ""


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 1), st.data())
def test_runs_of_a_part_with_fused_projections_are_where_the_whole_has_them(
    rows: int, units: list[int], dim: int, data: st.DataObject
) -> None:
    """A slice of the elements that a rank holds of a cut weight, as an optimizer with ZeRO-1 has it."""
    fused = tuple(2 * unit for unit in units)
    sharding = ParameterSharding((Shard("tp", dim, (sum(units),) * 2, fused),))
    shape = (sum(fused), rows) if dim == 0 else (rows, sum(fused))
    whole = torch.arange(rows * sum(fused)).view(shape)
    index = data.draw(st.integers(0, 1))
    part = shard_of(whole, sharding, {"tp": index})
    held = Holder("w", part, shape, pieces_of(sharding, MeshShape(tp=2).place(index), tuple(part.shape)), True)
    assert torch.equal(held.read(lambda box: whole[box.slices_in(Box((0, 0), shape))]), part)
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    flat, seen = part.reshape(-1)[start:stop], 0
    for box, view in held.parts(flat, start):
        assert torch.equal(view, whole[box.slices_in(Box((0, 0), shape))])
        seen += box.elements
    assert seen == stop - start
    assert torch.equal(held.read(lambda box: whole[box.slices_in(Box((0, 0), shape))], start, stop), flat)
