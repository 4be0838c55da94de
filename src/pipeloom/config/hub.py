"""The sizes of a Hugging Face directory's model as keys of `[model]`; reads `config.json` and needs no `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError, PipeloomError
from pipeloom.limits import read_file

_MOST_BYTES = 10_000_000
# Key of [model] -> the names that families have for it. What these keys decide of a foreign model are estimates: of costs that
# stages are balanced by, of memory, of utilisation.
_SPELLINGS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")


def sizes(source: str) -> dict[str, Any]:
    """Keys of `[model]` for the model in `source`. Raises ConfigError where its configuration cannot be read."""
    path = Path(source).expanduser() / "config.json"
    try:
        content = json.loads(read_file(path, _MOST_BYTES, "a model's configuration"))
        if not isinstance(content, dict):
            raise ValueError("it holds no table")
    except (OSError, ValueError, RecursionError, PipeloomError) as error:
        raise ConfigError(f'model.source = "{source}": {path} cannot be read: {error}') from error
    inner = content.get("text_config")
    values = {**content, **inner} if isinstance(inner, dict) else content
    found = {}
    for key, spellings in _SPELLINGS.items():
        value = next((values[name] for name in spellings if isinstance(values.get(name), (int, bool))), None)
        if value is not None:
            found[key] = value
    for key in _NEEDED:
        if key not in found:
            raise ConfigError(f'model.source = "{source}": {path} has no {" or ".join(_SPELLINGS[key])}')
    blocks = expert_blocks(values, found["num_hidden_layers"])
    if found.get("num_experts") and not any(blocks):
        found["num_experts"] = 0
    elif found.get("num_experts") and not all(blocks):
        found["moe_layer_freq"] = [int(experts) for experts in blocks]
    found.setdefault("num_attention_heads", 1)
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("intermediate_size", 4 * found["hidden_size"])
    found.setdefault("tie_word_embeddings", True)  # the default of transformers
    return found


def expert_blocks(values: Mapping[str, Any], blocks: int) -> tuple[bool, ...]:
    """Return, for each of `blocks` blocks, whether a `config.json` with experts gives it some.

    Qwen-MoE has `decoder_sparse_step` (each n-th block, the n-th first) and `mlp_only_layers` (dense ones), DeepSeek
    `moe_layer_freq` (each n-th block, block 0 first; or a list) and `first_k_dense_replace`.
    """
    every, frequency = _number(values, "decoder_sparse_step", 1), values.get("moe_layer_freq")
    dense, first = values.get("mlp_only_layers"), _number(values, "first_k_dense_replace", 0)
    left_out = dense if isinstance(dense, list | tuple) else ()
    number = _number(values, "moe_layer_freq", 1)

    def has(block: int) -> bool:
        listed = frequency[block] if isinstance(frequency, list | tuple) and block < len(frequency) else 1
        return bool(
            block >= first
            and block not in left_out
            and every > 0
            and (block + 1) % every == 0
            and block % max(number, 1) == 0
            and listed
        )

    return tuple(has(block) for block in range(blocks))


def _number(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    return value if type(value) is int else default
