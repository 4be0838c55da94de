"""Linear layers whose weight gradient goes past autograd: only in the stage's own pass, and as autograd would compute it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import (
    StageBackward,
    WeightGradContext,
    WeightGradQueue,
    apply_linear,
)
from pipeloom.ops.grouped import apply_grouped_linear
from pipeloom.ops.main_gradient import MainGradients

COUNTS = (2, 0, 3)


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight)


def plain_grouped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(COUNTS), weight, strict=True)])


Layer = Callable[[Tensor, Tensor, WeightGradContext], Tensor]
KINDS: dict[str, tuple[Layer, Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda x, weight, grad_context: apply_linear(x, weight, None, grad_context), plain, (3, 4)),
    "grouped": (
        lambda x, weight, grad_context: apply_grouped_linear(x, weight, COUNTS, grad_context),
        plain_grouped,
        (3, 3, 4),
    ),
}


def desk_of(how: str, weight: nn.Parameter) -> WeightGradContext:
    grad_context = WeightGradContext(StageBackward())
    if how == "queue":
        grad_context.queue = WeightGradQueue()
    elif how == "main":
        grad_context.main = MainGradients()
        grad_context.main.attach(weight, torch.zeros_like(weight))
    else:
        grad_context.in_place = True
    return grad_context


def finish(grad_context: WeightGradContext, loss: Tensor, weight: nn.Parameter) -> Tensor:
    """The stage's own pass, and W; the weight's gradient."""
    grad_context.stage_backward.run([loss], [torch.ones(())])
    if grad_context.queue is not None:
        grad_context.queue.flush()
    if grad_context.main is not None:
        grad_context.main.finalize([weight])
        return grad_context.main.of(weight)
    assert weight.grad is not None
    return weight.grad


every_way = pytest.mark.parametrize("how", ["queue", "main", "in place"])
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_way
@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_in_the_stages_own_pass(kind: str, how: str, dtype: torch.dtype) -> None:
    layer, reference, shape = KINDS[kind]
    weight, x, seed = nn.Parameter(normal(*shape, seed=1, dtype=dtype)), normal(5, 4, seed=2, dtype=dtype), 3
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    factor = normal(5, 3, seed=seed, dtype=dtype)
    grad_context = desk_of(how, weight)
    got = finish(grad_context, (layer(mine, weight, grad_context) * factor).abs().square().sum(), weight)
    twin = weight.detach().clone().requires_grad_()
    (reference(other, twin) * factor).abs().square().sum().backward()
    torch.testing.assert_close(got, twin.grad)
    torch.testing.assert_close(mine.grad, other.grad)


@every_way
@every_kind
def test_any_other_pass_leaves_the_weights_gradient_to_autograd(kind: str, how: str) -> None:
    """It may be differentiated, with respect to input and weight."""
    layer, reference, shape = KINDS[kind]
    weight = nn.Parameter(normal(*shape, seed=1))
    x, twin = normal(5, 4, seed=2), weight.detach().clone().requires_grad_()
    grad_context = desk_of(how, weight)

    def loss(apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        out = apply(torch.tanh(x))
        dx, dw = torch.autograd.grad(out.pow(3).sum(), (x, weight), create_graph=True)
        return (dx.square().sum() + 1) * dw.square().sum() + out.sum()

    mine, other = (x.clone().requires_grad_() for _ in range(2))
    value = loss(lambda rows: layer(rows, weight, grad_context), mine, weight)
    assert weight.grad is None
    assert grad_context.main is None or not grad_context.main.of(weight).any()
    got = finish(grad_context, value, weight)
    want = loss(lambda rows: reference(rows, twin), other, twin)
    want.backward()
    torch.testing.assert_close(got, twin.grad)
    torch.testing.assert_close(mine.grad, other.grad)
    assert torch.autograd.gradgradcheck(lambda x, weight: layer(x, weight, grad_context), (mine, weight))


@every_way
@every_kind
@pytest.mark.parametrize("which", ["before", "after", "both"])
def test_hooks_on_the_weight_fire_as_in_one_process(kind: str, how: str, which: str) -> None:
    layer, reference, shape = KINDS[kind]

    def step(weight: nn.Parameter, run: Callable[[Tensor], None]) -> list[Any]:
        seen: list[Any] = []
        if which != "after":
            weight.register_hook(lambda g: (seen.append(g.sum().item()), 2 * g)[1])

        def after(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.sum().item())
            parameter.grad.mul_(0.5)

        if which != "before":
            weight.register_post_accumulate_grad_hook(after)
        for micro_batch in range(3):
            run(normal(5, 4, seed=micro_batch))
        return seen

    weight, twin = (nn.Parameter(normal(*shape, seed=1)) for _ in range(2))
    grad_context = desk_of(how, weight)
    got = step(
        weight,
        lambda x: grad_context.stage_backward.run([layer(x, weight, grad_context).square().sum()], [torch.ones(())]),
    )
    if grad_context.queue is not None:
        grad_context.queue.flush()
    want = step(twin, lambda x: reference(x, twin).square().sum().backward())
    assert len(want) == (6 if which == "both" else 3)
    assert got == pytest.approx(want)
    if grad_context.main is not None:
        grad_context.main.finalize([weight])
        torch.testing.assert_close(grad_context.main.of(weight), twin.grad)
    else:
        torch.testing.assert_close(weight.grad, twin.grad)


def test_a_pass_in_another_pass_is_not_the_stages() -> None:
    """Known by its number: the stage's own pass goes on after one that began inside of it."""
    stage_backward, states = StageBackward(), []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, inside: bool) -> Tensor:
            ctx.name, ctx.inside = name, inside
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if ctx.inside:
                with torch.enable_grad():
                    x = torch.ones(1, requires_grad=True)
                    torch.autograd.backward(Watched.apply(x, "inner", False).sum())
            states.append((ctx.name, stage_backward.running))
            return gradients[0], None, None

    x = torch.ones(1, requires_grad=True)
    apply = partial(Watched.apply)
    root = apply(apply(x, "before", False), "around", True)
    stage_backward.run([root], [torch.ones(1)])
    assert states == [("inner", False), ("around", True), ("before", True)]
    states.clear()
    apply(x, "later", False).sum().backward()
    assert states == [("later", False)]
    assert not stage_backward.running


def test_a_pass_that_fails_is_over() -> None:
    stage_backward = StageBackward()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    stage_backward.run([y], [torch.ones(1)])
    z = x.exp()
    z.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        stage_backward.run([z], [torch.ones(1)])
    running = []
    w = x * 2
    w.register_hook(lambda _: running.append(stage_backward.running))
    w.sum().backward()
    assert running == [False]


@every_way
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 4)])
def test_the_output_may_be_changed_in_place(how: str, size: tuple[int, ...]) -> None:
    """As in `relu_(linear(x))`, which autograd refuses for a view that a custom Function returns."""
    x, bias = normal(*size, seed=1), normal(5, seed=3)
    weight = nn.Parameter(normal(5, 4, seed=2))
    nn.functional.linear(x, weight, bias).mul_(1.5).relu_().sum().backward()
    want, weight.grad = weight.grad, None
    grad_context = desk_of(how, weight)
    got = finish(grad_context, apply_linear(x, weight, bias, grad_context).mul_(1.5).relu_().sum(), weight)
    torch.testing.assert_close(got, want)
