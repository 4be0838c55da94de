"""Values between processes: what arrives is what was sent, and none of it is a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import DistributedError, UsageError
from pipeloom.parallel.exchange import all_gather_json, all_gather_tree, broadcast_json, gather_tree
from processes import run_ranks

pytestmark = pytest.mark.core

CPU = torch.device("cpu")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def tree(rank: int) -> Any:
    tensors = tuple(torch.arange(4 + rank).to(dtype) for dtype in DTYPES)
    return {
        "tensors": tensors,
        "shapes": [torch.ones(()), torch.ones(0, 3), torch.arange(6.0).view(2, 3).T],
        "plain": (rank, 0.1 + rank, "text ☃", None, True),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def exchanged(rank: int) -> list[bool]:
    world = dist.group.WORLD
    pair = dist.new_group([1, 2])  # numbers in a group are not those in the run
    values = [["x" * 1000 * rank, 1 / 3, float("inf")] for rank in range(3)]
    right = [
        all_gather_json(values[rank], world) == values,
        broadcast_json(values[rank] if rank == 2 else "ignored", world, 2) == values[2],
        same(all_gather_tree(tree(rank), world, CPU), [tree(r) for r in range(3)]),
    ]
    for group, members in ((world, (0, 1, 2)), (pair, (1, 2))):
        if rank in members:
            gathered = gather_tree(tree(rank), group, 2)
            right.append(same(gathered, [tree(r) for r in members]) if rank == 2 else gathered is None)
    return right


def test_values_arrive_as_they_were() -> None:
    assert [all(right) for right in run_ranks(exchanged, 3)] == [True] * 3


def test_a_value_that_is_no_data_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a object cannot be sent|an? object cannot be sent"):
        all_gather_tree((1, [object()]), None, CPU)
    with pytest.raises(UsageError, match="dict cannot be sent"):
        all_gather_tree({1: 2}, None, CPU)


def test_bytes_that_are_not_json_are_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(parts: list[torch.Tensor], given: torch.Tensor, group: Any) -> None:
        parts[0].copy_(given if given.dtype == torch.int64 else torch.tensor([128, 4, 46], dtype=torch.uint8))

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather", damaged)
    with pytest.raises(DistributedError, match="3 bytes that are not JSON"):
        all_gather_json(123, None)
