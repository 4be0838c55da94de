"""The `transformers` package: imported when it is first needed, since that takes seconds, and in a tested range only."""

from __future__ import annotations

import copy
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import ConfigError
from pipeloom.limits import MODEL_CONFIG_BYTES, read_json, require_counts

RANGE = (5, 23), (5, 25)  # what the tests ran with: from the first version on, before the second


@cache
def transformers() -> Any:
    """The package. Raises ConfigError where it is missing, or outside of the tested range."""
    least, below = (".".join(map(str, version)) for version in RANGE)
    wanted = f'pip install "transformers>={least},<{below}"'
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"models of Hugging Face need the package transformers ({error}): {wanted}") from error
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if not RANGE[0] <= version < RANGE[1]:
        raise ConfigError(f"transformers {package.__version__} is not supported: {wanted}")
    return package


def read_config(folder: str | Path) -> Any:
    """The configuration in a directory, whose own code never runs. Raises ConfigError where there is none that can be read."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a Hugging Face model: it has no config.json")
    package = transformers()
    try:
        values = read_json(path / "config.json", MODEL_CONFIG_BYTES, "a model's configuration")
        require_counts(values if isinstance(values, dict) else {})
        config = package.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types, for values that a family does not expect
        raise ConfigError(f"{path / 'config.json'} cannot be read: {_reason(error)}") from error
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        kernel = str(getattr(part, "_attn_implementation", None))
        if "/" in kernel:
            raise ConfigError(
                f"{path / 'config.json'}: attn_implementation = {kernel!r:.200} names code to be downloaded, which Pipeloom "
                "never runs; nearest: 'sdpa'"
            )
    return config


def causal_model(config: Any, dtype: torch.dtype | None) -> Any:
    """The causal language model of a configuration on the meta device. The configuration itself stays as it is."""
    package = transformers()
    if not isinstance(config, package.PreTrainedConfig):
        raise ConfigError(
            f"the source of a Hugging Face model is of type {type(config).__name__}; give a configuration, a model or a directory"
        )
    require_decoder(config)
    require_counts(config.to_dict())
    config_copy = copy.deepcopy(config)
    if dtype is not None or config_copy.dtype is None:
        config_copy.dtype = dtype or torch.float32
    try:
        with torch.device("meta"):
            return package.AutoModelForCausalLM.from_config(
                config_copy, dtype=config_copy.dtype, trust_remote_code=False
            )
    except Exception as error:
        raise ConfigError(
            f"transformers builds no causal model of {type(config).__name__}: {_reason(error)}"
        ) from error


def require_decoder(config: Any) -> None:
    """Raise ConfigError for a configuration of an encoder and a decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(config).__name__} describes an encoder and a decoder; supported: causal language models, which are a decoder "
            "alone"
        )


def _reason(error: BaseException) -> str:
    """Return an error of `transformers` in one line."""
    if "trust_remote_code" in str(error):
        return (
            "auto_map names code in the model's folder, which Pipeloom never runs; supported: the models that are part of "
            "transformers itself"
        )
    return " ".join(str(error).split())[:300] or type(error).__name__
