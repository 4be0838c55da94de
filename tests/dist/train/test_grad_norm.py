"""`Pipeline.grad_norm` and `clip_grad_norm_`: those of one process, whatever the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.config import Layout, load_layout
from pipeloom.errors import UsageError
from pipeloom.measure.build import build_pipeline
from pipeloom.models import tied
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import shard_of
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.train.report.verify import make_batch, serial_step
from processes import run_ranks

CPU = torch.device("cpu")
BASE = {
    "model.num_key_value_heads": 4,
    "model.tie_word_embeddings": True,
    "schedule.name": "1f1b",
    "schedule.microbatches": 2,
    "parallel.pp": 1,
}
EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "parallel.dp": 2, "parallel.ep": 2}
CASES: dict[str, dict[str, Any]] = {
    "pp 2, tied": {"parallel.pp": 2},
    "dp 2": {"parallel.dp": 2},
    "zero1": {"parallel.dp": 2, "optimizer.zero1": True},
    "tp 2": {"parallel.tp": 2, "parallel.sp": True},
    "ep 2": EXPERTS,
    "two routes": {"parallel.pp": 2, "schedule.name": "dualpipe", "schedule.microbatches": 4},
    "pp 2, dp 2, zero1": {"parallel.pp": 2, "parallel.dp": 2, "optimizer.zero1": True},
    "pp 2, tp 2": {"parallel.pp": 2, "parallel.tp": 2},
}
COVERED = ("ep 2", "pp 2, tp 2")  # by those with more axes


def layout_of(case: str) -> Layout:
    return load_layout("tiny", {**BASE, **CASES[case]})


def measured(rank: int, case: str) -> tuple[float, float, float, float, list[tuple[str, Any, list[float]]]]:
    """The loss, the norm, the norm that clipping returns, the norm after it, and the gradients after it (unless sharded).

    A gradient has its layout and place beside it.
    """
    layout = layout_of(case)
    mesh = Mesh.of(layout.mesh)
    assert mesh is not None
    pipeline = build_pipeline(layout, CPU, mesh, torch.float32)
    batch = make_batch(layout).part(mesh.place.dp, layout.mesh.dp)
    loss = pipeline.step(batch.tokens, batch.targets).item()
    norm = pipeline.grad_norm()
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    returned = pipeline.clip_grad_norm_(float(norm) / 4).item()
    after = pipeline.grad_norm().item()
    place = mesh.place._asdict()
    held = [(n, p.grad.flatten().tolist()) for n, p in pipeline.named_parameters() if p.grad is not None]
    gradients = [(name, (pipeline.layouts[name], place), values) for name, values in held]
    pipeline.close()
    return loss, norm.item(), returned, after, gradients


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if case in COVERED else []) for case in CASES]
)
def test_norm_and_clipping_are_those_of_one_process(case: str) -> None:
    layout = layout_of(case)
    found = run_ranks(measured, layout.mesh.world, case)
    reference = serial_step(layout, CPU)
    serial = reference.gradients
    copies = {name for names in tied(layout.config.model) for name in names[1:]}
    parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in serial.items() if g is not None}
    for name, parameter in parameters.items():
        parameter.grad = serial[name]
    once = [parameter for name, parameter in parameters.items() if name not in copies]
    want = torch.nn.utils.get_total_norm([p.grad for p in once if p.grad is not None]).item()
    torch.nn.utils.clip_grad_norm_(once, want / 4)
    for name in copies:
        parameters[name].grad = next(parameters[names[0]].grad for names in tied(layout.config.model) if name in names)
    compared = 0
    for loss, norm, returned, after, gradients in found:
        assert loss == pytest.approx(reference.loss, rel=1e-5)
        assert norm == pytest.approx(want, rel=1e-5)
        assert returned == norm
        assert after == pytest.approx(want / 4, rel=1e-4)
        assert (norm, after) == (found[0][1], found[0][3])  # bitwise the same on every rank
        for name, where, values in gradients:
            gradient = parameters[name].grad
            assert gradient is not None
            torch.testing.assert_close(torch.tensor(values), shard_of(gradient, *where).flatten(), rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared or layout.config.optimizer.zero1


@pytest.mark.core
def test_local() -> None:
    layers = [
        Layer("a", lambda: nn.Linear(4, 4)),
        Layer("b", lambda: nn.Linear(4, 4)),
        Layer("c", lambda: nn.Linear(4, 4)),
    ]
    tie = [("a.weight", "c.weight")]
    pipeline = LocalPipeline(layers, pl.schedules.gpipe(3, 2), loss=nn.functional.mse_loss, tied=tie)
    assert pipeline.grad_norm().item() == 0
    pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    norm = pipeline.grad_norm()
    twins = [nn.Parameter(p.detach().clone()) for p in pipeline.parameters()]
    assert len(twins) == 5
    for twin, parameter in zip(twins, pipeline.parameters(), strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(twins, 0.01).item(), rel=1e-6)
    assert torch.equal(pipeline.clip_grad_norm_(0.01), norm)
    for twin, parameter in zip(twins, pipeline.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-6, atol=0)
    before = [None if p.grad is None else p.grad.clone() for p in pipeline.parameters()]
    pipeline.clip_grad_norm_(1e6)  # below the limit nothing changes
    for old, parameter in zip(before, pipeline.parameters(), strict=True):
        assert (old is None) == (parameter.grad is None)
        assert old is None or torch.equal(old, parameter.grad)  # type: ignore[arg-type]
    next(pipeline.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    assert pipeline.clip_grad_norm_(1.0).isinf()
    for wrong in (-1.0, math.nan, "x"):
        with pytest.raises(UsageError, match="max_norm is"):
            pipeline.clip_grad_norm_(wrong)  # type: ignore[arg-type]


@pytest.mark.core
def test_a_norm_of_float64_gradients_keeps_their_digits() -> None:
    for run in (LocalPipeline, Pipeline):
        layers = [Layer("a", lambda: nn.Linear(4, 4).double())]
        pipeline = run(layers, pl.schedules.gpipe(1, 2), loss=nn.functional.mse_loss)
        x = torch.ones(4, 4, dtype=torch.float64)
        pipeline.step(x, x * 0)
        want = torch.nn.utils.get_total_norm([p.grad for p in pipeline.parameters() if p.grad is not None])
        norm = pipeline.grad_norm()
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(want.item(), rel=1e-14)


def one(rank: int) -> tuple[float, float]:
    """bf16 with fp32 main gradients in one process, and a norm that is asked for too early."""
    layers = [Layer("a", lambda: nn.Linear(4, 4).bfloat16())]
    options = RuntimeOptions(main_gradients=True, monitor=False)
    pipeline = Pipeline(layers, pl.schedules.gpipe(1, 2), loss=nn.functional.mse_loss, options=options)
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    pipeline.step(x, x * 0)
    assert pipeline.sync is not None
    parts = [pipeline.sync.gradient(name) for name, _ in pipeline.named_parameters()]
    want = torch.nn.utils.get_total_norm([part for part in parts if part is not None]).item()
    norm = pipeline.clip_grad_norm_(want / 2).item()
    assert pipeline.grad_norm().item() == pytest.approx(want / 2, rel=1e-4)
    pipeline.zero_grad()
    assert pipeline.grad_norm().item() == 0
    with pipeline.no_sync():
        pipeline.step(x, x * 0)
    with pytest.raises(UsageError, match="no_sync"):
        pipeline.grad_norm()
    return norm, want


@pytest.mark.core
def test_main_gradients() -> None:
    ((norm, want),) = run_ranks(one, 1)
    assert norm == pytest.approx(want, rel=1e-6)
    assert want > 0
