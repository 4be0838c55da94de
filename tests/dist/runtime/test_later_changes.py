"""What a pipeline was not built with: parameters that come later, weights that a forward changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, mse
from pipeloom.errors import ConfigError, UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules


def replace_weight(block: Block) -> None:
    block.linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def add_weight(block: Block) -> None:
    block.extra = nn.Parameter(torch.zeros(WIDTH))


def add_layer(block: Block) -> None:
    block.linear.adapter = nn.Linear(WIDTH, 2)


def parametrize(block: Block) -> None:
    parametrizations.weight_norm(block.linear)


@pytest.mark.parametrize("change", [replace_weight, add_weight, add_layer, parametrize])
def test_other_parameters_than_those_of_the_start_are_refused(change: Callable[[Block], None]) -> None:
    pipeline = LocalPipeline(blocks(2), S.zb_h1(2, 2), loss=mse)
    change(pipeline.modules["block1"])  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"parameter 'block1\..*' was added, replaced, .* since the pipeline was built"
    ):
        pipeline.step(*batch(4))


def test_what_trains_or_has_another_dtype_only_later_is_refused_where_gradients_are_summed() -> None:
    def built() -> Pipeline:
        frozen = Layer("frozen", lambda: Block(3).requires_grad_(False))
        options = RuntimeOptions(main_gradients=True)
        return Pipeline([*blocks(1), frozen], S.one_f_one_b(1, 2), loss=mse, options=options)

    pipeline = built()
    pipeline.step(*batch(4))
    pipeline.modules["block0"].requires_grad_(False)  # what trained may stop
    pipeline.modules["block0"].requires_grad_(True)
    pipeline.step(*batch(4))
    pipeline.modules["frozen"].linear.bias.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"'frozen\.linear\.bias' was .* or unfrozen since"):
        pipeline.step(*batch(4))
    pipeline = built()
    pipeline.modules["block0"].double()
    with pytest.raises(UsageError, match=r"'block0\.linear\.weight' was added, replaced, removed, converted"):
        pipeline.step(*batch(4))


def test_one_process_may_freeze_and_unfreeze_inside_a_stage() -> None:
    pipeline = LocalPipeline(blocks(2), S.zb_h1(2, 2), loss=mse)
    weight = pipeline.modules["block1"].linear.weight  # type: ignore[union-attr]
    for trains in (True, False, True):
        weight.requires_grad_(trains)  # type: ignore[operator]
        pipeline.zero_grad()
        pipeline.step(*batch(4))
        assert (weight.grad is not None) == trains


# -- replicas ----------------------------------------------------------------------------------------------------------


class Renorming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x)


def renorming(rank: int) -> str:
    mesh, options = Mesh.of(MeshShape(pp=1, dp=2)), RuntimeOptions(monitor=False)
    try:
        Pipeline([Layer("layer", Renorming)], S.one_f_one_b(1, 2), loss=mse, mesh=mesh, options=options)
    except ConfigError as error:
        return str(error)
    return ""


def test_replicas_that_would_use_other_rows_are_refused() -> None:
    assert all("'layer.words.weight' has max_norm=1" in words for words in run_ranks(renorming, 2))


# -- state -------------------------------------------------------------------------------------------------------------


class Masked(Block):
    def __init__(self) -> None:
        super().__init__(1)
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)


def test_load_state_dict_copies_all_or_nothing() -> None:
    pipeline = LocalPipeline([*blocks(1), Layer("masked", Masked)], S.one_f_one_b(2, 2), loss=mse)
    state = {name: value.clone() + 1 for name, value in pipeline.state_dict().items()}
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    last = "masked.norm.bias"
    wrong: list[tuple[Any, str]] = [
        (torch.zeros(1), r"'masked\.norm\.bias' is float32\[1\], and the pipeline's float32\[6\]"),
        (torch.zeros(WIDTH, dtype=torch.complex64), r"is complex64\[6\]"),
    ]
    for value, words in wrong:
        with pytest.raises(UsageError, match=words):
            pipeline.load_state_dict({**state, last: value})
        assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
    with pytest.raises(UsageError, match=r"holds no 'masked\.norm\.bias'"):
        pipeline.load_state_dict({name: value for name, value in state.items() if name != last})
    assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
    del state["masked.mask"]  # as a module's own state_dict
    pipeline.load_state_dict(state)
    assert torch.equal(pipeline.state_dict()[last], state[last])


def test_lazy_modules_are_refused() -> None:
    for layer in (nn.LazyLinear(WIDTH), Layer("0", lambda: nn.LazyLinear(WIDTH))):
        with pytest.raises(ConfigError, match=r"layer '0' has a lazy module: 'weight' has no shape yet"):
            LocalPipeline([layer, *blocks(1)], S.one_f_one_b(2, 2), loss=mse)
