"""Targets that the loss ignores: every schedule and every number of replicas gives the mean over those that count."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeloom as pl
from models import Block, gradients, worst
from pipeloom.errors import UsageError
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.batch import count_targets
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules
CLASSES, LENGTH = 5, 3
BOUND = 2e-6


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        generator = torch.Generator().manual_seed(99)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(self.linear.weight.shape, generator=generator))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def layers(count: int) -> list[Layer]:
    return [*(Layer(f"block{i}", partial(Block, i)) for i in range(count - 1)), Layer("head", Head)]


def loss_of(output: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), **options)


def data(rows: int, seed: int, ignored: float | None, index: int = -100) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of which this share is ignored, more of them in the first rows; None: all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, 6, generator=generator)
    y = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    if ignored is None:
        return x, torch.full_like(y, index)
    share = torch.linspace(min(1.0, 2 * ignored), 0.0, rows)[:, None]
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < share, index)


def whole(x: Tensor, y: Tensor, count: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process and one cross entropy over the whole batch."""
    built = [(layer.name, layer()) for layer in layers(count)]
    out = x
    for _, module in built:
        out = module(out)
    loss = loss_of(out, y, **options)
    loss.backward()
    return loss.item(), {
        f"{name}.{inner}": p.grad
        for name, module in built
        for inner, p in module.named_parameters()
        if p.grad is not None
    }


SCHEDULES = {
    "gpipe": S.gpipe(2, 4),
    "1f1b": S.one_f_one_b(3, 5),
    "1f1b split cool-down": S.build("1f1b", 3, 5, options={"cooldown": "split"}),
    "interleaved": S.interleaved(2, 5, 2),
    "interleaved-zb": S.interleaved_zb(2, 4, 2),
    "looped-bfs": S.looped_bfs(2, 4, 2),
    "zb-h1": S.zb_h1(3, 5),
    "zb-h2": S.zb_h2(2, 5),
    "zbv": S.zbv(2, 5),
    "v-half": S.v_half(2, 5),
    "v-min": S.v_min(2, 5),
    "1f1b-overlap": S.one_f_one_b_overlap(2, 5),
    "dualpipe": S.dualpipe(2, 4),
    "dualpipev": S.dualpipev(2, 5),
    "hanayo": S.hanayo(2, 4),
    "chimera": S.chimera(2, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_ignored_targets_do_not_count_in_any_schedule(name: str) -> None:
    """Uneven micro-batches, and the first rows, more than one micro-batch of them, hold no target at all."""
    schedule = SCHEDULES[name]
    m = schedule.microbatches
    x, y = data(2 * m + 1, 7, 0.4)
    y[:4] = -100
    pipeline = LocalPipeline(layers(max(4, schedule.positions)), schedule, loss=loss_of)
    loss = pipeline.step(x, y).item()
    want, expected = whole(x, y, max(4, schedule.positions))
    assert loss == pytest.approx(want, rel=1e-6)
    assert worst(gradients(pipeline), expected) < BOUND
    assert pipeline.evaluate(x, y).item() == pytest.approx(want, rel=1e-6)
    pipeline.zero_grad()
    assert pipeline.step(x, y).item() == loss


def test_another_index_is_ignored_on_request() -> None:
    x, y = data(7, 5, 0.4, index=3)
    pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 4), loss=partial(loss_of, ignore_index=3), ignore_index=3)
    loss = pipeline.step(x, y).item()
    want, expected = whole(x, y, 4, ignore_index=3)
    assert loss == pytest.approx(want, rel=1e-6)
    assert worst(gradients(pipeline), expected) < BOUND


def test_no_index_counts_every_target() -> None:
    """Numbers that are labels of nothing, in a loss that knows no target to ignore."""

    def square(output: Tensor, targets: Tensor) -> Tensor:
        return ((output.sum(-1) - targets) ** 2).mean()

    x = torch.randn(5, LENGTH, 6, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([[-100, 1, 2], [-100] * 3, [4, -100, 5], [1, 2, 3], [0, 0, -100]])
    pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 3), loss=square, ignore_index=None)
    out = LocalPipeline(layers(4), S.one_f_one_b(2, 3), loss=square).predict(x)
    assert pipeline.step(x, y).item() == pytest.approx(square(out, y).item(), rel=1e-6)


def test_own_weights_that_are_zero_leave_a_micro_batch_out() -> None:
    x, y = data(6, 4, 0.0)
    calls: list[int] = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        return loss_of(output, targets)

    def weight(targets: Tensor) -> Tensor:
        return (targets.numel() * torch.tensor(not torch.equal(targets, y[:2]))).float()

    pipeline = LocalPipeline(layers(4), S.zb_h1(2, 3), loss=loss, weight=weight)
    got = pipeline.step(x, y).item()
    want, expected = whole(x[2:], y[2:], 4)
    assert got == pytest.approx(want, rel=1e-6)
    assert worst(gradients(pipeline), expected) < BOUND
    assert calls == [2, 2]


def test_shares_that_layers_see_sum_to_one() -> None:
    seen: list[float] = []

    class Sees(Block):
        def forward(self, x: Tensor, microbatch: MicrobatchContext) -> Tensor:
            seen.append(microbatch.share)
            return super().forward(x)

    x, y = data(6, 2, 0.3)
    y[:2] = -100
    LocalPipeline([Layer("sees", partial(Sees, 0)), *layers(3)], S.one_f_one_b(2, 3), loss=loss_of).step(x, y)
    assert seen[0] == 0
    assert sum(seen) == pytest.approx(1)
    assert seen[1] == (y[2:4] != -100).sum() / (y != -100).sum()


@pytest.mark.parametrize(
    ("targets", "index", "count"),
    [
        (torch.tensor([[1, -100], [-100, -100]]), -100, 1),
        (torch.tensor([[1, -100], [-100, -100]]), None, 4),
        (torch.tensor([-100.0, 1.0]), -100, 2),
        (torch.tensor([156, 7], dtype=torch.uint8), -100, 2),  # -100 would wrap around to 156
        (torch.tensor([156, 7], dtype=torch.uint8), 7, 1),
        (torch.tensor([True, False]), 1, 2),
        ((3, torch.tensor([1, -100])), -100, 1),
        (torch.tensor(-100), -100, 0),
    ],
)
def test_how_many_targets_count(targets: Any, index: int | None, count: int) -> None:
    assert count_targets(targets, index) == count


@pytest.mark.parametrize("sizes", [None, (1, 3, 1, 2)], ids=["as even as possible", "chosen"])
@pytest.mark.parametrize(
    ("targets", "shared"),
    [
        ((torch.tensor(0.5), "text"), False),
        ((torch.tensor(0.5), torch.ones(2, 3)), True),
        ((torch.ones(3), [torch.zeros(7, 2)]), True),
    ],
    ids=["scalar and text", "of other lengths", "rows inside a list"],
)
def test_targets_without_rows_count_by_the_micro_batches_rows(
    targets: Any, shared: bool, sizes: tuple[int, ...] | None
) -> None:
    def loss(output: Tensor, _: Any) -> Tensor:
        return output.square().mean()

    x, _ = data(7, 1, None)
    found = []
    for kind, schedule in ((Pipeline, S.gpipe(1, 1)), (LocalPipeline, SCHEDULES["gpipe"])):
        options = RuntimeOptions(microbatch_sizes=sizes if schedule.microbatches > 1 else None, shared_targets=shared)
        pipeline = kind(layers(4), schedule, loss=loss, options=options)
        found.append((pipeline.step(x, targets).item(), gradients(pipeline)))
    assert found[0][0] == pytest.approx(found[1][0])
    assert worst(found[1][1], found[0][1]) < BOUND


def test_own_weights_allow_targets_without_rows() -> None:
    x, _ = data(8, 1, None)
    wanted = torch.ones(1, LENGTH)

    def square(output: Tensor, targets: Tensor) -> Tensor:
        return (output.sum(-1) - targets).square().mean()

    pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 4), loss=square, weight=lambda _: 1)
    assert pipeline.step(x, wanted).item() == pytest.approx(square(pipeline.predict(x), wanted).item(), rel=1e-6)


def test_refusals() -> None:
    x, y = data(4, 1, None)
    pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 2), loss=loss_of)
    with pytest.raises(UsageError, match=r"none of the batch's targets counts \(ignore_index is -100\)"):
        pipeline.step(x, y)
    for weight in (-1.0, math.nan, math.inf):
        pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 2), loss=loss_of, weight=lambda _, w=weight: w)
        with pytest.raises(UsageError, match=rf"weight\(targets\) is {weight} for micro-batch 0"):
            pipeline.step(x, y)
    pipeline = LocalPipeline(layers(4), S.one_f_one_b(2, 2), loss=loss_of, weight=lambda _: 0)
    with pytest.raises(UsageError, match="every weight is 0"):
        pipeline.step(x, y)


REPLICAS: dict[str, tuple[float | None, float | None]] = {"uneven": (0.1, 0.5), "one without targets": (0.4, None)}


def side_by_side(rank: int, cases: list[tuple[str, str, bool]]) -> list[tuple[float, float, float]]:
    """For each case (difference of the loss, of the gradients, the evaluation's loss less the step's)."""
    mesh = Mesh.of(MeshShape(2, 2))
    assert mesh is not None
    found = []
    for name, ignored, meta in cases:
        schedule = SCHEDULES[name]
        rows = 2 * schedule.microbatches + 1
        parts = [data(rows, 10 + replica, share) for replica, share in enumerate(REPLICAS[ignored])]
        pipeline = Pipeline(
            layers(max(4, schedule.positions)), schedule, loss=loss_of, mesh=mesh, options=RuntimeOptions(monitor=False)
        )
        x, y = parts[mesh.place.dp]
        if meta and rank < 2:  # stage 0 of either replica is no last stage
            y = y.to("meta")
        loss = pipeline.step(x, y).item()
        want, expected = whole(torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]]), 4)
        own = {key: value for key, value in expected.items() if key in gradients(pipeline)}
        evaluated = pipeline.evaluate(x, y).item()
        found.append((abs(loss - want) / want, worst(gradients(pipeline), own), evaluated - loss))
        pipeline.close()
    return found


@pytest.mark.slow
def test_replicas_share_one_mean() -> None:
    names = ("gpipe", "interleaved", "zb-h2", "zbv", "1f1b-overlap", "dualpipe")
    cases = [(name, ignored, False) for name in names for ignored in REPLICAS]
    cases.append(("zb-h2", "one without targets", True))
    for rank, found in enumerate(run_ranks(side_by_side, 4, cases)):
        for case, (loss, gradient, evaluated) in zip(cases, found, strict=True):
            assert loss < 1e-6, (rank, case)
            assert gradient < BOUND, (rank, case)
            assert abs(evaluated) < 1e-6, (rank, case)
