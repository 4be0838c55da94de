"""The mesh on processes: every axis's group holds the ranks of the arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import ConfigError, DistributedError
from pipeloom.parallel.mesh import Axis, Mesh, PipelineMesh, group_of_members
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

NAMES = ("tp", "ep", "edp", "dp", "everyone")


def sums(rank: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    # a whole world twice, and between them a mesh of some of the processes
    cases = [
        (MeshShape(dp=4, ep=2), None),
        (MeshShape(pp=2, tp=2), (2, 3, 6, 7)),
        (MeshShape(2, 2, 2), None),
        (MeshShape(dp=4, ep=2, tp=2, order="dp-tp-ep-pp"), None),
    ]
    for shape, ranks in cases:
        world = tuple(range(8)) if ranks is None and shape.world == 8 else ranks or tuple(range(4))
        mesh = Mesh.of(shape, world)
        if mesh is None:
            found.append({})
            continue
        lines = {name: getattr(mesh, name) for name in NAMES}
        lines["pp"] = Axis(mesh.pipeline.ranks, mesh.pipeline.rank, mesh.pipeline.group)
        result: dict[str, object] = {}
        for name, line in lines.items():
            assert line.ranks[line.index] == rank
            if line.group is None:
                assert line.size == 1
                continue
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=line.group)
            assert total.item() == sum(line.ranks)
            assert dist.get_process_group_ranks(line.group) == sorted(line.ranks)
            if ranks is None:
                assert dist.get_rank(line.group) == line.index
            result[name] = line.ranks
        assert mesh.device_mesh is not None
        assert mesh.device_mesh.mesh_dim_names == tuple(
            a for a, n in zip(("pp", "edp", "ep", "tp"), shape.sizes, strict=True) if n > 1
        )
        found.append(result)
    return found


def test_groups_reduce_over_the_ranks_of_the_arithmetic() -> None:
    results = run_ranks(sums, 8)
    for rank, (experts, some, whole, reordered) in enumerate(results):
        other = MeshShape(dp=4, ep=2, tp=2, order="dp-tp-ep-pp")
        assert reordered == {
            **{name: other.group_of(rank, name) for name in ("dp", "tp", "ep", "edp")},
            "everyone": tuple(range(8)),
        }
        shape = MeshShape(2, 2, 2)
        assert whole == {
            **{name: shape.group_of(rank, name) for name in ("pp", "dp", "tp", "edp")},
            "everyone": tuple(range(8)),
        }
        assert (some == {}) == (rank not in (2, 3, 6, 7))
        assert (experts == {}) == (rank > 3)
    assert results[2][1] == {"pp": (2, 6), "tp": (2, 3), "everyone": (2, 3, 6, 7)}
    assert results[1][0] == {"ep": (0, 1), "edp": (1, 3), "dp": (0, 1, 2, 3), "everyone": (0, 1, 2, 3)}


def totals_over_members(rank: int) -> list[float]:
    """The sums over groups of members in the order in which a pipeline of ranks 0 to 2 makes them; rank 3 makes none."""
    found = []
    for ranks in [(0, 1), (0, 1), (1, 2), (1, 2), (0, 1, 2)] if rank < 3 else []:
        group = group_of_members(ranks, group_desc=f"of {ranks}")
        if rank in ranks:
            total = torch.tensor(float(2**rank))
            dist.all_reduce(total, group=group)
            found.append(total.item())
    return found


def test_members_in_different_numbers_of_groups_make_one_together() -> None:
    """torch names a group after the number of those that a process is in: a middle rank would wait under another name."""
    assert run_ranks(totals_over_members, 4) == [[3, 3, 7], [3, 3, 6, 6, 7], [6, 6, 7], []]


def test_without_processes() -> None:
    mesh = Mesh.of(MeshShape())
    assert mesh is not None
    assert mesh.everyone.size == 1
    assert mesh.pipeline.group is None
    with pytest.raises(DistributedError, match=r"needs 2 processes, and there are 1: start with torchrun"):
        Mesh.of(MeshShape(dp=2))


def test_ranks_in_another_order_than_a_group_numbers_them_are_refused() -> None:
    """Gathered parts come in the group's order, so an axis that counts otherwise would put them together wrongly."""
    with pytest.raises(DistributedError, match=r"the mesh's ranks are \[1, 0\]; they must ascend"):
        PipelineMesh((1, 0), 0, None)
    with pytest.raises(DistributedError, match=r"ranks are \[0, 0\]; they must ascend"):
        Mesh.of(MeshShape(tp=2), (0, 0))
    with pytest.raises(DistributedError, match=r"ranks are \[2, 3, 1, 0\]; they must ascend.*MeshShape\(order=…\)"):
        Mesh.of(MeshShape(pp=2, tp=2), (2, 3, 1, 0))


def test_machines_of_expert_groups() -> None:
    """16 ranks, dp 8, tp 2: two ep groups of four ranks, each on two machines of two."""
    inside, across = MeshShape(dp=8, tp=2, ep=4, ep_nodes=2).node_groups()
    assert inside == ((0, 2), (4, 6), (1, 3), (5, 7), (8, 10), (12, 14), (9, 11), (13, 15))
    assert across == ((0, 4), (2, 6), (1, 5), (3, 7), (8, 12), (10, 14), (9, 13), (11, 15))
    with pytest.raises(ConfigError, match=r"^ep_nodes=3 does not divide ep 4; nearest: 2 or 4$"):
        MeshShape(dp=4, ep=4, ep_nodes=3)
