"""Megatron-Core's own pipeline schedules on gloo: their order of actions is that of our families, and their losses are ours."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from other_systems import FOLDER
from paths import ROOT
from pipeloom import schedules
from pipeloom.runtime import Pipeline
from processes import run_ranks

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module, under a name that Megatron-Core's package does not have."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("megatron_benchmark", BENCHMARKS / "megatron.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.require_megatron()
    if dist.is_initialized():  # the world that a test of written jobs has made in this process
        import_module("megatron.core.parallel_state").destroy_model_parallel()
        dist.destroy_process_group()
    return module


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_order_of_actions(ranks: int, chunks: int, megatron: ModuleType) -> None:
    shapes = megatron.shapes_of(ranks, chunks)
    assert len(shapes) == 4
    theirs = run_ranks(megatron.megatrons_actions, ranks, chunks, shapes)
    for at, shape in enumerate(shapes):
        assert [rows[at] for rows in theirs] == megatron.our_actions(ranks, chunks, *shape), shape


def losses_of_both(rank: int, megatron: ModuleType, chunks: int) -> tuple[Any, Any]:
    """(loss and gradients of a step of ours, the same of Megatron-Core's) on this rank; the same layers and batch."""

    def layers() -> list[nn.Module]:
        torch.manual_seed(3)
        return [megatron.Block(8, 2) for _ in range(2 * chunks)]

    m = 4
    x, y = torch.randn(m * 3, 5, 8), torch.randn(m * 3, 5, 8)
    schedule = schedules.build("1f1b" if chunks == 1 else "interleaved", 2, m, chunks if chunks > 1 else None)
    made = layers()
    pipeline = Pipeline([lambda at=at: made[at] for at in range(2 * chunks)], schedule, loss=megatron.mse)
    ours = pipeline.step(x, y)
    own = [parameter.grad.numpy() for at in range(rank, 2 * chunks, 2) for parameter in made[at].parameters()]
    pipeline.close()
    others = layers()
    losses = megatron.MegatronStep(others, chunks, m, megatron.mse)(x, y)
    theirs = [parameter.grad.numpy() for at in range(rank, 2 * chunks, 2) for parameter in others[at].parameters()]
    dist.barrier()
    loss = sum(each.item() for each in losses) if losses else None
    return (float(ours), own), (loss, theirs)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_step_is_the_same_work(chunks: int, megatron: ModuleType) -> None:
    for rank, ((loss, gradients), (their_loss, their_gradients)) in enumerate(
        run_ranks(losses_of_both, 2, megatron, chunks)
    ):
        assert their_loss == (pytest.approx(loss) if rank == 1 else None)
        for ours, theirs in zip(gradients, their_gradients, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-7)


def test_without_megatron_core_a_line_says_how_to_get_it(megatron: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert megatron.FOLDER == FOLDER
    monkeypatch.setattr(megatron, "FOLDER", ROOT / "nowhere")
    with pytest.raises(SystemExit, match="run `make interop`"):
        megatron.require_megatron()
