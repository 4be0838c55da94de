"""The mesh as arithmetic: goldens by hand, and that groups partition the world at any size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import ArgumentError, UsageError
from pipeloom.shapes.mesh import ORDER, MeshShape


def test_16_ranks_tp_2_pp_4() -> None:
    shape = MeshShape(pp=4, dp=2, tp=2)
    assert shape.groups("tp") == tuple((at, at + 1) for at in range(0, 16, 2))
    assert shape.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert shape.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert shape.groups("dp_tp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert shape.groups("ep") == tuple((at,) for at in range(16))
    assert shape.groups("edp") == shape.groups("dp")


def test_experts_sit_next_to_each_other_inside_dp() -> None:
    shape = MeshShape(pp=2, dp=4, tp=2, ep=2)
    assert shape.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert shape.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert shape.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert tuple(shape.place(13)) == (1, 2, 1, 0, 1, 0, 3)


def test_another_order_of_the_axes() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2, order="pp, DP tp-ep")
    assert shape == MeshShape(pp=2, dp=2, tp=2, order="pp-dp-tp-ep")
    assert shape != MeshShape(pp=2, dp=2, tp=2)
    assert shape.groups("pp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.groups("tp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.place(3)[:3] == (1, 1, 0)


def test_replicas_of_an_expert_next_to_each_other() -> None:
    """The index along dp follows the ranks in every order, so that part i of a batch goes to the i-th rank of the group."""
    shape = MeshShape(dp=4, tp=2, ep=2, order="dp-tp-ep-pp")
    assert shape.groups("edp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("ep") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups("dp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert [shape.place(rank).dp for rank in (0, 1, 4, 5)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("order", "near"),
    [
        ("tp-cp-ep-dp-pp", "tp-ep-dp-pp"),
        ("dp pp tpx", "dp-pp-tp-ep"),
        ("pp-pp-dp-tp", "pp-dp-tp-ep"),
        ("", "tp-ep-dp-pp"),
    ],
)
def test_an_order_that_is_none_names_the_nearest(order: str, near: str) -> None:
    with pytest.raises(ArgumentError, match=f"once each; nearest: {near}$"):
        MeshShape(order=order)


def test_ten_thousand_ranks() -> None:
    shape = MeshShape(pp=10, dp=125, tp=8, ep=25)
    assert shape.world == 10_000
    assert shape.groups("tp")[1249] == tuple(range(9992, 10_000))
    assert shape.groups("pp")[7] == tuple(range(7, 10_000, 1000))
    assert shape.groups("ep")[0] == tuple(range(0, 200, 8))
    assert shape.groups("edp")[0] == (0, 200, 400, 600, 800)
    assert shape.group_of(9999, "dp") == tuple(range(9007, 10_000, 8))
    assert len(shape.groups("dp")) == 80


def shapes() -> st.SearchStrategy[MeshShape]:
    size = st.integers(1, 6)
    orders = st.permutations(ORDER.split("-")).map("-".join)
    return st.builds(
        lambda pp, edp, ep, tp, order: MeshShape(pp, edp * ep, tp, ep, order=order), size, size, size, size, orders
    )


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(["pp", "dp", "tp", "ep", "edp", "dp_tp", "pp_tp", "pp_dp_tp"]))
def test_groups_partition_the_world(shape: MeshShape, axes: str) -> None:
    groups = shape.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world))
    assert all(group == tuple(sorted(group)) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    moving = {"dp": {"dp", "ep", "edp"}, "ep": {"ep", "dp"}, "edp": {"edp", "dp"}}
    free = {name for axis in axes.split("_") for name in moving.get(axis, {axis})}
    for group in groups:
        for axis in {"pp", "dp", "tp", "ep", "edp"} - free:
            assert len({getattr(shape.place(rank), axis) for rank in group}) == 1
        assert all(shape.group_of(rank, axes) == group for rank in group)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.data())
def test_places_and_ranks_are_inverse(shape: MeshShape, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, shape.world - 1))
    place = shape.place(rank)
    indices = [place.edp if axis == "dp" else getattr(place, axis) for axis in shape.order.split("-")]
    sizes = [shape.edp if axis == "dp" else getattr(shape, axis) for axis in shape.order.split("-")]
    assert sum(index * math.prod(sizes[:at]) for at, index in enumerate(indices)) == rank
    for axis in ("pp", "dp", "tp", "ep", "edp"):
        assert shape.group_of(rank, axis)[getattr(place, axis)] == rank


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 8, "ep": 3}, "ep=3 does not divide dp 8; nearest: 2 or 4"),
        ({"dp": 4, "ep": 4, "ep_nodes": 8}, "ep_nodes=8 does not divide ep 4; nearest: 4"),
        ({"pp": 0, "dp": 8}, "pp=0 is below 1; nearest: 1"),
    ],
)
def test_impossible_sizes_name_the_argument_and_the_nearest(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        MeshShape(**sizes)
    assert str(refusal.value) == words


def test_outside_the_mesh() -> None:
    with pytest.raises(UsageError, match="rank 4 is not in a mesh of 4"):
        MeshShape(dp=4).place(4)
    with pytest.raises(UsageError, match="no mesh axis 'cp'"):
        MeshShape(dp=4).groups("cp")
