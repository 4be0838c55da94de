"""First weights: drawn by seed and layer name alone, the same in every layout; the caller's random state stays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules


class Mixed(nn.Module):
    """Draws from torch's, Python's and NumPy's global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor([random.random(), float(np.random.rand())]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.sum()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.copy_(torch.rand(2))


def layers(meta: bool = False) -> list[Any]:
    if not meta:
        return [Layer(f"l{i}", Mixed) for i in range(4)]
    with torch.device("meta"):
        return [Mixed() for _ in range(4)]


def weights(pipeline: Any) -> dict[str, list[float]]:
    return {name: p.detach().flatten().tolist() for name, p in pipeline.named_parameters()}


def test_layers_differ_and_layouts_agree() -> None:
    for meta in (False, True):
        torch.manual_seed(11)
        found = [
            weights(LocalPipeline(layers(meta), schedule, loss=mse))
            for schedule in (S.gpipe(1, 2), S.one_f_one_b(4, 4), S.interleaved(2, 4, 2), S.dualpipe(2, 4))
        ]
        assert all(each == found[0] for each in found)
        values = [tuple(found[0][name]) for name in found[0]]
        assert len(set(values)) == len(values)  # of one class, under one seed: no two layers start alike
        torch.manual_seed(12)
        other = weights(LocalPipeline(layers(meta), S.gpipe(1, 2), loss=mse))
        assert all(other[name] != found[0][name] for name in other)
        chosen = [
            weights(LocalPipeline(layers(meta), S.gpipe(1, 2), loss=mse, options=RuntimeOptions(seed=seed)))
            for seed in (11, 3)
        ]
        assert chosen[0] == found[0]
        assert chosen[1] != found[0]


def test_the_callers_random_state_is_restored() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    want = torch.rand(3).tolist(), random.random(), float(np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    LocalPipeline(layers(), S.gpipe(2, 2), loss=mse)
    assert (torch.rand(3).tolist(), random.random(), float(np.random.rand())) == want

    def fails() -> nn.Module:
        torch.rand(7)
        raise ZeroDivisionError

    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError):
        LocalPipeline([Layer("a", fails)], S.gpipe(1, 1), loss=mse)
    assert torch.rand(3).tolist() == want[0]


def across(rank: int, same: bool) -> list[Any]:
    """Every rank seeds as people do: all alike, or with its rank."""
    torch.manual_seed(11 if same else 11 + rank)
    mesh = Mesh.of(MeshShape(pp=2, dp=2))
    assert mesh is not None
    pipeline = Pipeline(layers(), S.one_f_one_b(2, 2), loss=mse, mesh=mesh, options=RuntimeOptions(monitor=False))
    before, seed = weights(pipeline), torch.initial_seed()
    pipeline.step(*batch(4, seed=mesh.place.dp))
    pipeline.close()
    return [before, seed]


@pytest.mark.parametrize("same", [True, False])
def test_every_natural_seed_is_right(same: bool) -> None:
    torch.manual_seed(11)
    want = weights(LocalPipeline(layers(), S.gpipe(1, 1), loss=mse))
    for rank, (found, seed) in enumerate(run_ranks(across, 4, same)):
        assert found == {name: want[name] for name in found}
        assert seed == (11 if same else 11 + rank)


def disagree(rank: int) -> str:
    try:
        Pipeline(layers(), S.gpipe(2, 2), loss=mse, options=RuntimeOptions(seed=rank, monitor=False))
    except DistributedError as error:
        return str(error)
    return ""


def test_ranks_with_different_seeds_are_told() -> None:
    assert all("seed: 0 on rank 0, 1 on rank 1" in text for text in run_ranks(disagree, 2))
