"""The configuration of an adapter in peft's format as keys of `[lora]`; reads `adapter_config.json` and needs no `peft`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError, PipeloomError
from pipeloom.limits import expanded, read_file

ADAPTER_CONFIG = "adapter_config.json"
_MOST_ADAPTER_BYTES = 10_000_000
# Options of peft that make an adapter compute something other than s B A x on whole linear layers; None or empty: unused.
_UNSUPPORTED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "exclude_modules", "trainable_token_indices", "megatron_config", "layer_replication"),
    *("lora_bias", "alora_invocation_tokens", "use_bdlora"),
)


def adapter_keys(adapter: str) -> dict[str, Any]:
    """Return the keys of `[lora]` that describe the adapter in the directory `adapter`.

    Raises ConfigError where its configuration cannot be read, or asks for more than low-rank products on linear layers.
    """
    where = f'lora.adapter = "{adapter}"'
    values = read_adapter_config(expanded(adapter), where)
    if values.get("peft_type") != "LORA":
        raise ConfigError(
            f"{where}: its peft_type is {str(values.get('peft_type'))[:60]!r:.70}; only LORA is supported"
        )
    if values.get("bias", "none") != "none":
        raise ConfigError(
            f"{where}: it trains biases (bias = {str(values['bias'])[:60]!r:.70}), which is not supported"
        )
    for key in _UNSUPPORTED:
        if values.get(key):
            raise ConfigError(f"{where}: it uses {key}, which is not supported")
    rank, alpha, targets = values.get("r"), values.get("lora_alpha"), values.get("target_modules")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not targets:
        raise ConfigError(f"{where}: its {ADAPTER_CONFIG} lacks r, lora_alpha or target_modules")
    return {
        "r": rank,
        "lora_alpha": float(alpha) * (math.sqrt(rank) if values.get("use_rslora") else 1.0),
        "lora_dropout": float(values.get("lora_dropout") or 0.0),
        "target_modules": targets if isinstance(targets, str) else sorted(map(str, targets)),
    }


def read_adapter_config(folder: Path, where: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json` in `folder`. Raises ConfigError with a message that begins with `where`."""
    path = folder / ADAPTER_CONFIG
    try:
        content = json.loads(read_file(path, _MOST_ADAPTER_BYTES, "an adapter's configuration"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError, PipeloomError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}") from error
    return content
