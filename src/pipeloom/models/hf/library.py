"""The `transformers` package: imported when it is first needed, since that takes seconds, and in a tested range only."""

from __future__ import annotations

import copy
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import ConfigError

RANGE = (5, 23), (5, 24)  # what the tests ran with: from the first version on, before the second


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
    """The configuration in a directory. Raises ConfigError where there is none, or of no causal language model."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a Hugging Face model: it has no config.json")
    package = transformers()
    try:
        return package.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # of many types, for values that a family does not expect
        raise ConfigError(f"{path / 'config.json'} cannot be read: {_in_one_line(error)}") from error


def causal_model(config: Any, dtype: torch.dtype | None) -> Any:
    """The causal language model of a configuration on the meta device. The configuration itself stays as it is."""
    package = transformers()
    if not isinstance(config, package.PreTrainedConfig):
        raise ConfigError(
            f"the source of a Hugging Face model is of type {type(config).__name__}; give a configuration, a model or a directory"
        )
    config_copy = copy.deepcopy(config)
    if dtype is not None or config_copy.dtype is None:
        config_copy.dtype = dtype or torch.float32
    try:
        with torch.device("meta"):
            return package.AutoModelForCausalLM.from_config(config_copy, dtype=config_copy.dtype)
    except Exception as error:
        raise ConfigError(
            f"transformers builds no causal model of {type(config).__name__}: {_in_one_line(error)}"
        ) from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
