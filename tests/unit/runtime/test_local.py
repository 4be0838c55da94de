"""LocalPipeline against one process: loss, every gradient, activations alive, evaluation and outputs."""

from __future__ import annotations

import pytest
import torch

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import UsageError
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from samples import FAMILIES, Case, sample

CASES = [pytest.param(case, id=name) for family in FAMILIES for name, case in sample(family, 12, seed=1)]


def local(case: Case, **options: object) -> LocalPipeline:
    chosen = RuntimeOptions(microbatch_sizes=case.sizes, **options)  # type: ignore[arg-type]
    return LocalPipeline(blocks(case.layers), case.schedule, loss=mse, stages=case.stages, options=chosen)


def rows_of(rows: int, case: Case) -> list[int]:
    """Rows of each micro-batch of an evaluation: as even as possible, one row each for a small batch."""
    base, larger = divmod(rows, min(rows, case.schedule.microbatches))
    return [base + (at < larger) for at in range(min(rows, case.schedule.microbatches))]


def forward(modules: list[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
    return x


@pytest.mark.parametrize("case", CASES)
def test_step_equals_one_process(case: Case) -> None:
    x, y = batch(case.rows)
    want_loss, want = serial(blocks(case.layers), x, y, case.sizes)
    pipeline = local(case)
    loss = pipeline.step(x, y)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-6)
    assert worst(gradients(pipeline), want) <= 1e-6
    assert pipeline.peak_activations == pl.simulate(case.schedule, pl.Costs(1, 1, 1, 0)).peak_activations


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluate_and_predict_equal_one_process(family: str) -> None:
    for name, case in sample(family, 4, seed=2):
        modules = [layer() for layer in blocks(case.layers)]
        pipeline = local(case)
        for rows in {1, case.schedule.microbatches, case.rows + 5}:
            x, y = batch(rows, seed=rows)
            with torch.no_grad():
                want = torch.cat([forward(modules, part) for part in torch.split(x, rows_of(rows, case))])
            assert torch.equal(pipeline.predict(x), want), (name, rows)
            assert pipeline.evaluate(x, y).item() == pytest.approx(mse(want, y).item(), rel=1e-6), (name, rows)
        assert not gradients(pipeline)


def test_the_mean_is_over_targets_not_over_microbatches() -> None:
    """Micro-batches of 1 and 7 rows: the mean of the two means is another number, and so is its gradient."""
    x, y = batch(8)
    pipeline = LocalPipeline(
        blocks(2), pl.schedules.gpipe(2, 2), loss=mse, options=RuntimeOptions(microbatch_sizes=(1, 7))
    )
    fewer = pipeline.evaluate(x[:5], y[:5])  # a batch of another size is split evenly
    assert fewer.item() == pytest.approx(serial(blocks(2), x[:5], y[:5], [5])[0].item(), rel=1e-6)
    loss = pipeline.step(x, y)
    whole, want = serial(blocks(2), x, y, [8])
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert worst(gradients(pipeline), want) <= 1e-5
    modules = [layer() for layer in blocks(2)]
    mean_of_means = sum(mse(modules[1](modules[0](x[a:b])), y[a:b]).item() for a, b in ((0, 1), (1, 8))) / 2
    assert loss.item() != pytest.approx(mean_of_means, rel=1e-3)


def test_weight_decides_the_share_of_a_microbatch() -> None:
    """Padding: targets of NaN do not count, and a micro-batch has another number of them than its neighbour."""
    x, y = batch(6)
    y[4:, 1:] = float("nan")

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        real = ~target.isnan()
        return ((output - target.nan_to_num()) ** 2)[real].mean()

    pipeline = LocalPipeline(
        blocks(3), pl.schedules.one_f_one_b(3, 3), loss=loss, weight=lambda target: (~target.isnan()).sum()
    )
    got = pipeline.step(x, y)
    modules = [layer() for layer in blocks(3)]
    whole = loss(modules[2](modules[1](modules[0](x))), y)
    whole.backward()
    assert got.item() == pytest.approx(whole.item(), rel=1e-6)
    want = {f"block{i}.{n}": p.grad for i, module in enumerate(modules) for n, p in module.named_parameters()}
    assert worst(gradients(pipeline), want) <= 1e-5  # type: ignore[arg-type]


def test_gradients_add_up_over_steps() -> None:
    """The loss is scaled, never `.grad`: a second step adds its gradients to the first one's."""
    schedule = pl.schedules.interleaved(2, 5, 2)
    pipeline = LocalPipeline(blocks(4), schedule, loss=mse)
    first, second = batch(7, seed=1), batch(11, seed=2)
    pipeline.step(*first)
    pipeline.evaluate(*batch(3, seed=3))
    pipeline.step(*second)
    one = serial(blocks(4), *first, [2, 2, 1, 1, 1])[1]
    two = serial(blocks(4), *second, [3, 2, 2, 2, 2])[1]
    assert worst(gradients(pipeline), {name: one[name] + two[name] for name in one}) <= 1e-6
    pipeline.zero_grad()
    assert not gradients(pipeline)


def test_a_batch_smaller_than_m_is_refused_for_training() -> None:
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 4), loss=mse)
    with pytest.raises(UsageError, match="3 rows cannot be split into 4 micro-batches"):
        pipeline.step(*batch(3))
    x, y = batch(3)
    for call in (lambda: pipeline.predict(x[:0]), lambda: pipeline.evaluate(x[:0], y[:0])):
        with pytest.raises(UsageError, match="the batch has 0 rows"):
            call()
