"""One reader of `config.json`: the trainer and the planner read the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeloom.config import load
from pipeloom.config.settings import own_keys
from pipeloom.errors import ArgumentError, ConfigError
from pipeloom.models import layers
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import HUB_FAMILIES, from_config, model_keys, own_shape
from pipeloom.shapes.hub import load as load_model
from pipeloom.shapes.layers import parameter_count

SMALL = {
    **{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 100, "intermediate_size": 96},
    "num_key_value_heads": 4,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def folder(path: Path, values: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(
    "values",
    [
        {**SMALL, "model_type": "llama", "head_dim": 16},
        {**SMALL, **EXPERTS, **LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 1},
        {**SMALL, "model_type": "gpt2", "n_positions": 32},
    ],
)
def test_the_trainer_and_the_planner_read_one_shape(tmp_path: Path, values: dict[str, Any]) -> None:
    source = folder(tmp_path, values)
    model = load(None, {"model.source": source}).model
    shape = load_model(source)
    assert model.shape() == shape
    assert parameter_count(model.shape()) == parameter_count(shape)
    assert shape.model_type == values["model_type"]
    described = {key: getattr(model, key) for key in model_keys(shape, ours=False)}
    assert described == {key: getattr(shape, key) for key in described}


def test_a_shared_expert_has_a_gate_but_in_deepseeks_family() -> None:
    values = {**SMALL, **EXPERTS, **LATENT, "n_shared_experts": 1}
    assert not from_config({**values, "model_type": "deepseek_v3"}).shared_expert_gate
    assert from_config({**SMALL, **EXPERTS, "num_shared_experts": 1}).shared_expert_gate


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"attention_bias": True}, {"attention_bias": True, "qk_norm": False}),
        ("llama", {"_model_name_or_path": "x", "unk_token_id": 0, "top_p": 0.9}, {"hidden_size": SMALL["hidden_size"]}),
        ("mistral", {"sliding_window": None}, {"attention_bias": False}),
        ("qwen2", {"qkv_bias": False}, {"qkv_bias": True, "attention_bias": False}),
        ("qwen3", {"num_key_value_heads": None}, {"qk_norm": True, "head_dim": 128, "num_key_value_heads": 8}),
        ("qwen3", {"head_dim": None}, {"head_dim": None}),
        (
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            {"num_experts": 4, "moe_intermediate_size": 96, "norm_topk_prob": True},
        ),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}, {"num_shared_experts": 2, "qkv_bias": True}),
        ("qwen3_moe", EXPERTS, {"num_experts": 4, "norm_topk_prob": False, "moe_layer_freq": 1}),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}, {"moe_layer_freq": (1, 0, 1, 1)}),
        ("", {"qk_norm": True, "qkv_bias": True, "router": "noisy", **EXPERTS}, {"qk_norm": True, "router": "noisy"}),
    ],
)
def test_families_of_our_own_decoder(kind: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = own_shape({**SMALL, "model_type": kind, **changes})
    assert {key: getattr(shape, key) for key in expected} == expected
    assert HUB_FAMILIES[kind].ours


def test_a_file_without_a_family_is_ours(tmp_path: Path) -> None:
    keys = own_keys(folder(tmp_path, {**SMALL, "qk_norm": True, "num_nextn_predict_layers": 1}))
    assert keys["qk_norm"]
    assert keys["num_nextn_predict_layers"] == 1
    with pytest.raises(ArgumentError, match="num_key_value_heads=3 does not divide 8 attention heads"):
        from_config({**SMALL, "num_key_value_heads": 3})


def test_our_own_decoder_guesses_no_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no intermediate_size"):
        own_keys(folder(tmp_path, {**SMALL, "model_type": "llama", "intermediate_size": None}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40},
            r"compute this qwen2_moe \(shared",
        ),
        ({"model_type": "qwen2_moe", **EXPERTS}, "compute this qwen2_moe$"),
        ({"model_type": "mixtral"}, "compute this mixtral$"),
        ({"model_type": "llama", "text_config": {"hidden_size": 64}}, r"compute this llama \(text_config = \{.*\}\)$"),
        ({"model_type": "llama", "clip_qkv": 8}, r"compute this llama \(clip_qkv = 8\)$"),
        ({"model_type": "phi3"}, "compute this phi3$"),
        ({"model_type": "llama", "mlp_bias": True}, r"\(mlp_bias = true\)$"),
        ({"model_type": "gpt2"}, "compute this gpt2$"),
    ],
)
def test_what_our_own_decoder_lacks_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own_shape({**SMALL, **changes})


def test_the_decoder_builds_no_shape_that_it_cannot_compute() -> None:
    with pytest.raises(ArgumentError, match=r"^shape has multi-head latent attention, which the decoder lacks"):
        layers(DecoderShape(2, 16, 2, 2, 32, 11, kv_lora_rank=4), 0)
