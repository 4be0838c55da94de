"""The shape of a model, as the planner needs it: from a preset, a Hugging Face `config.json`, or `[model]`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pipeloom.errors import UsageError, did_you_mean, echo
from pipeloom.limits import MODEL_CONFIG_BYTES, MOST_LAYERS, MOST_WIDTH, read_json
from pipeloom.shapes.decoder import Latent, ModelShape

# Field -> its names in the families' files, the most specific first.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_inner"),
    "vocabulary": ("vocab_size",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_width": ("moe_intermediate_size",),
    "shared_width": ("shared_expert_intermediate_size",),
    "shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "ahead": ("num_nextn_predict_layers",),
    "dense_first": ("first_k_dense_replace", "dense_layers", "moe_layer_start_index"),
}
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron", "apertus")


def presets() -> dict[str, dict[str, Any]]:
    """Name -> `config.json`, with its source under "source", of the models that are known by name."""
    return dict(json.loads(resources.files("pipeloom.shapes").joinpath("models.json").read_text(encoding="utf-8")))


def from_config(values: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape in a Hugging Face configuration. Raises UsageError, which names the key, for one that cannot be planned."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}: a model's configuration is an object, and this is {echo(values)}")
    values = {**values, **values.get("text_config", {})} if isinstance(values.get("text_config"), dict) else values

    def number(key: str, *, least: int = 0, default: int | None = None) -> int:
        spelled = next((word for word in (*_KEYS.get(key, ()), key) if values.get(word) is not None), None)
        if spelled is None:
            if default is None:
                raise UsageError(f"{name}: it has no {_KEYS[key][0]!r}")
            return default
        value = values[spelled]
        most = MOST_LAYERS if key == "layers" else MOST_WIDTH
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(
                f"{name}: {spelled!r} is {value!r:.100}; it must be a whole number from {least} to {most:,}"
            )
        return value

    layers, hidden = number("layers", least=1), number("hidden", least=1)
    heads = number("heads", least=1)
    experts = number("experts", default=0)
    family = str(values.get("model_type", ""))
    ungated = family in _UNGATED
    feed_forward = number("feed_forward", default=4 * hidden, least=1)
    expert_width = number("expert_width", default=feed_forward) if experts else 0
    shared = number("shared_width", default=number("shared_count", default=0) * expert_width) if experts else 0
    step = number("decoder_sparse_step", default=1, least=1)
    groups = number("n_group", default=1, least=1)
    latent = None
    if rank := number("kv_lora_rank", default=0):
        rope = number("qk_rope_head_dim", default=number("qk_pos_emb_head_dim", default=64))
        nope = number("qk_nope_head_dim", default=number("qk_head_dim", default=128))
        latent = Latent(number("q_lora_rank", default=0), rank, nope, rope, number("v_head_dim", default=128))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=1 if values.get("multi_query") else number("key_value_heads", default=heads, least=1),
        head_width=number("head_width", default=hidden // heads, least=1),
        feed_forward=feed_forward,
        vocabulary=number("vocabulary", least=1),
        tied=bool(values.get("tie_word_embeddings", ungated)),
        gated=not ungated,
        biases=ungated or bool(values.get("attention_bias", False)),
        positions=number("n_positions", default=number("max_position_embeddings", default=0)) if ungated else 0,
        experts=experts,
        experts_per_token=number("experts_per_token", default=1) if experts else 0,
        expert_width=expert_width,
        shared_width=shared,
        sparse=_sparse(values, layers, number("dense_first", default=0), step) if experts else (),
        latent=latent,
        ahead=number("ahead", default=0),
        routed_share=min(1.0, number("topk_group", default=groups, least=1) / groups),
    )


def _sparse(values: Mapping[str, Any], layers: int, dense_first: int, step: int) -> tuple[bool, ...]:
    """Block -> whether it has experts, in the words of the families: dense blocks first, a list of blocks, every n-th one."""
    listed = values.get("mlp_only_layers")
    dense = set(listed) if isinstance(listed, list) else set()
    frequency = values.get("moe_layer_freq", 1)
    if isinstance(frequency, list) and frequency:
        return tuple(bool(frequency[block % len(frequency)]) for block in range(layers))
    every = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return tuple(
        block >= dense_first and block not in dense and (block + 1) % step == 0 and block % every == 0
        for block in range(layers)
    )


def load(model: str) -> ModelShape:
    """The shape that `model` names: a preset, a `config.json`, or a directory that holds one.

    Raises UsageError for a name that is neither, with the nearest preset, and for a file that is not a model's.
    """
    known = presets()
    if model.lower() in known:
        return from_config(known[model.lower()], model.lower())
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        nearest = did_you_mean(model.lower(), known)
        raise UsageError(f"{model!r:.200} is neither a preset, a config.json, nor a directory with one{nearest}")
    return from_config(read_json(path, MODEL_CONFIG_BYTES, "a model's configuration"), path.parent.name or path.stem)
