"""Layouts: parts and joins are inverse, and mistakes are refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.parallel.sharding import ParameterSharding, Shard, join, shard_of, shardings_of

EXPERTS = ParameterSharding((Shard("ep", 0, (2, 2)), Shard("tp", 1, (1, 1, 3))))


def test_parts_join_to_the_whole() -> None:
    full = torch.arange(4 * 5 * 2.0).view(4, 5, 2)
    parts: dict[tuple[int, ...], Tensor] = {}
    for ep, tp in itertools.product(range(2), range(3)):
        parts[ep, tp] = shard_of(full, EXPERTS, {"ep": ep, "tp": tp, "pp": 7})
    assert parts[1, 2].tolist() == full[2:, 2:].tolist()
    assert torch.equal(join(parts, EXPERTS), full)
    assert EXPERTS.full_shape(parts[0, 0].shape) == full.shape


def test_a_parameter_without_shards_is_whole() -> None:
    full = torch.ones(3)
    assert shard_of(full, ParameterSharding(), {}) is full
    assert join({(): full}, ParameterSharding(partial=True)) is full


def test_a_missing_part_is_named() -> None:
    sharding = ParameterSharding((Shard("tp", 0, (1, 1)),))
    with pytest.raises(UsageError, match=r"parts \[1\] along tp are missing"):
        join({(0,): torch.ones(1)}, sharding)
    with pytest.raises(UsageError, match="dimension 0 is 3"):
        shard_of(torch.ones(3), sharding, {"tp": 0})


def test_contradictions_are_refused() -> None:
    with pytest.raises(UsageError, match="cut twice along the same axis"):
        ParameterSharding((Shard("tp", 0, (1, 1)), Shard("tp", 1, (1, 1))))
    with pytest.raises(UsageError, match="partial over tp"):
        ParameterSharding((Shard("tp", 0, (1, 1)),), partial=True)


class Half(nn.Module):
    def __init__(self, sharding: Mapping[str, ParameterSharding]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.bias = nn.Parameter(torch.zeros(2))
        self._laid = sharding

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return self._laid


def test_the_layout_of_a_module_goes_by_name() -> None:
    column = ParameterSharding((Shard("tp", 0, (4, 4)),))
    block = nn.Sequential(
        nn.Linear(2, 2), Half({"weight": column}), nn.Sequential(Half({"bias": ParameterSharding(partial=True)}))
    )
    layouts = shardings_of(block)
    assert list(layouts) == [name for name, _ in block.named_parameters()]
    assert {name for name, sharding in layouts.items() if sharding != ParameterSharding()} == {"1.weight", "2.0.bias"}
    assert layouts["1.weight"] == column
    assert shardings_of(Half({"weight": column}))["weight"] == column


def test_a_layout_that_does_not_fit_its_module() -> None:
    with pytest.raises(UsageError, match=r"Half.sharding\(\) names 'wieght'"):
        shardings_of(nn.Sequential(Half({"wieght": ParameterSharding()})))
    with pytest.raises(UsageError, match="has 4 in dimension 0"):
        shardings_of(Half({"weight": ParameterSharding((Shard("tp", 0, (3, 5)),))}))
