"""Sums through shared memory: right, the same bits everywhere, and not at all where memory cannot be shared."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import DistributedError
from pipeloom.parallel import shared_memory_sum
from pipeloom.parallel.buckets import BucketParameter, make_buckets
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.shared_memory_sum import SharedBuffers, SharedMemoryAllReduce
from pipeloom.parallel.zero import StageExchange
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

SIZES, DTYPES = [300_001, 5, 12], [torch.float32, torch.float64, torch.float32]


def values(rank: int, at: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + 10 * at + rank)
    return torch.randn(SIZES[at], generator=generator, dtype=DTYPES[at])


def in_order(at: int, turn: int, ranks: int) -> Tensor:
    total = values(0, at, turn)
    for rank in range(1, ranks):
        total = total + values(rank, at, turn)
    return total


def dp_axis(ranks: int) -> Axis:
    mesh = Mesh.of(MeshShape(dp=ranks))
    assert mesh is not None
    return mesh.dp


def three(rank: int) -> None:
    axis = dp_axis(3)
    shared = SharedBuffers.connect(axis, SIZES, DTYPES)
    assert shared is not None
    for turn in range(20):
        if turn % 3 == rank:
            time.sleep(0.005)  # everyone is late now and then
        for at in (1, 0, 2):
            shared.own[at].copy_(values(rank, at, turn))
            shared.start(at)
        for at in (0, 2, 1):
            shared.wait(at, 300)
            assert torch.equal(shared.own[at], in_order(at, turn, 3)), (turn, at)
    shared.sharded = True
    shared.own[2].copy_(values(rank, 2, 0))
    shared.start(2)
    shared.wait(2, 300)
    mine = slice(4 * rank, 4 * rank + 4)
    assert torch.equal(shared.own[2][mine], in_order(2, 0, 3)[mine])
    late(rank, shared)
    elsewhere(rank, axis)


def late(rank: int, shared: SharedBuffers) -> None:
    """A rank that does not come is named."""
    if rank != 2:
        shared.start(0)
        with pytest.raises(
            DistributedError, match=r"timed out after 0.2 s waiting for rank 2 in a sum through shared memory"
        ):
            shared.wait(0, 0.2)
    dist.barrier()


def elsewhere(rank: int, axis: Axis) -> None:
    """One rank that cannot map the others' memory keeps all of them from sharing."""
    plain = shared_memory_sum.map_offered
    if rank == 1:
        shared_memory_sum.map_offered = lambda offer: None  # type: ignore[assignment]
    assert SharedBuffers.connect(axis, [4], [torch.float32]) is None
    shared_memory_sum.map_offered = plain
    assert SharedBuffers.connect(axis, [4], [torch.float32]) is not None


def many(rank: int) -> None:
    """More buffers than one page has flags for: the flags of the last ones lie outside the tensors."""
    count = 700
    shared = SharedBuffers.connect(dp_axis(2), [8] * count, [torch.float32] * count)
    assert shared is not None
    for at in range(count):
        shared.own[at].fill_(at + rank)
    for at in range(count):
        shared.start(at)
    for at in range(count):
        shared.wait(at, 300)
        assert shared.own[at].eq(2 * at + 1).all(), at


def test_many_buffers() -> None:
    run_ranks(many, 2)


def test_three_ranks() -> None:
    run_ranks(three, 3)


def test_memory_of_another_process_is_known_by_its_token() -> None:
    process, descriptor, size, token = shared_memory_sum.offer_memory(3 * 4096)
    found = shared_memory_sum.map_offered((process, descriptor, size, token))
    assert found is not None
    assert found[:16] == bytes.fromhex(token)
    assert shared_memory_sum.map_offered((process, descriptor, size, "00" * 16)) is None
    assert shared_memory_sum.map_offered((process, 98765, size, token)) is None
    assert shared_memory_sum.map_offered(None) is None


def sums_of_tensors(rank: int) -> list[bool]:
    """Sizes and types in turn, again and again; a second sum of a size that is under way says so."""
    axis = Axis((0, 1), rank, dist.group.WORLD)
    sums = SharedMemoryAllReduce.over(axis, 2, 300.0)
    assert sums is not None
    right = []
    for turn in range(20):
        for shape, dtype in (((3, 5), torch.float32), ((7,), torch.float64), ((70_001,), torch.float32)):
            x = torch.full(shape, float(turn + rank), dtype=dtype)
            under_way = sums.start(x)
            assert under_way is not None
            assert sums.start(x.clone()) is None
            total = under_way.wait()
            right.append(total is x and bool((x == 2 * turn + 1).all()))
    return right


def test_tensors_of_several_sizes() -> None:
    for right in run_ranks(sums_of_tensors, 2):
        assert len(right) == 60
        assert all(right)


def exchanges(rank: int, counts: tuple[int, ...]) -> None:
    """Gathers and reductions of two buckets in turn, in memory and by collectives: equal, and shares that change afterwards."""
    torch.manual_seed(rank)
    mesh = Mesh.of(MeshShape(dp=3))
    assert mesh is not None
    held = [BucketParameter(f"p{at}", nn.Parameter(torch.randn(n)), (at,)) for at, n in enumerate(counts)]
    buckets = make_buckets(held, mesh, 2**20)
    in_memory, by_collectives = (StageExchange(mesh.dp, buckets, buckets, shared, 300) for shared in (True, False))
    values = [torch.randn(bucket.size // 3) for bucket in buckets]
    shares = [in_memory.share(bucket, value) for bucket, value in zip(buckets, values, strict=True)]
    for turn in range(6):
        if turn % 3 == rank:
            time.sleep(0.005)  # everyone is late now and then
        for bucket, share in zip(buckets, shares, strict=True):
            flat, expected = torch.empty(2, bucket.size)
            in_memory.gather(bucket, share, flat)
            before = share.clone()
            share += 1  # all have read it
            by_collectives.gather(bucket, before, expected)
            assert torch.equal(flat, expected)
            full = torch.randn(bucket.size)
            total = in_memory.reduce_scatter(bucket, full)
            assert torch.equal(total, by_collectives.reduce_scatter(bucket, full))


def test_shares_and_gradients_of_three_replicas() -> None:
    run_ranks(exchanges, 3, (70_001, 300))
