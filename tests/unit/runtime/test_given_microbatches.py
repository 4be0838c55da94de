"""Micro-batches given to a step, an evaluation and a prediction; the buffers and shapes that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from models import WIDTH, blocks, gradients, mse
from pipeloom.errors import UsageError
from pipeloom.ops.layer import KEYWORD
from pipeloom.runtime import LocalPipeline
from pipeloom.runtime.batch import Weighing, cut_batch, weighed
from pipeloom.runtime.p2p.base import BufferPool
from pipeloom.runtime.tensor_spec import TensorSpec

S = pl.schedules


def pipeline() -> LocalPipeline:
    return LocalPipeline(blocks(2), S.one_f_one_b(2, 4), loss=mse)


def given(*shapes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*s, WIDTH, generator=generator), torch.randn(*s, WIDTH, generator=generator)) for s in shapes]


def test_given_micro_batches_are_a_batch_that_is_cut_there() -> None:
    mine, cut = pipeline(), pipeline()
    parts = given((1, 3), (3, 3), (2, 3), (4, 3))
    batch = [torch.cat(each) for each in zip(*parts, strict=True)]
    torch.testing.assert_close(mine.step(microbatches=parts), cut.step(*batch))
    torch.testing.assert_close(gradients(mine), gradients(cut))
    torch.testing.assert_close(mine.evaluate(microbatches=parts), cut.evaluate(*batch))
    torch.testing.assert_close(torch.cat(mine.predict(microbatches=parts)), cut.predict(batch[0]))


def test_a_forward_pass_takes_any_number_of_micro_batches_of_any_shape() -> None:
    parts = given((2, 5), (1, 7), *[(1, length) for length in range(1, 8)])
    outputs = pipeline().predict(microbatches=parts)
    assert [output.shape for output in outputs] == [target.shape for _, target in parts]
    weights = [target.numel() for _, target in parts]
    means = [mse(output, target) for output, (_, target) in zip(outputs, parts, strict=True)]
    mean = sum(weight * each for weight, each in zip(weights, means, strict=True)) / sum(weights)
    torch.testing.assert_close(pipeline().evaluate(microbatches=parts), mean.detach())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"microbatches": given((1, 3), (1, 3))}, "step got 2 micro-batches, and the schedule runs 4; pass schedule="),
        ({"microbatches": given((1, 3)), "schedule": S.one_f_one_b(2, 2)}, "1 micro-batches, and the schedule runs 2"),
        ({"microbatches": []}, "step: give inputs and targets, or a list of one or more"),
        ({"microbatches": torch.ones(4, 3, WIDTH)}, "step: give inputs and targets, or a list of one or more"),
        ({"inputs": torch.ones(4, WIDTH), "microbatches": given((1, 3))}, "step: give inputs and targets, or"),
        ({"microbatches": [(1, 2, 3, 4)]}, r"micro-batch 0 is not \(inputs, targets\)"),
        ({"microbatches": [torch.ones(1, 3, WIDTH)] * 4}, "step got no targets"),
        ({"microbatches": [(*each, {"mask": 1}) for each in given(*[(1, 3)] * 4)]}, "keyword argument 'mask'"),
    ],
)
def test_what_is_no_step_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pipeline().step(**arguments)


@pytest.mark.parametrize(
    ("weight", "shown"), [(-1.0, "-1.0"), (None, "None"), (torch.ones(3), r"tensor\(\[1., 1., 1.\]\)")], ids=str
)
def test_a_bad_weight_is_that_of_its_micro_batch(weight: Any, shown: str) -> None:
    parts = given((1, 3), (2, 3), (1, 3))
    weigh = lambda targets: weight if len(targets) == 2 else torch.ones(1)  # noqa: E731
    local = LocalPipeline(blocks(2), S.one_f_one_b(2, 3), loss=mse, weight=weigh)
    with pytest.raises(UsageError, match=rf"weight\(targets\) is {shown} for micro-batch 1"):
        local.step(microbatches=parts)


def test_a_schedule_stays_until_the_next_one() -> None:
    local = pipeline()
    local.step(microbatches=given(*[(1, 3)] * 3), schedule=S.one_f_one_b(2, 3))
    assert local.schedule == S.one_f_one_b(2, 3)
    local.step(microbatches=given(*[(2, 3)] * 3))
    assert local.schedule == S.one_f_one_b(2, 3)


def test_a_pool_has_as_many_buffers_as_are_needed_at_once_and_none_beyond_the_largest() -> None:
    pool = BufferPool(torch.device("cpu"))

    def use(*tokens: int) -> None:
        taken = [pool.take(TensorSpec(torch.float32, (1, count, 2), True)) for count in tokens]
        assert [each.shape for each in taken] == [(1, count, 2) for count in tokens]
        for number, each in enumerate(taken):
            each.fill_(number)
        assert all((each == number).all() for number, each in enumerate(taken))
        for each in taken:
            pool.give(each)

    use(5, 3)
    assert (pool.made, pool.nbytes) == (2, 8 * 8)
    use(3, 5)
    use(1, 2)
    assert pool.made == 2
    use(7, 7)  # in place of the two
    assert (pool.made, pool.nbytes) == (4, 14 * 8)
    use(7, 4)
    assert pool.made == 4
    pool.take(TensorSpec(torch.float32, (7,), True))  # a message of another kind does not occupy them
    use(7, 7)
    assert pool.made == 5


def test_micro_batches_and_samples_are_numbered_on_across_the_parts() -> None:
    weighing = Weighing(replica=1)
    units = [
        unit for part in given((2, 3), (1, 4), (3, 2)) for unit in cut_batch(*part, {}, [part[0].size(0)], weighing)
    ]
    contexts = [each[KEYWORD] for each in weighed(units, weighing, first=(10, 20)).keywords]
    assert [(each.index, each.first, each.samples) for each in contexts] == [(10, 20, 2), (11, 22, 1), (12, 23, 3)]
    assert [each.share for each in contexts] == [6 / 16, 4 / 16, 6 / 16]
