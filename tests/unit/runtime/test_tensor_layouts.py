"""Sparse, nested and meta tensors among what layers hold: compared with their values, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import pipeloom as pl
from models import WIDTH, batch, mse
from one_process import Plain, built, differences
from pipeloom.checkpoint import save
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions


def matrix(seed: int = 0) -> Tensor:
    values = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.where(values > 0.5, values, 0.0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about layouts that may change


class Neighbours(Plain):
    """Sums over the neighbours in a graph, whose adjacency matrix is a sparse buffer that no forward changes."""

    def __init__(self, layout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("buffer", layout(matrix()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + torch.mm(self.buffer, x.flatten(0, -2).t()).t().view_as(x))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_sparse_buffers(name: str, layout: str, recompute: Any) -> None:
    layers = [lambda: Neighbours(LAYOUTS[layout])] * 4
    assert differences(layers, pl.schedules.build(name, 2, 4), recompute) == []


class SparseWeight(Plain):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix().to_sparse(), requires_grad=trains)


@pytest.mark.parametrize("trains", [False, True])
def test_sparse_parameters_are_refused_by_name(trains: bool) -> None:
    layers = built([Plain, lambda: SparseWeight(trains)])
    with pytest.raises(ConfigError, match=r"1.weight is a sparse_coo parameter, .* or register it as a buffer"):
        LocalPipeline(layers, pl.schedules.build("1f1b", 2, 2), loss=mse)


class Wrapper(Tensor):
    """A tensor without memory of its own around another one, like the quantized weights of a frozen base."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = tree_map(lambda value: value.inner if isinstance(value, cls) else value, (args, kwargs or {}))
        result = func(*given, **named)
        return cls(result) if func is torch.ops.aten.detach.default else result


class OnWrapper(Plain):
    """An adapter beside a frozen weight."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.weight = nn.Parameter(Wrapper(self.base.weight.detach()), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_frozen_weight_may_be_a_wrapper_of_other_tensors(name: str, recompute: Any) -> None:
    schedule = pl.schedules.build(name, 2, 4)
    want = one_process_of_adapters(built([OnWrapper] * 4), schedule.microbatches)
    modules = built([OnWrapper] * 4)
    layers = [Layer(f"layer{at}", lambda module=module: module) for at, module in enumerate(modules)]
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(recompute=recompute))
    loss = pipeline.step(*batch(4)).item()
    got = [p.grad for module in modules for p in module.parameters() if p.requires_grad]
    assert abs(loss - want[0]) < 1e-6
    for a, b in zip(want[1], got, strict=True):
        torch.testing.assert_close(b, a)


def one_process_of_adapters(modules: list[nn.Module], microbatches: int) -> tuple[float, list[Any]]:
    total = 0.0
    for x, y in zip(*(part.chunk(microbatches) for part in batch(4)), strict=True):
        loss = mse(nn.Sequential(*modules)(x), y) / microbatches
        loss.backward()
        total += loss.item()
    return total, [p.grad for module in modules for p in module.parameters() if p.requires_grad]


def test_a_wrapper_that_trains_is_refused_by_name() -> None:
    layers = built([Plain, lambda: OnWrapper(trains=True)])
    with pytest.raises(ConfigError, match=r"1.base.weight is a Wrapper parameter"):
        LocalPipeline(layers, pl.schedules.build("1f1b", 2, 2), loss=mse)


def test_a_checkpoint_cannot_hold_a_wrapper(tmp_path: Path) -> None:
    pipeline = Pipeline(built([OnWrapper]), pl.schedules.build("1f1b", 1, 2), loss=mse)
    with pytest.raises(UsageError, match=r"0.base.weight: a checkpoint cannot hold a Wrapper tensor"):
        save(tmp_path, 1, pipeline)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_checkpoint_says_which_buffer_it_cannot_hold(layout: str, tmp_path: Path) -> None:
    pipeline = Pipeline(built([lambda: Neighbours(LAYOUTS[layout])]), pl.schedules.build("1f1b", 1, 2), loss=mse)
    pipeline.step(*batch(2))
    with pytest.raises(UsageError, match=f"0.buffer: a checkpoint cannot hold a sparse_{layout} tensor; register"):
        save(tmp_path, 1, pipeline)
