"""A row of segments run in order is the plain function, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeloom.ops.segments import Communication, Compute, Done, Pending, Segment, Segmented, Values, in_order


class Late:
    """Gives its values when it is waited for, and counts."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.waits = 0

    def wait(self) -> Values:
        self.waits += 1
        return self.values


class Reorder:
    """A communication within one process: rows of the first value in the order that the last one holds."""

    name = "reorder"
    quick = False

    def __init__(self) -> None:
        self.pending: list[Late] = []
        self.saved: list[Values] = []
        self.given: list[Values] = []

    def start(self, values: Values) -> Pending:
        rows, order = values[0], values[-1]
        assert not rows.requires_grad
        self.pending.append(Late((rows[order], *values[1:])))
        return self.pending[-1]

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        self.saved.append(saved)
        self.given.append(gradients)
        back = torch.empty_like(gradients[0])
        back[saved[-1]] = gradients[0]
        self.pending.append(Late((back, *gradients[1:])))
        return self.pending[-1]


class Layer:
    """Scales, reorders, adds what was carried past."""

    def __init__(self) -> None:
        self.weight = torch.linspace(0.5, 1.5, 3).requires_grad_()
        self.order = torch.tensor([2, 0, 3, 1])
        self.reorder = Reorder()

    def segments(self, **keywords: Any) -> tuple[Segment, ...]:
        return (
            Compute("before", lambda values: (torch.tanh(values[0] * self.weight), values[0], None, self.order)),
            self.reorder,
            Compute("after", lambda values: (values[0] * self.weight + values[1],)),
        )

    def plain(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)[self.order] * self.weight + x


def test_in_order_is_the_plain_function_with_its_gradients() -> None:
    layer = Layer()
    assert isinstance(layer, Segmented)
    assert isinstance(layer.reorder, Communication)
    x = torch.randn(4, 3, requires_grad=True)
    (out,) = in_order(layer.segments(), (x,))
    want = layer.plain(x)
    assert torch.equal(out, want)
    seed = torch.randn(4, 3)
    got = torch.autograd.grad(out, (x, layer.weight), seed)
    for a, b in zip(got, torch.autograd.grad(want, (x, layer.weight), seed), strict=True):
        assert torch.equal(a, b)
    assert [p.waits for p in layer.reorder.pending] == [1, 1]
    assert [None if v is None else v.tolist() for v in layer.reorder.saved[0]] == [None, None, None, [2, 0, 3, 1]]
    assert [g is None for g in layer.reorder.given[0]] == [False, False, True, True]


def test_without_gradients_no_backward_is_kept() -> None:
    layer = Layer()
    x = torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        (out,) = in_order(layer.segments(), (x,))
    assert not out.requires_grad
    layer.weight.requires_grad_(False)
    (out,) = in_order(layer.segments(), (x.detach(),))
    assert not out.requires_grad
    assert not layer.reorder.saved


class TwoPlaces(Reorder):
    """Moves the first value; the second carries too, and goes on as it is."""

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        assert all(isinstance(g, Tensor) for g in gradients[:2]), gradients
        return super().start_backward(gradients, saved)


@pytest.mark.parametrize("used", [0, 1])
def test_a_gradient_that_nobody_computed_is_zeros_so_that_every_rank_takes_part(used: int) -> None:
    communication = TwoPlaces()
    order = torch.tensor([1, 0])
    x = torch.randn(2, 3, requires_grad=True)
    values = in_order(
        (Compute("a", lambda v: (v[0] * 2, v[0] * 3, order)), communication, Compute("b", lambda v: (v[used],))), (x,)
    )
    seed = torch.randn(2, 3)
    (gradient,) = torch.autograd.grad(values[0], (x,), seed)
    assert torch.equal(gradient, 3 * seed if used else 2 * seed[order])


def test_done_is_there_at_once() -> None:
    assert Done((1, None)).wait() == (1, None)


def test_a_wrong_backward_shows() -> None:
    """Mutation: a communication whose backward forgets to put the rows back."""

    class Forgetful(Reorder):
        def start_backward(self, gradients: Values, saved: Values) -> Pending:
            return Done(gradients)

    layer = Layer()
    layer.reorder = Forgetful()
    x = torch.randn(4, 3, requires_grad=True)
    seed = torch.randn(4, 3)
    (out,) = in_order(layer.segments(), (x,))
    (got,) = torch.autograd.grad(out, (x,), seed)
    (want,) = torch.autograd.grad(layer.plain(x), (x,), seed)
    assert not torch.allclose(got, want)
