"""Memory and time of each layer of a layout, measured in this process with one layer of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.config import Layout
from pipeloom.config.stages import LayerSize, layer_sizes
from pipeloom.errors import ConfigError, PipeloomError, UsageError
from pipeloom.ops.deferred import WeightGradContext, defer_weight_gradients
from pipeloom.ops.layer import KEYWORD, MicrobatchContext
from pipeloom.train.build import PARAMETER_DTYPES, model_layers, moe_classes, recomputed, training_loss
from pipeloom.train.workers.preflight import worker_threads

# Most operations of a pass over one layer (a second or two on one core); longer sequences are shortened to stay below.
MOST_FLOPS = 2e10
MOST_PARAMETERS = 3e8  # most parameters of a layer that is built: 1.2 GB in fp32
_PASSES = 3  # the first one does not count, because it allocates memory


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer for one micro-batch.

    Attributes:
        forward, backward: seconds; the backward of a layer that is recomputed includes a second forward.
        activation: bytes held from the forward until the backward.
        again: additional bytes held during the backward of a layer that is recomputed.
    """

    forward: float
    backward: float
    activation: float
    again: float = 0.0


@dataclass(frozen=True)
class LayerCosts:
    """The costs of all layers.

    Attributes:
        layers: costs of the embedding, the blocks, and the output layer with the loss, for `rows` sequences of the full length.
        rows: number of sequences in the largest micro-batch.
        tokens: length of the sequences that were measured; less than train.seq_len if a pass would take too long.
        threads: number of threads that computed.
    """

    layers: tuple[LayerCost, ...]
    rows: int
    tokens: int
    threads: int


def measure_layers(layout: Layout) -> LayerCosts:
    """Build one layer of each kind, unsharded, on the CPU, and run forward and backward of one micro-batch through it.

    Layers of equal sizes are of one kind. Where sequences were shortened, bytes are scaled by the number of tokens, and seconds
    by the number of operations.

    Raises:
        UsageError: a layer is too large to be built, or returns more than one tensor.
        ConfigError: a layer's forward or backward fails.
    """
    config = layout.config
    seq_len, rows = config.train.seq_len, max(layout.microbatch_sizes)
    sizes = layer_sizes(config.model, seq_len)
    largest = max(size.parameters for size in sizes)
    if largest > MOST_PARAMETERS:
        raise UsageError(
            f"a layer has {largest:,} parameters, more than the {MOST_PARAMETERS:,.0f} that a dry run builds"
        )
    tokens = seq_len
    while tokens > 16 and max(size.flops for size in layer_sizes(config.model, tokens)) * rows > MOST_FLOPS:
        tokens //= 2
    cut = layer_sizes(config.model, tokens)
    threads, before = worker_threads(config.train.threads, layout.world_size), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kinds = _measure_kinds(layout, sizes, rows, tokens)
    finally:
        torch.set_num_threads(before)
    recomputed_names = recomputed(config)
    names = [layer.name for layer in model_layers(config, PARAMETER_DTYPES[config.train.dtype], torch.device("cpu"))]
    layers = []
    for size, short, name in zip(sizes, cut, names, strict=True):
        cost, received = kinds[size]
        work, length = size.flops / short.flops, seq_len / tokens
        cost = LayerCost(cost.forward * work, cost.backward * work, cost.activation * length)
        if recomputed_names != "none" and name in recomputed_names:
            backward, input_bytes = cost.forward + cost.backward, received * length
            cost = LayerCost(cost.forward, backward, input_bytes, max(0.0, cost.activation - input_bytes))
        layers.append(cost)
    return LayerCosts(tuple(layers), rows, tokens, threads)


def _measure_kinds(
    layout: Layout, sizes: list[LayerSize], rows: int, tokens: int
) -> dict[LayerSize, tuple[LayerCost, int]]:
    """Return size of a layer -> (its cost, bytes of its input)."""
    config, device = layout.config, torch.device("cpu")
    sources = model_layers(config, PARAMETER_DTYPES[config.train.dtype], device, classes=moe_classes(layout))
    loss = training_loss(config)
    generator = torch.Generator().manual_seed(config.train.seed)
    inputs, targets = torch.randint(0, config.model.vocab_size, (2, rows, tokens), generator=generator)
    kinds: dict[LayerSize, tuple[LayerCost, int]] = {}
    x = inputs
    for source, size in zip(sources, sizes, strict=True):
        if size in kinds:
            continue
        module = source()
        module.train()
        defer_weight_gradients(module, WeightGradContext())
        last = (lambda out: loss(out, targets)) if size is sizes[-1] else None
        try:
            cost, output = _measure(module, x, last, MicrobatchContext(samples=rows))
        except PipeloomError:
            raise
        except (
            Exception
        ) as error:  # of a foreign model whose configuration contradicts itself, or of a class of the user's
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"layer {source.name!r} cannot run: {type(error).__name__}: {reason}") from error
        kinds[size] = cost, x.nbytes
        x = output.detach().requires_grad_()
    return kinds


def _measure(
    module: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] | None, context: MicrobatchContext
) -> tuple[LayerCost, Tensor]:
    keywords = {KEYWORD: context} if KEYWORD in signature(module.forward).parameters else {}
    held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    times = []
    for _ in range(_PASSES):
        saved: dict[int, int] = {}
        begun = time.perf_counter()
        with _noting(saved):
            output = module(x, **keywords)
            if not isinstance(output, Tensor):
                raise UsageError("a layer returns more than one tensor")
            result = output if loss is None else loss(output)
        middle = time.perf_counter()
        if result.requires_grad:
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
        times.append((middle - begun, time.perf_counter() - middle))
    forward, backward = (min(each) for each in zip(*times[1:], strict=True))
    return LayerCost(forward, backward, sum(size for place, size in saved.items() if place not in held)), output


@contextmanager
def _noting(saved: dict[int, int]) -> Iterator[None]:
    """Record the address and the bytes of each storage that autograd saves for the backward."""

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
