"""Generation of text with a model: layout, weights and tokenizer of a checkpoint, a run or a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeloom.config import Layout, load_layout
from pipeloom.config.adapter import ADAPTER_CONFIG, read_adapter_config
from pipeloom.config.checks import CLASS_KEYS
from pipeloom.config.hub import is_directory
from pipeloom.errors import CheckpointError, ConfigError, UsageError
from pipeloom.models.hf.library import read_config
from pipeloom.runtime import Pipeline
from pipeloom.train.adapters import base_weights, begin_weights
from pipeloom.train.build import build_pipeline
from pipeloom.train.checkpoint.folder import newest_checkpoint
from pipeloom.train.checkpoint.load import load
from pipeloom.train.checkpoint.run import RunFacts
from pipeloom.train.data.sources import BYTES, tokenizer_name
from pipeloom.train.data.tokenizers import load_tokenizer
from pipeloom.train.sample import Sampling, extend


@dataclass(frozen=True)
class OpenedModel:
    """A model to generate with.

    Attributes:
        layout: layout that `open_pipeline` builds.
        checkpoint: checkpoint with its weights; None: they are in the directory that the layout names.
        hub: Hugging Face directory that its configuration names as its source or for its weights; None: it names none.
    """

    layout: Layout
    checkpoint: Path | None
    hub: Path | None


@dataclass(frozen=True)
class Text:
    """Conversion of text to tokens and back, and the tokens (`ends`) that end a sequence."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...]


def open_model(path: Path, prompts: int, flags: Mapping[str, Any], trust_code: bool = False) -> OpenedModel:
    """Find the model at `path`, and make a layout of it for `prompts` sequences at a time.

    Args:
        flags: keys of the configuration that the layout has in addition to the model's, such as "parallel.pp".
        trust_code: import the classes that a checkpoint's model names as `module:class`.

    Raises:
        CheckpointError: there is no model at `path`.
        ConfigError: the layout does not fit the model, or the model names classes without `trust_code`.
    """
    size = max(1, prompts)
    layout: dict[str, Any] = {"schedule.name": "gpipe", "schedule.microbatches": size, "train.global_batch_size": size}
    if (path / ADAPTER_CONFIG).is_file():
        base = Path(str(read_adapter_config(path, str(path)).get("base_model_name_or_path")))
        if not (base / "config.json").is_file():
            raise ConfigError(
                f"{path / ADAPTER_CONFIG}: the model that it adapts, {base}, is not a Hugging Face directory"
            )
        return OpenedModel(
            load_layout(None, {"model.source": str(base), "lora.adapter": str(path), **layout, **flags}), None, base
        )
    if (path / "config.json").is_file():
        return OpenedModel(load_layout(None, {"model.source": str(path), **layout, **flags}), None, path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint, a run, or a Hugging Face directory")
    checkpoint = newest_checkpoint(path)
    facts = RunFacts.read(checkpoint)
    config, model = facts.config, facts.model(checkpoint)
    source, weights = model.get("source"), model.get("weights")
    hub = source or (weights if isinstance(weights, str) and weights and is_directory(weights) else None)
    for key in CLASS_KEYS:
        if model.get(key) and not trust_code:
            raise ConfigError(
                f"{checkpoint}: its model contains code, model.{key} = {json.dumps(str(model[key])[:200])}, which would be "
                "imported and run; --trust-code allows it"
            )
    values = {"source": source} if source else {key: value for key, value in model.items() if value is not None}
    if not config.get("lora", {}).get("r"):
        values.pop("weights", None)  # the run's initial weights; the checkpoint has its own
    keys = {f"model.{key}": value for key, value in values.items()}
    keys |= {f"lora.{key}": value for key, value in config.get("lora", {}).items() if key != "adapter"}
    for section, key in (("train", "dtype"), ("data", "tokenizer"), ("data", "bos"), ("data", "eos")):
        if key in config.get(section, {}):
            keys[f"{section}.{key}"] = config[section][key]
    return OpenedModel(load_layout(None, {**keys, **layout, **flags}), checkpoint, Path(hub) if hub else None)


def open_pipeline(opened: OpenedModel, device: torch.device, watchdog: Any = None) -> Pipeline:
    """Build this process's part of the model, and load its weights; collective. The pipeline is in evaluation mode."""
    pipeline = build_pipeline(opened.layout, device, watchdog=watchdog)
    config = opened.layout.config
    begin_weights(config, pipeline, opened.checkpoint is not None)
    if opened.checkpoint is not None:
        load(opened.checkpoint, pipeline, base=base_weights(config))
    pipeline.eval()
    return pipeline


def text_of(opened: OpenedModel) -> Text:
    """Open the tokenizer of `data.tokenizer`; "auto" is that of the model's directory if it has one, else bytes.

    Raises ConfigError if it cannot be read.
    """
    data = opened.layout.config.data
    name = tokenizer_name(data.tokenizer, str(opened.hub or ""))
    tokenizer = load_tokenizer(name, data.bos, data.eos)
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    tokenizer_ends = () if tokenizer.eos is None or name == BYTES else (tokenizer.eos,)
    return Text(
        lambda text: begin + tokenizer.encode(text).tolist(),
        lambda tokens: tokenizer.decode(torch.tensor(tokens)),
        _ends(opened.hub) or tokenizer_ends,
    )


def continue_prompts(
    opened: OpenedModel, pipeline: Pipeline, prompts: Sequence[str], count: int, sampling: Sampling
) -> list[tuple[str, list[int]]]:
    """Return (prompt and continuation as text, new tokens) for each prompt; collective, the same on every rank.

    Args:
        count: most new tokens per prompt.

    Raises UsageError for a prompt without tokens, or with a token outside the model's vocabulary.
    """
    text = text_of(opened)
    encoded = [text.encode(prompt) for prompt in prompts]
    vocabulary = opened.layout.config.model.vocab_size
    for prompt, tokens in zip(prompts, encoded, strict=True):
        unknown = [token for token in tokens if token >= vocabulary]
        if unknown:
            raise UsageError(
                f"token {unknown[0]} of the prompt {prompt[:60]!r} is outside the vocabulary of {vocabulary}"
            )
    added = extend(pipeline, encoded, count, sampling, ends=text.ends, context=_context(opened.hub))
    return [(text.decode([*before, *after]), after) for before, after in zip(encoded, added, strict=True)]


def _ends(hub: Path | None) -> tuple[int, ...]:
    ends = None if hub is None else getattr(read_config(hub), "eos_token_id", None)
    return () if ends is None else tuple(ends) if isinstance(ends, Collection) else (int(ends),)


def _context(hub: Path | None) -> int | None:
    """Return the most tokens that the model has positions for; None: any number."""
    most = None if hub is None else getattr(read_config(hub).get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None
