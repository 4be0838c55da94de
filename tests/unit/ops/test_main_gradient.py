"""Main gradients: exact sums in fp32, one buffer for life, `.grad` left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients
from pipeloom.ops.main_gradient import MainGradients


class Net(nn.Module):
    """A linear layer used twice, a norm, and a weight that no layer of ours knows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.linear = nn.Linear(16, 16, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(16, 5).to(dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.linear(self.embed(tokens)))
        out: Tensor = self.linear(x) @ self.scale
        return out


def micro_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 7, (3, 4), generator=generator) for _ in range(count)]


def buffers_of(net: nn.Module, dtype: torch.dtype) -> tuple[MainGradients, dict[str, Tensor]]:
    main = MainGradients()
    buffers = {name: torch.full(p.shape, torch.nan, dtype=dtype) for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        main.attach(parameter, buffers[name])
    main.reset(net.parameters())
    return main, buffers


def run(net: Net, grad_context: WeightGradContext, batches: list[Tensor], split: bool) -> None:
    for tokens in batches:
        queue = WeightGradQueue() if split else None
        grad_context.queue = queue
        net(tokens).square().sum().backward()
        if queue is not None:
            queue.flush()


def plain_gradients(dtype: torch.dtype, batches: list[Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    net = Net(dtype)
    net.load_state_dict(weights)
    for tokens in batches:
        net(tokens).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sums_are_those_of_autograd(split: bool, dtype: torch.dtype) -> None:
    net, grad_context = Net(dtype), WeightGradContext()
    grad_context.main, buffers = buffers_of(net, dtype)
    defer_weight_gradients(net, grad_context)
    run(net, grad_context, micro_batches(3), split)
    for name, want in plain_gradients(dtype, micro_batches(3), net.state_dict()).items():
        torch.testing.assert_close(buffers[name], want)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("split", [False, True])
def test_bf16_over_100_micro_batches(split: bool) -> None:
    """fp32 main gradients come closer to fp64 than bf16's own, in the same place all the time."""
    net, grad_context, batches = Net(torch.bfloat16), WeightGradContext(), micro_batches(100)
    grad_context.main, buffers = buffers_of(net, torch.float32)
    places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    defer_weight_gradients(net, grad_context)
    for tokens in batches:
        run(net, grad_context, [tokens], split)
        assert all(p.grad is None for p in net.parameters())
        assert {name: grad_context.main.of(p).data_ptr() for name, p in net.named_parameters()} == places
    weights = {name: value.double() for name, value in net.state_dict().items()}
    exact = plain_gradients(torch.float64, batches, weights)
    rough = plain_gradients(torch.bfloat16, batches, net.state_dict())
    singly = [plain_gradients(torch.bfloat16, [tokens], net.state_dict()) for tokens in batches]
    for name, truth in exact.items():
        # a vector's error is that of one bf16 forward and backward; what accumulation adds shows beside the exact sum of those
        summed = torch.stack([each[name].double() for each in singly]).sum(0)
        assert distance(buffers[name], summed) < distance(rough[name], summed) / 2, name
        if truth.ndim == 2:
            assert distance(buffers[name], truth) < distance(rough[name], truth), name


def distance(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())


def test_what_got_no_gradient_is_zeros_and_what_stands_in_grad_is_taken() -> None:
    used, unused, own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    main = MainGradients()
    for parameter in (used, unused, own):
        main.attach(parameter, torch.full((2,), torch.nan))
    main.reset([used, unused, own])
    (used * 3).sum().backward()
    own.grad = torch.tensor([1.0, 2.0])
    main.finalize([used, unused, own])
    assert [main.of(p).tolist() for p in (used, unused, own)] == [[3, 3], [0, 0], [1, 2]]
    main.finalize([used, unused, own])
    assert main.of(used).tolist() == [3, 3]
    assert own.grad is None


def test_no_gradients_means_no_function_of_ours() -> None:
    net, grad_context = Net(torch.float32), WeightGradContext()
    defer_weight_gradients(net, grad_context)
    assert "_Linear" not in type(net.linear(torch.ones(1, 16)).grad_fn).__name__
    grad_context.main, _ = buffers_of(net, torch.float32)
    assert "_Linear" in type(net.linear(torch.ones(1, 16)).grad_fn).__name__
    net.linear.weight.requires_grad_(False)
    net.linear.bias.requires_grad_(False)
    assert net.linear(torch.ones(1, 16)).grad_fn is None


def test_a_linear_layer_with_a_forward_of_its_own_keeps_it() -> None:
    """One that an earlier stage has given our forward gets that of the new queue."""
    own, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    forward = own.forward
    own.forward = lambda x: forward(x) + 1  # type: ignore[method-assign]
    theirs, contexts = own.forward, [WeightGradContext(), WeightGradContext()]
    for context in contexts:
        defer_weight_gradients(nn.ModuleList([own, plain]), context)
        assert own.forward is theirs
        assert plain.forward.args[1] is context  # type: ignore[attr-defined]
