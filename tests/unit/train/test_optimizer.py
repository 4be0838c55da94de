"""AdamW's groups, clipping, the gradient norm, the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from optimizer_states import optimizer_states
from pipeloom.config import load
from pipeloom.config.rates import learning_rate
from pipeloom.config.sections import OptimizerSection
from pipeloom.parallel.grad_norm import clip, exact_sum, global_norm, square_norm, squares
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.speculative import OptimizerCopy


def options(**changes: Any) -> OptimizerSection:
    return load("tiny", {f"optimizer.{key}": value for key, value in changes.items()}).optimizer


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Optimizer([("m", matrix), ("v", vector)], options(weight_decay=0.5, min_lr=0.0))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(None, 0.1)
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert vector.tolist() == [1.0, 1.0]
    assert matrix.grad is None


def test_the_first_step_moves_by_the_rate() -> None:
    matrix = nn.Parameter(torch.zeros(1, 3))
    optimizer = Optimizer([("m", matrix)], options(weight_decay=0.0))
    matrix.grad = torch.tensor([[4.0, -0.5, 1.0]])
    optimizer.step(None, 0.25)
    torch.testing.assert_close(matrix.detach(), torch.tensor([[-0.25, 0.25, -0.25]]))


def test_a_norm_that_is_not_finite_skips_the_step() -> None:
    matrix = nn.Parameter(torch.ones(1, 3))
    optimizer = Optimizer([("m", matrix)], options())
    matrix.grad = torch.tensor([[math.nan, 0.0, 1.0]])
    assert math.isnan(exact_sum(optimizer.squares()))
    optimizer.step(math.nan, 0.25)
    assert matrix.tolist() == [[1.0, 1.0, 1.0]]
    assert matrix.grad is None


def test_a_rank_without_trained_parameters() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    for named in ([], [("f", frozen)]):
        optimizer = Optimizer(named, options())
        assert optimizer.optimizers == []
        assert exact_sum(optimizer.squares()) == 0.0
        optimizer.step(1.0, 0.1)
        assert optimizer_states(optimizer) == {}
        assert optimizer.state_bytes == 0
    assert frozen.tolist() == [[1, 1], [1, 1]]


def test_the_square_norm_and_clipping_are_torchs() -> None:
    parameters = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]
    optimizer = Optimizer([("a", parameters[0]), ("b", parameters[1])], options())
    for seed, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    own = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = math.sqrt(exact_sum(optimizer.squares()))
    want = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert norm == pytest.approx(want.item(), rel=1e-6)
    clip(own, norm, 0.5)
    for gradient, parameter in zip(own, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=0)


def test_what_others_count_is_left_out_of_the_norm() -> None:
    parameters = [("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.zeros(2)))]
    for _, parameter in parameters:
        parameter.grad = torch.tensor([3.0, 4.0])
    assert Optimizer(parameters, options(), counts=lambda name: name == "a").squares() == [25.0]


def test_small_gradients_and_a_limit_of_0_are_not_clipped() -> None:
    gradient = torch.tensor([3.0, 4.0])
    clip([gradient], 5.0, 10.0)
    assert gradient.tolist() == [3.0, 4.0]
    stepped = []
    for most in (10.0, 0.0):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = Optimizer([("a", parameter)], options(clip_norm=most, lr=0.1))
        for scale in (1.0, 3.0):  # two steps, or Adam would not show the scale
            parameter.grad = torch.tensor([3.0, 4.0]) * scale / 5
            optimizer.step(math.sqrt(exact_sum(optimizer.squares())), 0.1)
        stepped.append(parameter.tolist())
    assert stepped[0] == stepped[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_any_dtype(dtype: torch.dtype) -> None:
    assert square_norm([torch.tensor([3.0, 4.0], dtype=dtype)]) == (pytest.approx(25.0), 0.0)


def test_the_global_norm_is_the_same_bits_however_gradients_are_spread() -> None:
    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(7, generator=draw, dtype=torch.float64) * 10.0 ** (at % 5) for at in range(40)]
    whole = global_norm(squares(parts))
    for ranks in range(1, 40):
        sent = [square_norm(parts[rank::ranks]) for rank in range(ranks)]
        assert global_norm(number for pair in sent for number in pair) == whole
    assert square_norm([torch.tensor([math.inf])]) == (math.inf, 0.0)
    assert math.isnan(square_norm([torch.tensor([math.nan])])[0])


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 10), (2, 1)])
def test_short_runs_have_a_rate_too(steps: int, warmup: int) -> None:
    chosen = options(lr=1.0, min_lr=0.1, warmup_steps=warmup)
    assert all(0 < learning_rate(step, steps, chosen) <= 1.0 for step in range(steps))


def adam_steps(optimizer: Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for at, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + at)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(None, 0.1)


def test_a_step_that_is_taken_back_is_not_counted() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer, copies = Optimizer([("m", parameters[0]), ("v", parameters[1])], options()), OptimizerCopy()
    adam_steps(optimizer, parameters, range(2))
    copies.take(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    adam_steps(optimizer, parameters, range(2, 3))
    once = [parameter.detach().clone() for parameter in parameters]
    copies.restore(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert {each["step"] for each in optimizer_states(optimizer).values()} == {2.0}
    adam_steps(optimizer, parameters, range(2, 3))
    assert all(torch.equal(p, o) for p, o in zip(parameters, once, strict=True))
