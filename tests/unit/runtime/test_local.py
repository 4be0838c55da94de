"""LocalPipeline against one process: loss, every gradient, activations alive, evaluation and outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.layer import Layer
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.shapes.cut import even_sizes

S = pl.schedules
SCHEDULES = [
    S.gpipe(3, 4),
    S.interleaved(2, 7, 3, rounds="tail"),
    S.interleaved(2, 7, 3, rounds="head"),
    S.interleaved(3, 7, 2, group_size=5),
    S.looped_bfs(3, 5, 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_uneven_stages_and_microbatches(schedule: pl.Schedule) -> None:
    """A step, then evaluations and predictions of one row, of a row per micro-batch, and of more than the step's."""
    m, stages = schedule.microbatches, [stage % 3 for stage in reversed(range(schedule.stages))]
    sizes = [1 + mb % 4 for mb in range(m)]
    options = RuntimeOptions(microbatch_sizes=sizes)
    pipeline = LocalPipeline(blocks(sum(stages)), schedule, loss=mse, stages=stages, options=options)
    x, y = batch(sum(sizes))
    want_loss, want = serial(blocks(sum(stages)), x, y, sizes)
    assert pipeline.step(x, y).item() == pytest.approx(want_loss.item(), rel=1e-6)
    assert worst(gradients(pipeline), want) <= 1e-6
    assert pipeline.peak_activations == pl.simulate(schedule).peak_activations
    whole = torch.nn.Sequential(*(layer() for layer in blocks(sum(stages))))
    for rows in (1, m, sum(sizes) + 5):
        x, y = batch(rows, seed=rows)
        with torch.no_grad():
            output = torch.cat([whole(part) for part in torch.split(x, even_sizes(rows, min(rows, m)))])
        assert torch.equal(pipeline.predict(x), output), rows
        assert pipeline.evaluate(x, y).item() == pytest.approx(mse(output, y).item(), rel=1e-6), rows


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


def test_backward_of_a_steps_loss_says_that_the_gradients_are_there(tmp_path: Path) -> None:
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse)
    loss = pipeline.step(*batch(2))
    with pytest.raises(UsageError, match=r"step has run the backwards too.*go on with the optimizer's step"):
        loss.backward()
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    assert torch.load(tmp_path / "loss.pt")["loss"] == loss


def test_a_schedule_by_its_name_is_refused_before_the_step() -> None:
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse)
    with pytest.raises(UsageError, match=r"^schedule is '1f1b', a name; make the schedule of it"):
        pipeline.step(*batch(2), schedule="1f1b")
    with pytest.raises(UsageError, match=r"^schedule is '1f1b', a name; make the schedule of it"):
        pipeline.adopt("1f1b")  # type: ignore[arg-type]


def test_a_weight_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is 2; it must be a Callable\[.*\] or None"):
        LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse, weight=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(1, 3, 4), (1, 8)])
def test_sizes_that_do_not_fit_the_batch_of_a_step_are_refused(sizes: tuple[int, ...]) -> None:
    options = RuntimeOptions(microbatch_sizes=sizes)
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse, options=options)
    wanted = rf"microbatch_sizes is {re.escape(str(sizes))}, with the sum \d; it must be 2 numbers with the sum 8, the batch's"
    with pytest.raises(UsageError, match=wanted):
        pipeline.step(*batch(8))
    pipeline.step(microbatches=[batch(3), batch(5)])  # sizes of their own


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0])
def test_a_cost_that_is_no_size_is_refused(cost: float) -> None:
    layers = [Layer(f"layer{at}", nn.Identity, cost=cost if at else 1.0) for at in range(2)]
    with pytest.raises(ConfigError, match="'layer1': its cost must be a finite number of at least 0"):
        LocalPipeline(layers, pl.schedules.gpipe(2, 2), loss=mse)


@pytest.mark.parametrize("sparse", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor(list(x))])
def test_a_batch_that_is_not_dense_is_refused(sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs, targets = batch(4)
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse)
    with pytest.raises(
        UsageError, match=r"^a (sparse_coo|nested) tensor has a row for each sample; only dense ones are cut"
    ):
        pipeline.step(sparse(inputs), targets)


def test_a_keyword_that_is_no_string_is_refused() -> None:
    pipeline = LocalPipeline(blocks(2), pl.schedules.gpipe(2, 2), loss=mse)
    with pytest.raises(UsageError, match="step got the keyword argument 1, which no layer takes"):
        pipeline.step(microbatches=[(*batch(2), {1: 1})] * 2)
