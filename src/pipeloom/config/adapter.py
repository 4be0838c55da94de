"""The configuration of an adapter in peft's format as keys of `[lora]`; reads `adapter_config.json` and needs no `peft`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeloom.config.problems import file_sentence
from pipeloom.errors import ConfigError, UsageError
from pipeloom.limits import expanded, read_json

ADAPTER_CONFIG = "adapter_config.json"
_MOST_RANK = 65_536  # wider than the weights of published models, so that a damaged file asks for no terabytes
_MOST_ADAPTER_BYTES = 10_000_000
# Options of peft that make an adapter compute something other than s B A x on whole linear layers; None or empty: unused.
_UNSUPPORTED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "exclude_modules", "trainable_token_indices", "megatron_config", "layer_replication"),
    *("lora_bias", "alora_invocation_tokens", "use_bdlora"),
)


class _AdapterFile(BaseModel):
    """The part of `adapter_config.json` that is read, apart from options that are not supported."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    bias: Literal["none"] = "none"
    r: Annotated[int, Field(ge=1, le=_MOST_RANK)]
    lora_alpha: float
    lora_dropout: float | None = None
    use_rslora: bool | None = None
    target_modules: Annotated[str | list[str], Field(min_length=1)]


def adapter_keys(adapter: str) -> dict[str, Any]:
    """Return the keys of `[lora]` that describe the adapter in the directory `adapter`.

    Raises ConfigError where its configuration cannot be read, or asks for more than low-rank products on linear layers.
    """
    where = f'lora.adapter = "{adapter}"'
    values = read_adapter_config(expanded(adapter), where)
    for key in _UNSUPPORTED:
        if values.get(key):
            raise ConfigError(f"{where}: it uses {key}, which is not supported")
    try:
        file = _AdapterFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {ADAPTER_CONFIG}: {file_sentence(error)}") from None
    return {
        "r": file.r,
        "lora_alpha": file.lora_alpha * (math.sqrt(file.r) if file.use_rslora else 1.0),
        "lora_dropout": file.lora_dropout or 0.0,
        "target_modules": file.target_modules if isinstance(file.target_modules, str) else sorted(file.target_modules),
    }


def read_adapter_config(folder: Path, where: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json` in `folder`. Raises ConfigError with a message that begins with `where`."""
    path = folder / ADAPTER_CONFIG
    try:
        content = read_json(path, _MOST_ADAPTER_BYTES, "an adapter's configuration")
    except (OSError, UsageError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {path} is not a JSON object")
    return content
