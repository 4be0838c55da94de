"""Parameters and operations of `shapes` against those of the modules that are built."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.config import load
from pipeloom.models import layers
from pipeloom.models.mtp import hidden_name
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.shapes.decoder import ROUTERS, DecoderShape
from pipeloom.shapes.hub import load as load_model
from pipeloom.shapes.hub import presets
from pipeloom.shapes.layers import held_parameters, layer_sizes, parameter_count, training_flops, whole_layers
from pipeloom.shapes.ops import RUNTIMES, Split, layers_of, parameters_of

TOKENS = 8


def grouped_operations(x: Sequence[int], y: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Operations of products of groups of rows, or over groups of rows, which torch's counter leaves out."""
    return 2 * x[0] * x[1] * y[-1]


GROUPED = {torch.ops.aten._grouped_mm: grouped_operations}


def random_shape(seed: int) -> DecoderShape:
    """A small `[model]` of any kind: dense, experts, norms of queries, biases, a shared expert, predictions, tied weights."""
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 4])
    blocks = rng.choice([1, 2, 3])
    keys: dict[str, Any] = {
        "num_hidden_layers": blocks,
        "hidden_size": heads * rng.choice([2, 4, 6]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([count for count in (1, 2, 4) if heads % count == 0]),
        "intermediate_size": rng.choice([3, 8, 10]),
        "vocab_size": rng.choice([11, 16]),
        "attention_bias": rng.random() < 0.3,
        "qkv_bias": rng.random() < 0.3,
        "qk_norm": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "num_nextn_predict_layers": rng.choice([0, 0, 1, 2]),
    }
    if rng.random() < 0.3:
        keys["head_dim"] = rng.choice([2, 4, 10])
    if rng.random() < 0.6:
        router = rng.choice(sorted(ROUTERS))
        keys |= {
            "num_experts": rng.choice([2, 4]),
            "num_experts_per_tok": ROUTERS[router] or rng.choice([1, 2]),
            "moe_intermediate_size": rng.choice([0, 3, 7]),
            "num_shared_experts": rng.choice([0, 0, 1, 2]),
            "router": router,
            "moe_layer_freq": rng.choice([1, 2, [1] + [0] * (blocks - 1)]),
        }
    shape = load("tiny", {f"model.{key}": value for key, value in keys.items()}).model.shape()
    assert all(
        getattr(shape, key) == (tuple(value) if isinstance(value, list) else value) for key, value in keys.items()
    )
    return shape


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def built_parameters(shape: DecoderShape) -> list[int]:
    """Parameters of each layer, on the meta device."""
    return [parameters(layer()) for layer in layers(shape, 0, device="meta")]


@contextmanager
def attention_operations() -> Iterator[list[int]]:
    """Operations of the forward of each call of attention, of which the mask leaves half."""
    counted: list[int] = []
    plain = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options["is_causal"]
        rows, heads, tokens, width = query.shape
        counted.append(rows * heads * tokens * key.shape[2] * (width + value.shape[-1]))
        return query * key.mean() * value.mean()  # without products of its own

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield counted
    finally:
        F.scaled_dot_product_attention = plain


def counted_operations(module: nn.Module, letter: str, shape: DecoderShape) -> int:
    """Operations of the products in the forward and the backward of a layer that is built, for one sequence."""
    x = torch.randn(1, TOKENS, shape.hidden_size, requires_grad=True)
    depth = shape.num_nextn_predict_layers
    keywords: dict[str, Any] = {} if letter == "L" else {"microbatch": MicrobatchContext(samples=1)}
    if letter == "m":
        keywords |= {"embedding": torch.randn_like(x, requires_grad=True)}
    if letter == "L" and depth:
        targets = torch.zeros(1, TOKENS, depth, dtype=torch.int64)
        keywords = {"mtp_targets": targets}
        keywords |= {hidden_name(at): torch.randn_like(x, requires_grad=True) for at in range(1, depth + 1)}
    with attention_operations() as attention, FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        # GShard's gate leaves out second choices at random in training.
        results = module.train(shape.router != "gshard")(x, **keywords)
        tensors = [each for each in leaves(results) if each.requires_grad]
        torch.autograd.backward(sum(each.square().sum() for each in tensors))
    return counter.get_total_flops() + 3 * sum(attention)


def leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


def compare_parameters(shape: DecoderShape) -> None:
    """The trainer's count and the planner's, of each layer, and of the whole model."""
    counted = built_parameters(shape)
    assert [size.parameters for size in layer_sizes(shape, 16)] == counted
    assert [sum(layer.parameters) for layer in layers_of(shape, Split(RUNTIMES["pipeloom"], 16, 16))] == counted
    tied = shape.vocab_size * shape.hidden_size * shape.tie_word_embeddings
    assert parameter_count(shape) == sum(parameters_of(whole_layers(shape, 1))) == sum(counted) - tied
    assert held_parameters(shape, 1, 1) == parameter_count(shape)


def compare_operations(shape: DecoderShape) -> None:
    sizes = layer_sizes(shape, TOKENS)
    planned = layers_of(shape, Split(RUNTIMES["pipeloom"], TOKENS, TOKENS))
    assert [layer.flops for layer in planned] == [size.flops for size in sizes]
    built = layers(shape, 0)
    for size, layer in list(zip(sizes, built, strict=True))[1:]:
        assert size.flops == counted_operations(layer(), size.letter, shape), (size.letter, shape)
    depth = 1 + shape.num_nextn_predict_layers
    assert sizes[0].flops == depth * TOKENS * shape.hidden_size  # additions of the embedding's gradient
    assert training_flops(shape, TOKENS, 3) == 3 * sum(size.flops for size in sizes)


def samples(start: int, size: int, end: int) -> list[Any]:
    """Ranges of seeds, of which the first is of the fast tier and the last of `make full`."""
    ranges = {range(start, start + size): [], range(start + size, end): [pytest.mark.slow, pytest.mark.full]}
    return [pytest.param(each, marks=marks, id=str(each)) for each, marks in ranges.items()]


@pytest.mark.parametrize("seeds", samples(0, 25, 200))
def test_parameters_are_those_of_the_built_layers(seeds: range) -> None:
    for seed in seeds:
        compare_parameters(random_shape(seed))


@pytest.mark.parametrize("seeds", samples(0, 8, 200))
def test_operations_are_those_of_the_built_layers(seeds: range) -> None:
    for seed in seeds:
        compare_operations(random_shape(seed))


@pytest.mark.parametrize("name", [name for name in presets() if not load_model(name).foreign])
def test_presets_have_the_parameters_of_their_layers(name: str) -> None:
    shape = load(None, {"model.preset": name}).model.shape()
    assert shape == load_model(name)
    compare_parameters(shape.with_layers(2))


@pytest.mark.slow
def test_random_shapes_are_of_all_kinds() -> None:
    shapes = [random_shape(seed) for seed in range(200)]
    kinds = {
        "dense": lambda shape: not shape.num_experts,
        "alternating": lambda shape: shape.num_experts and len(set(shape.expert_blocks)) == 2,
        "noisy": lambda shape: shape.num_experts and shape.router == "noisy",
        "shared": lambda shape: shape.num_experts and shape.num_shared_experts,
        "predictions behind experts": lambda shape: shape.num_nextn_predict_layers and shape.expert_blocks[-1],
        "norms and biases": lambda shape: shape.qk_norm and shape.attention_bias,
        "tied": lambda shape: shape.tie_word_embeddings,
    }
    assert all(sum(map(bool, map(kind, shapes))) >= 5 for kind in kinds.values())


def test_a_model_cut_to_dense_blocks_has_no_experts() -> None:
    shape = replace(random_shape(0), num_experts=2, num_hidden_layers=3, moe_layer_freq=(0, 0, 1))
    assert not shape.with_layers(2).num_experts
    assert shape.with_layers(3).expert_blocks == (False, False, True)
