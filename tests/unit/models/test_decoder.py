"""The decoder against naive formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeloom.config import load
from pipeloom.config.sections import ModelSection
from pipeloom.models import cross_entropy, hub_name, layers
from pipeloom.models.decoder import RMSNorm, rotary_table, rotate
from pipeloom.shapes.layers import layer_sizes


def shape(**changes: Any) -> ModelSection:
    return load("tiny", {f"model.{key}": value for key, value in changes.items()}).model


def turned(x: Tensor, theta: float) -> Tensor:
    return rotate(x, rotary_table(x.shape[-2], x.shape[-1], theta, x.dtype, x.device))


def naive_rotation(x: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + width / 2) as complex numbers, each turned by its own angle."""
    width = x.shape[-1]
    turned = torch.empty_like(x)
    for t in range(x.shape[-2]):
        for i in range(width // 2):
            angle = t * theta ** (-2 * i / width)
            a, b = x[..., t, i], x[..., t, i + width // 2]
            turned[..., t, i] = a * math.cos(angle) - b * math.sin(angle)
            turned[..., t, i + width // 2] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_rotary_positions_turn_pairs_as_complex_numbers() -> None:
    x = normal(2, 3, 7, 8)
    torch.testing.assert_close(turned(x, 100.0), naive_rotation(x, 100.0), rtol=0, atol=1e-5)


OPTIONS = [
    {"rms_norm_eps": 0.5},
    {"qkv_bias": True},
    {"attention_bias": True, "num_key_value_heads": 1},
    {"head_dim": 6},
    {"head_dim": 20, "qkv_bias": True, "rms_norm_eps": 1e-2},
]


def plain_block(weights: dict[str, Tensor], model: ModelSection, x: Tensor) -> Tensor:
    """A dense block written out with its parameters alone, for the options of `model`."""

    def norm(name: str, given: Tensor) -> Tensor:
        return given / (given.square().mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def linear(name: str, given: Tensor) -> Tensor:
        out = given @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    width = model.head_dim or model.hidden_size // model.num_attention_heads
    heads, groups, length = model.num_attention_heads, model.num_key_value_heads, x.shape[1]
    normed = norm("input_layernorm", x)
    query, key, value = (
        linear(f"self_attn.{part}_proj", normed).view(len(x), length, -1, width).transpose(1, 2) for part in "qkv"
    )
    query, key = turned(query, model.rope_theta), turned(key, model.rope_theta)
    key, value = (part.repeat_interleave(heads // groups, 1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
    attended = x + linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
    normed = norm("post_attention_layernorm", attended)
    gate = linear("mlp.gate_proj", normed)
    return attended + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", normed))


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_hugging_face_s_options_are_the_plain_formulas_with_every_gradient(changes: dict[str, Any]) -> None:
    model = shape(**changes)
    block = layers(model, 0, torch.float64)[1]()
    for at, (name, parameter) in enumerate(block.named_parameters()):
        if name.endswith("bias"):
            assert not parameter.any(), "biases start at 0"
            with torch.no_grad():
                parameter.copy_(normal(at + 1, *parameter.shape)[at])
    x, seed = normal(2, 6, 32).requires_grad_(), normal(3, 2, 6, 32)[2]
    weights = dict(block.named_parameters())
    wanted = {"x": x, **weights}
    found = torch.autograd.grad(block(x), list(wanted.values()), seed)
    out = plain_block(weights, model, x)
    torch.testing.assert_close(block(x), out, rtol=0, atol=1e-5)
    for name, gradient, want in zip(wanted, found, torch.autograd.grad(out, list(wanted.values()), seed), strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    default = layers(shape(), 0, torch.float64)[1]()
    if {name: p.shape for name, p in default.named_parameters()} == {name: p.shape for name, p in weights.items()}:
        assert not torch.allclose(default(x), out)


@pytest.mark.parametrize(
    ("changes", "biases"),
    [({}, ""), ({"qkv_bias": True}, "qkv"), ({"attention_bias": True}, "qkvo"), ({"head_dim": 20}, "")],
)
def test_biases_are_those_of_hugging_face(changes: dict[str, Any], biases: str) -> None:
    model = shape(**changes)
    block = layers(model, 0)[1]()
    found = {name for name, _ in block.named_parameters() if name.endswith("bias")}
    assert found == {f"self_attn.{part}_proj.bias" for part in biases}
    width = changes.get("head_dim", 8)
    assert block.get_parameter("self_attn.q_proj.weight").shape == (4 * width, 32)
    assert block.get_parameter("self_attn.k_proj.weight").shape == (2 * width, 32)
    assert block.get_parameter("self_attn.o_proj.weight").shape == (32, 4 * width)


def test_the_last_norm_has_the_same_epsilon() -> None:
    head = layers(shape(rms_norm_eps=0.5), 0, torch.float64)[-1]()
    x = normal(1, 2, 32)
    normed = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(head(x), normed @ head.lm_head.weight.T, rtol=0, atol=1e-6)


def test_the_norm_of_low_precision_is_computed_in_fp32() -> None:
    norm, x = RMSNorm(4).bfloat16(), torch.tensor([[300.0, -300.0, 300.0, 300.0]], dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    assert norm(x).tolist() == [[1.0, -1.0, 1.0, 1.0]]


def test_the_loss_is_the_mean_in_fp32() -> None:
    logits, targets = normal(2, 3, 5).bfloat16(), torch.tensor([[0, 1, 2], [3, 4, 0]])
    wide = logits.float()
    want = -sum(torch.log_softmax(wide[i, j], -1)[targets[i, j]] for i in range(2) for j in range(3)) / 6
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("changes", [{}, *OPTIONS, {"num_nextn_predict_layers": 2, "num_experts": 2}], ids=str)
def test_layers_have_the_sizes_that_the_configuration_counts(changes: dict[str, Any]) -> None:
    model = shape(**changes)
    built = [layer() for layer in layers(model, seed=0)]
    counted = [size.parameters for size in layer_sizes(model.shape(), 16)]
    assert [sum(p.numel() for p in module.parameters()) for module in built] == counted


def test_tokens_go_in_and_logits_near_uniform_come_out() -> None:
    model = shape()
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    x = tokens
    for layer in layers(model, seed=0):
        x = layer()(x)
    assert x.shape == (3, 16, 256)
    assert abs(cross_entropy(x, tokens).item() - math.log(256)) < 0.5


def test_names_are_those_of_hugging_face() -> None:
    names = {
        hub_name(f"{layer.name}.{inner}") for layer in layers(shape(), 0) for inner, _ in layer().named_parameters()
    }
    block = [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    blocks = {f"model.layers.{index}.{part}.weight" for index in range(4) for part in block}
    assert names == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} | blocks
