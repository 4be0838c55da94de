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
    "strided": lambda dense: dense,
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
    "bsc": lambda dense: dense.to_sparse_bsc((1, 1)),
    "nested": lambda dense: torch.nested.nested_tensor(list(dense)),
    "jagged": lambda dense: torch.nested.nested_tensor(list(dense), layout=torch.jagged),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.01, 0, torch.qint8),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about layouts that may change


class Neighbours(Plain):
    """Sums over the neighbours in a graph; the adjacency matrix is a buffer, an attribute, or shared by all layers."""

    def __init__(self, layout: Callable[[Tensor], Tensor], shared: Tensor | None, changes: bool = False) -> None:
        super().__init__()
        if shared is None:
            self.register_buffer("buffer", layout(matrix()))
        self.adjacency = [layout(matrix(1)) if shared is None else shared]
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            with torch.no_grad():
                self.buffer.mul_(1.1)
        total = self.linear(x)
        for adjacency in (*self.buffers(), *self.adjacency):
            total = total + torch.mm(adjacency.clone(), x.flatten(0, -2).t()).t().view_as(x)
        return torch.tanh(total)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_sparse_tensors_that_no_forward_changes(name: str, layout: str, shared: bool, recompute: Any) -> None:
    convert = LAYOUTS[layout]
    adjacency = convert(matrix()) if shared else None
    layers = [lambda: Neighbours(convert, adjacency)] * 4
    assert differences(layers, pl.schedules.build(name, 2, 4), recompute) == []


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_sparse_buffer_that_forwards_change_is_state_like_another(recompute: Any) -> None:
    layers = [lambda: Neighbours(LAYOUTS["coo"], None, changes=True)] * 4
    assert differences(layers, pl.schedules.build("zbv", 2, 4), recompute) == []


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc", "nested", "jagged"])
@pytest.mark.parametrize("what", ["the input", "the targets", "keyword 'edges'"])
def test_batches_that_cannot_be_cut_are_refused(layout: str, what: str) -> None:
    """Every one that has a row for each sample; one that all micro-batches share may be sparse."""

    class Reads(Plain):
        def forward(self, x: Tensor, edges: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    pipeline = LocalPipeline(built([Reads, Plain]), pl.schedules.build("1f1b", 2, 2), loss=mse)
    x, y = (matrix(seed)[:4] for seed in (0, 1))
    whole = LAYOUTS[layout](matrix()[:4])
    given = {"the input": (whole, y, None), "the targets": (x, whole, None), "keyword 'edges'": (x, y, whole)}[what]
    with pytest.raises(UsageError, match=rf"{what} holds a \w+ tensor with a row for each sample, which cannot be cut"):
        pipeline.step(*given[:2], edges=given[2])
    if not whole.is_nested:
        pipeline.step(x, y, edges=LAYOUTS[layout](matrix()[:5]))


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
    pipeline = Pipeline(built([lambda: Neighbours(LAYOUTS[layout], None)]), pl.schedules.build("1f1b", 1, 2), loss=mse)
    pipeline.step(*batch(2))
    with pytest.raises(UsageError, match=f"0.buffer: a checkpoint cannot hold a sparse_{layout} tensor; register"):
        save(tmp_path, 1, pipeline)
