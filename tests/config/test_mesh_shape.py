"""The mesh as arithmetic: goldens by hand, and that groups partition the world at any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.config import MeshShape, complete
from pipeloom.errors import ConfigError, UsageError


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
    assert tuple(shape.place(13)) == (1, 2, 1, 0, 1)


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
    return st.builds(lambda pp, edp, ep, tp: MeshShape(pp, edp * ep, tp, ep), size, size, size, size)


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
    assert shape.rank_at(place.pp, place.dp, place.tp) == rank
    assert place.dp == place.edp * shape.ep + place.ep
    for axis in ("pp", "dp", "tp", "ep", "edp"):
        assert shape.group_of(rank, axis)[getattr(place, axis)] == rank


def test_one_axis_may_be_what_is_left() -> None:
    assert complete(16, pp=4, dp=-1, tp=2) == MeshShape(4, 2, 2)
    assert complete(16, pp=-1, dp=2, tp=2, ep=2) == MeshShape(4, 2, 2, 2)
    assert complete(1, pp=1, dp=1, tp=-1) == MeshShape()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((16, -1, -1, 2, 1), "parallel.pp and parallel.dp are both -1"),
        ((16, 3, -1, 2, 1), "pp 3 · tp 2 = 6 does not divide 16 ranks; the nearest values of pp: 2, 4"),
        ((16, 4, 3, 2, 1), "pp 4 · dp 3 · tp 2 needs 24 ranks, and there are 16; the nearest value of dp: 2"),
        ((12, 4, 2, 2, 1), "needs 16 ranks, and there are 12; the nearest value of pp: 3"),
        ((8, 1, 8, 1, 3), "parallel.ep 3 does not divide parallel.dp 8; the nearest values of ep: 2, 4"),
        ((8, 0, 8, 1, 1), "parallel.pp must be at least 1, not 0"),
    ],
)
def test_impossible_sizes_name_the_nearest(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        complete(*arguments)
    assert words in str(refusal.value)


def test_outside_the_mesh() -> None:
    with pytest.raises(UsageError, match="rank 4 is not in a mesh of 4"):
        MeshShape(dp=4).place(4)
    with pytest.raises(UsageError, match="no mesh axis 'cp'"):
        MeshShape(dp=4).groups("cp")
    with pytest.raises(UsageError, match="index 2 is outside axis tp of size 1"):
        MeshShape(dp=4).rank_at(tp=2)
