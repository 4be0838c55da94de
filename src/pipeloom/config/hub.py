"""The sizes of a Hugging Face directory's model as keys of `[model]`; reads `config.json` and needs no `transformers`."""

from __future__ import annotations

import json
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
    found.setdefault("num_attention_heads", 1)
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("intermediate_size", 4 * found["hidden_size"])
    found.setdefault("tie_word_embeddings", True)  # the default of transformers
    return found
