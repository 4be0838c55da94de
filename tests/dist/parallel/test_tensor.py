"""Column and row linear layers: values, gradients, what they communicate, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from collective_log import recorded, started
from layouts import model, tensor_parallel
from pipeloom.errors import ConfigError, UsageError
from pipeloom.models import layers
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import shard_of, shardings_of
from pipeloom.parallel.tensor import ColumnLinear, RowLinear, TensorParallel, enter, project, sum_over_ranks
from processes import run_ranks, wait_for

pytestmark = pytest.mark.core

WIDTH, INNER, BATCH, LENGTH = 6, 10, 3, 8
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Pair(nn.Module):
    """Two column layers on one input, one row layer, with biases."""

    def __init__(self, tensor: TensorParallel) -> None:
        super().__init__()
        half = tensor.split(INNER, "inner")
        self.left = ColumnLinear(WIDTH, half, tensor, bias=True)
        self.right = ColumnLinear(WIDTH, half, tensor, bias=True)
        self.down = RowLinear(half, WIDTH, tensor, bias=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        left, right = project(x, self.left, self.right)
        out: Tensor = self.down(torch.tanh(left) * right)
        return out


def whole_parameters() -> dict[str, Tensor]:
    shapes = {
        "left.weight": (INNER, WIDTH),
        "left.bias": (INNER,),
        "right.weight": (INNER, WIDTH),
        "right.bias": (INNER,),
        "down.weight": (WIDTH, INNER),
        "down.bias": (WIDTH,),
    }
    return {name: normal(*shape, seed=at + 1) for at, (name, shape) in enumerate(shapes.items())}


def filled(tensor: TensorParallel) -> Pair:
    pair = Pair(tensor)
    layouts, full = shardings_of(pair), whole_parameters()
    with torch.no_grad():
        for name, parameter in pair.named_parameters():
            parameter.copy_(shard_of(full[name], layouts[name], {"tp": tensor.index}))
    return pair


def serial_pair(x: Tensor, seed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: value.requires_grad_() for name, value in whole_parameters().items()}
    x = x.clone().requires_grad_()
    left, right = (F.linear(x, p[f"{side}.weight"], p[f"{side}.bias"]) for side in ("left", "right"))
    out = F.linear(torch.tanh(left) * right, p["down.weight"], p["down.bias"])
    out.backward(seed)
    return out.detach(), {"x": x.grad, **{name: value.grad for name, value in p.items()}}


def own_tokens(x: Tensor, tensor: TensorParallel) -> Tensor:
    return x.chunk(tensor.size, -2)[tensor.index] if tensor.sequence else x


def check_pair(tensor: TensorParallel, lead: tuple[int, ...], split: bool) -> dict[str, list[str]]:
    """A pair's output and gradients are the serial ones; what was logged forward, in I and in W."""
    x, seed = normal(*lead, LENGTH, WIDTH, seed=9), normal(*lead, LENGTH, WIDTH, seed=10)
    want_out, want = serial_pair(x, seed)
    pair, grad_context = filled(tensor), WeightGradContext()
    defer_weight_gradients(pair, grad_context)
    queue = grad_context.queue = WeightGradQueue() if split else None
    mine = own_tokens(x, tensor).clone().requires_grad_()
    saved: list[torch.Size] = []
    with recorded() as forward, saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = pair(mine)
    assert mine.shape in saved
    assert not tensor.sequence or x.shape not in saved, "the gathered input is not kept"
    with recorded() as backward:
        out.backward(own_tokens(seed, tensor))
    with recorded() as weights:
        if queue is not None:
            assert pair.left.weight.grad is None
            queue.flush()
    torch.testing.assert_close(out, own_tokens(want_out, tensor))
    torch.testing.assert_close(mine.grad, own_tokens(want["x"], tensor))
    for name, sharding in shardings_of(pair).items():
        gradient = pair.get_parameter(name).grad
        assert gradient is not None
        if sharding.partial:
            gradient = sum_over_ranks(gradient.clone(), TensorParallel(tensor.axis))
        torch.testing.assert_close(gradient, shard_of(want[name], sharding, {"tp": tensor.index}))
    return {"forward": forward, "backward": backward, "weights": weights}


def shared_gradients(rank: int) -> None:
    """The sum in `enter`'s backward leaves alone the gradient that came, which another operation has got too."""
    tensor = tensor_parallel(False)
    x, y = (normal(2, 4, WIDTH, seed=seed).requires_grad_() for seed in (1, 2))
    seed = normal(2, 4, WIDTH, seed=3 + rank)
    given = seed.clone()
    (enter(x, tensor) + y).backward(given)
    assert torch.equal(given, seed)
    torch.testing.assert_close(y.grad, seed)
    torch.testing.assert_close(x.grad, normal(2, 4, WIDTH, seed=3) + normal(2, 4, WIDTH, seed=4))


def unsupported(rank: int) -> None:
    shared_gradients(rank)
    pair, x = filled(tensor_parallel(False)), normal(BATCH, LENGTH, WIDTH, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(pair(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        slope.sum().backward()
    with pytest.raises(RuntimeError, match=r"autograd.Function with functorch transforms"):
        torch.func.vmap(pair)(normal(2, BATCH, LENGTH, WIDTH, seed=1))


def test_what_is_not_supported_says_so() -> None:
    run_ranks(unsupported, 2)


def pairs(rank: int) -> dict[Any, dict[str, list[str]]]:
    return {
        (sequence, lead, split): check_pair(tensor_parallel(sequence), lead, split)
        for sequence in (False, True)
        for lead in ((), (1,), (BATCH,), (2, 2))
        for split in (False, True)
    }


def test_a_pair_equals_one_process_and_costs_one_collective_each_way() -> None:
    for (sequence, _, split), log in run_ranks(pairs, 2)[0].items():
        weight_product = f"product {(INNER // 2, WIDTH)}"
        if not sequence:
            assert started(log["forward"]) == [ALL_REDUCE]
            assert started(log["backward"]) == [ALL_REDUCE]
            assert started(log["weights"]) == []
        else:
            assert started(log["forward"]) == [ALL_GATHER, REDUCE_SCATTER]
            again = [ALL_GATHER]  # of the input shard, for the weight gradients
            assert started(log["backward"]) == [ALL_GATHER, *([] if split else again), REDUCE_SCATTER]
            assert started(log["weights"]) == (again if split else [])
        if split:
            assert weight_product not in log["backward"]
            assert log["weights"].count(weight_product) == 2
            continue
        # the reduction of dx starts before the first weight gradient, and is waited for after the last
        name = REDUCE_SCATTER if sequence else ALL_REDUCE
        events = log["backward"]
        first = events.index(weight_product)
        last = len(events) - 1 - events[::-1].index(weight_product)
        assert events.index(f"{name} started") < first < last < events.index(f"{name} waited for")
        if sequence:  # the input is on its way while dx is computed
            dx = [at for at, event in enumerate(events) if event.startswith("product") and event.endswith(f"{WIDTH})")]
            regather = len(events) - 1 - events[::-1].index(f"{ALL_GATHER} started")
            assert regather < max(at for at in dx if at < first) < events.index(f"{ALL_GATHER} waited for", regather)


GRADIENTS = 3 * BATCH * LENGTH * (WIDTH // 2)  # elements


def queue_of_three(rank: int) -> tuple[list[str], int]:
    """W of three column layers, one after the other, on their shards of the tokens."""
    tensor = tensor_parallel(True)
    grad_context = WeightGradContext()
    grad_context.queue = WeightGradQueue()
    linears = [ColumnLinear(WIDTH, (WIDTH // 2,) * 2, tensor) for _ in range(3)]
    x = normal(BATCH, LENGTH // 2, WIDTH).float()
    for linear in linears:
        nn.init.normal_(linear.weight)
        linear.set_weight_grad_context(grad_context)
    with LiveBytes() as live:
        for linear in linears:
            linear(x).square().sum().backward()
        wait_for(lambda: live.now <= GRADIENTS * x.element_size(), 5.0)  # gloo's thread drops a message that is through
    held = live.now // x.element_size()
    with recorded() as log:
        grad_context.queue.flush()
    return log, held


def test_w_gathers_the_next_input_while_it_computes() -> None:
    log, held = run_ranks(queue_of_three, 2)[0]
    gather, product = [f"{ALL_GATHER} started", f"{ALL_GATHER} waited for"], f"product {(WIDTH // 2, WIDTH)}"
    started_, waited = gather
    assert log == [started_, started_, waited, product, started_, waited, product, waited, product]
    assert held == GRADIENTS, "the queue holds gradients of outputs; inputs are held as shards, by the gather"


def frozen_and_main(rank: int) -> list[bool]:
    """A frozen column weight gets no gradient; a main gradient takes the others' in place."""
    tensor = tensor_parallel(True)
    x, seed = normal(BATCH, LENGTH, WIDTH, seed=9), normal(BATCH, LENGTH, WIDTH, seed=10)
    _, want = serial_pair(x, seed)
    verdicts = []
    for split in (False, True):
        pair, grad_context, main = filled(tensor), WeightGradContext(), MainGradients()
        pair.right.weight.requires_grad_(False)
        defer_weight_gradients(pair, grad_context)
        grad_context.main = main
        for weight in (pair.left.weight, pair.down.weight):
            main.attach(weight, torch.zeros_like(weight))
        queue = grad_context.queue = WeightGradQueue() if split else None
        pair(own_tokens(x, tensor)).backward(own_tokens(seed, tensor))
        if queue is not None:
            queue.flush()
        layouts = shardings_of(pair)
        verdicts.append(pair.right.weight.grad is None)
        for name in ("left.weight", "down.weight"):
            weight = pair.get_parameter(name)
            part = shard_of(want[name], layouts[name], {"tp": rank})
            verdicts.append(weight.grad is None and torch.allclose(main.of(weight), part))
    return verdicts


def test_frozen_weights_and_main_gradients() -> None:
    for verdicts in run_ranks(frozen_and_main, 2):
        assert all(verdicts), verdicts


def all_frozen(rank: int) -> tuple[list[torch.Size], bool]:
    """What frozen column layers keep, and whether their input gets its gradient all the same."""
    tensor, saved = tensor_parallel(True), []
    x, seed = normal(BATCH, LENGTH, WIDTH, seed=9), normal(BATCH, LENGTH, WIDTH, seed=10)
    pair = filled(tensor).requires_grad_(False)
    mine = own_tokens(x, tensor).clone().requires_grad_()
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = pair(mine)
    out.backward(own_tokens(seed, tensor))
    return saved, torch.allclose(mine.grad, own_tokens(serial_pair(x, seed)[1]["x"], tensor))


def test_frozen_column_layers_keep_no_input() -> None:
    for saved, right in run_ranks(all_frozen, 2):
        assert right
        assert (BATCH, LENGTH // 2, WIDTH) not in saved


def a_fake(size: int, index: int = 0, sequence: bool = False) -> TensorParallel:
    return TensorParallel(Axis(tuple(range(size)), index, None), sequence)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_starts_from_parts_of_the_same_weights(ranks: int, tied: bool) -> None:
    shape = model(tie_word_embeddings=tied)
    plain = {layer.name: layer() for layer in layers(shape, 5)}
    for index in range(ranks):
        for layer in layers(shape, 5, tensor=a_fake(ranks, index)):
            module, same = layer(), plain[layer.name]
            layouts = shardings_of(module)
            assert layouts.keys() == dict(same.named_parameters()).keys()
            for name, parameter in module.named_parameters():
                part = shard_of(same.get_parameter(name), layouts[name], {"tp": index})
                assert torch.equal(parameter, part)
                assert parameter.numel() < same.get_parameter(name).numel() or "norm" in name


def test_norms_are_partial_under_sequence_parallelism_only() -> None:
    for sequence in (False, True):
        block = layers(model(), 5, tensor=a_fake(2, sequence=sequence))[1]()
        partial = {name for name, sharding in shardings_of(block).items() if sharding.partial}
        norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
        assert partial == (norms if sequence else set())


def test_what_the_ranks_do_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^tp=4 does not divide 2 key and value heads; nearest: 2$"):
        layers(model(num_key_value_heads=2), 5, tensor=a_fake(4))[1]()
    with pytest.raises(ConfigError, match=r"^tp=3 does not divide 4 attention heads; nearest: 2 or 4$"):
        layers(model(), 5, tensor=a_fake(3))[1]()
    with pytest.raises(
        ConfigError, match=r"^tp=4 does not divide 62 columns inside the feed-forward part; nearest: 2 or 31$"
    ):
        layers(model(intermediate_size=62), 5, tensor=a_fake(4))[1]()
    with pytest.raises(UsageError, match=r"2 tensor-parallel ranks must divide the 7 tokens .* nearest: 6 or 8"):
        sum_over_ranks(torch.zeros(1, 7, 4), a_fake(2, sequence=True))
