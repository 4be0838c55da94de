"""The decoder on tensor-parallel ranks without a pipeline: a step's loss and whole gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.config import ModelSection, load
from pipeloom.models import layers, token_loss
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import ParameterSharding, join, shard_of, shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.shapes.mesh import MeshShape

LENGTH = 8
Gradients = dict[str, Tensor]


def model(**changes: Any) -> ModelSection:
    small = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 257}
    return load("tiny", {f"model.{key}": value for key, value in {**small, **changes}.items()}).model


@dataclass(frozen=True)
class Way:
    """How a step is run.

    Attributes:
        split: weight gradients wait until all micro-batches have had their input gradients.
        recompute: every layer's forward is run again in its backward.
    """

    split: bool = False
    recompute: bool = False
    smoothing: float = 0.0


WAYS = [Way(), Way(split=True), Way(recompute=True, smoothing=0.1), Way(split=True, recompute=True)]


def tensor_parallel(sequence: bool) -> TensorParallel:
    """All processes as the ranks of one tensor-parallel axis."""
    mesh = Mesh.of(MeshShape(tp=dist.get_world_size()))
    assert mesh is not None
    return TensorParallel(mesh.tp, sequence)


def batch(vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of 2 and 3 sequences."""
    both = torch.randint(0, vocabulary, (2, 5, LENGTH), generator=torch.Generator().manual_seed(3))
    return [(both[0, :2], both[1, :2]), (both[0, 2:], both[1, 2:])]


@torch.no_grad()
def fill_biases(built: Mapping[str, nn.Module], index: int) -> None:
    """Biases, which start at 0, with parts of the same numbers in every layout."""
    for layer, module in built.items():
        layouts = shardings_of(module)
        for inner, parameter in module.named_parameters():
            if inner.endswith("bias"):
                sharding, generator = layouts[inner], torch.Generator().manual_seed(stable_seed(5, f"{layer}.{inner}"))
                numbers = torch.randn(sharding.full_shape(parameter.shape), generator=generator)
                parameter.copy_(shard_of(numbers, sharding, {"tp": index}))


def step(shape: ModelSection, way: Way, tensor: TensorParallel | None) -> tuple[float, dict[str, nn.Module]]:
    """The loss of one step, and the layers, whose parameters have their gradients."""
    built = {layer.name: layer() for layer in layers(shape, 5, torch.float32, "cpu", tensor)}
    fill_biases(built, 0 if tensor is None else tensor.index)
    microbatches = list(enumerate(batch(shape.vocab_size)))
    return run(built, token_loss(shape, way.smoothing, tensor), way, microbatches, 5 * LENGTH), built


def run(
    built: Mapping[str, nn.Module],
    loss_of: Callable[..., Tensor],
    way: Any,
    microbatches: Iterable[tuple[int, tuple[Tensor, Tensor]]],
    tokens_of_step: int,
) -> float:
    """Forward and backward of numbered micro-batches, in the `split` and `recompute` way; return the sum of their losses."""
    grad_context, queues, total = WeightGradContext(), [], 0.0
    for module in built.values() if way.split else ():
        defer_weight_gradients(module, grad_context)
    for number, (tokens, targets) in microbatches:
        share = targets.numel() / tokens_of_step
        context = MicrobatchContext(step=2, index=number, share=share, first=10 * number, samples=len(tokens))
        grad_context.queue = WeightGradQueue()
        queues.append(grad_context.queue)
        x = tokens
        for name, module in built.items():
            given = {"microbatch": context} if name.startswith("model.layers") else {}
            x = checkpoint(module, x, use_reentrant=False, **given) if way.recompute else module(x, **given)
        loss = loss_of(x, targets) * share
        loss.backward()
        total += loss.item()
    for queue in queues:
        queue.flush()
    return total


def serial(shape: ModelSection, way: Way) -> tuple[float, Gradients]:
    """One process, backward in one, nothing recomputed."""
    loss, built = step(shape, Way(smoothing=way.smoothing), None)
    return loss, {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}


def parts(built: Mapping[str, nn.Module], *, sum_partial: bool = True) -> dict[str, tuple[ParameterSharding, Any]]:
    """Of each parameter: its layout and this rank's gradient; those that saw a part of the tokens are summed first.

    As arrays: a tensor on its way to another process needs its own process to live until it has arrived.
    """
    found = {}
    for layer, module in built.items():
        layouts = shardings_of(module)
        for inner, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{layer}.{inner}"
            if layouts[inner].partial and sum_partial:
                dist.all_reduce(parameter.grad)
            found[f"{layer}.{inner}"] = (layouts[inner], parameter.grad.numpy())
    return found


def whole(ranks: Sequence[Mapping[str, tuple[ParameterSharding, Any]]]) -> Gradients:
    """Joined gradients; those held by all ranks must be bitwise equal."""
    joined = {}
    for name, (sharding, _) in ranks[0].items():
        each = [torch.from_numpy(rank[name][1]) for rank in ranks]
        if sharding.shards:
            joined[name] = join({(at,): gradient for at, gradient in enumerate(each)}, sharding)
        else:
            assert all(torch.equal(each[0], other) for other in each), name
            joined[name] = each[0]
    return joined


def worst(found: Gradients, want: Gradients) -> float:
    """The largest max |a - b| / max |b| of a parameter."""
    assert found.keys() == want.keys()
    return max(float((found[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-12)) for name in want)
