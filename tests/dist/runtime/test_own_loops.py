"""Training loops of one's own over bf16 parameters: `.grad` is filled in bf16 from the fp32 sums, and is what counts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom import checkpoint
from pipeloom.config.settings import load
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

pytestmark = pytest.mark.core

RATE, STEPS = 0.05, 3


def layers() -> list[Layer]:
    """Two layers in bf16 around one in fp32."""

    class Widened(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).bfloat16()

    def make(seed: int, kind: type[nn.Linear], dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(seed)
        return kind(WIDTH, WIDTH).to(dtype)

    kinds = [(nn.Linear, torch.bfloat16), (Widened, torch.float32), (nn.Linear, torch.bfloat16)]
    return [Layer(f"l{at}", lambda at=at, kind=kind: make(at, *kind)) for at, kind in enumerate(kinds)]


def replica_batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    x, y = batch(4, seed=10 * step + replica)
    return x.bfloat16(), y.bfloat16()


def trained(rank: int) -> list[Any]:
    mesh = Mesh.of(MeshShape(dp=2))
    pipeline = Pipeline(layers(), pl.schedules.gpipe(1, 2), loss=mse, mesh=mesh, options=RuntimeOptions(monitor=False))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
    gradients, norms = [], []
    for step in range(STEPS):
        pipeline.step(*replica_batch(step, rank))
        norms.append((pipeline.grad_norm().item(), nn.utils.get_total_norm([p.grad for p in pipeline.parameters()])))
        gradients.append({name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None})
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in pipeline.parameters())
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()
    return [
        [{name: value.float().tolist() for name, value in step.items()} for step in gradients],
        {name: p.float().tolist() for name, p in pipeline.named_parameters()},
        [(ours, theirs.item()) for ours, theirs in norms],
    ]


def in_one_process() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients summed in fp32 over all micro-batches of both replicas, and stepped in bf16."""
    modules = [layer() for layer in layers()]
    named = {f"l{at}.{name}": p for at, module in enumerate(modules) for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(named.values(), lr=RATE)
    steps = []
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in named.items()}
        for replica in range(2):
            for x, y in zip(*(value.split(2) for value in replica_batch(step, replica)), strict=True):
                out = x
                for module in modules:
                    out = module(out)
                (mse(out, y) / 4).backward()
                for name, parameter in named.items():
                    assert parameter.grad is not None
                    sums[name] += parameter.grad.float()
                    parameter.grad = None
        steps.append(sums)
        for name, parameter in named.items():
            parameter.grad = sums[name].to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return steps, {name: p.detach().float() for name, p in named.items()}


def test_bf16_parameters_of_two_replicas_train() -> None:
    gradients, weights = in_one_process()
    start = {f"l{at}.{n}": p.float() for at, layer in enumerate(layers()) for n, p in layer().named_parameters()}
    for got, got_weights, norms in run_ranks(trained, 2):
        for step, wanted in zip(got, gradients, strict=True):
            for name, want in wanted.items():
                torch.testing.assert_close(torch.tensor(step[name]), want, rtol=0.02, atol=0.02 * want.abs().max())
        for name, value in got_weights.items():
            torch.testing.assert_close(torch.tensor(value), weights[name], rtol=0.02, atol=5e-3)
            assert not torch.equal(torch.tensor(value), start[name])
        for ours, of_torch in norms:
            assert ours == pytest.approx(of_torch, rel=1e-2)


def pipeline_of_one(**options: Any) -> Pipeline:
    return Pipeline(
        [Layer("a", lambda: nn.Linear(4, 4, bias=False).bfloat16())],
        pl.schedules.gpipe(1, 2),
        loss=nn.functional.mse_loss,
        options=RuntimeOptions(monitor=False, seed=0, **options),
    )


ONES = torch.ones(4, 4, dtype=torch.bfloat16)


def test_a_step_adds_to_the_fp32_sum_unless_the_caller_changed_its_rounded_copy() -> None:
    pipeline = pipeline_of_one(main_gradients=True)
    assert pipeline.sync is not None
    (weight,) = pipeline.parameters()
    sums = []
    for scale in (1.0, 0.5):
        pipeline.zero_grad()
        pipeline.step(ONES * 1.3, ONES * 0)
        once = pipeline.sync.gradient("a.weight")
        assert once is not None
        once = once.clone()
        assert not torch.equal(once, once.bfloat16().float())  # so that the rounded sum would be another one
        assert weight.grad is not None
        if scale != 1:
            weight.grad *= scale
        pipeline.step(ONES * 1.3, ONES * 0)
        twice = pipeline.sync.gradient("a.weight")
        assert twice is not None
        sums.append((twice - once, once))
    assert torch.equal(sums[0][0], sums[0][1])
    assert torch.equal(sums[1][0], (sums[1][1].bfloat16() * 0.5).float())
    norm = pipeline.clip_grad_norm_(0.25).item()
    assert weight.grad is not None
    assert norm > 0.5
    assert weight.grad.float().norm().item() == pytest.approx(0.25, rel=1e-2)


def test_an_optimizer_that_reads_the_buckets_leaves_grad_empty_and_is_clipped_in_fp32() -> None:
    pipeline = pipeline_of_one(main_gradients=True)
    assert pipeline.sync is not None
    Optimizer(list(pipeline.named_parameters()), load("tiny").optimizer, pipeline.sync, pipeline.counts_in_norm)
    pipeline.step(ONES * 1.3, ONES * 0)
    assert all(p.grad is None for p in pipeline.parameters())
    gradient = pipeline.sync.gradient("a.weight")
    assert gradient is not None
    norm = gradient.norm().item()
    assert pipeline.clip_grad_norm_(norm / 2).item() == pytest.approx(norm, rel=1e-5)
    assert gradient.norm().item() == pytest.approx(norm / 2, rel=1e-4)


def test_sharded_gradients_warn_once_unless_an_optimizer_reads_them() -> None:
    pipeline = pipeline_of_one(shard_gradients=True)
    with pytest.warns(UserWarning, match=r"\.grad of whole parameters stays None, and an optimizer of them"):
        pipeline.step(ONES, ONES * 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(ONES, ONES * 0)
        pipeline = pipeline_of_one(shard_gradients=True)
        Optimizer(list(pipeline.named_parameters()), load("tiny").optimizer, pipeline.sync, pipeline.counts_in_norm)
        pipeline.step(ONES, ONES * 0)


def test_reading_parameters_takes_nothing_from_an_optimizer_on_the_buckets() -> None:
    pipeline = pipeline_of_one(shard_gradients=True)
    section = load("tiny").optimizer
    optimizer = Optimizer(list(pipeline.named_parameters()), section, pipeline.sync, pipeline.counts_in_norm)
    (share,) = pipeline.parameters()
    before = pipeline.state_dict()["a.weight"].clone()
    pipeline.step(ONES * 1.3, ONES * 0)
    optimizer.step(None, 0.1)
    after = pipeline.state_dict()["a.weight"].clone()
    assert not torch.equal(after, before)
    assert torch.equal(after.flatten(), share.bfloat16())
    pipeline.step(ONES * 1.3, ONES * 0)
    assert torch.equal(pipeline.state_dict()["a.weight"], after)


def without_parameters(rank: int, at: int, folder: str) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and weights of a loop whose stage `at` of two has no parameters; its state is saved and loaded."""
    torch.manual_seed(0)
    kept: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    kept.insert(2 * at, nn.Tanh())
    schedule = pl.schedules.one_f_one_b(2, 2)
    stages = [1, 2] if at == 0 else [2, 1]
    build: Any = Pipeline if rank >= 0 else LocalPipeline
    pipeline = build(kept, schedule, loss=mse, stages=stages)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        losses.append(pipeline.step(*batch(4, seed=step)).item())
        optimizer.step()
        optimizer.zero_grad()
    if rank >= 0:
        checkpoint.save(folder, STEPS, pipeline, optimizer)
        checkpoint.load(folder, pipeline, optimizer)
    weights = {name: p.flatten().tolist() for name, p in pipeline.named_parameters()}
    pipeline.close()
    return losses, weights


@pytest.mark.parametrize("at", [0, 1])
def test_a_stage_without_parameters_trains(at: int, tmp_path: Path) -> None:
    want, weights = without_parameters(-1, at, "")
    ranks = run_ranks(without_parameters, 2, at, str(tmp_path))
    assert [losses for losses, _ in ranks] == [pytest.approx(want, rel=1e-6)] * 2
    assert ranks[at][1] == {}
    for name, values in ranks[1 - at][1].items():
        assert values == pytest.approx(weights[name], rel=1e-5)
