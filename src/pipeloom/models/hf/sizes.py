"""The sizes of a model of `transformers`: its parameters, counted on the meta device, and what its attention sees."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from pipeloom.errors import ConfigError
from pipeloom.foreign import as_json, unknown_keys
from pipeloom.models.hf.cut import Cut, cut
from pipeloom.models.hf.library import causal_model, read_config
from pipeloom.shapes.decoder import CountedModel, DecoderShape
from pipeloom.shapes.hub import COMMON_KEYS, require_heads

_LOG = logging.getLogger("pipeloom")
_MOST_BLOCKS = 1000  # of a model that is built: some milliseconds each
# Begins of keys of a model whose blocks hand over more than hidden states, or choose what attention sees.
_UNPLANNED = ("index_topk", "hidden_size_per_layer_input")
_UNPLANNED_WORDS = "an indexer, or inputs of each block besides the hidden states, are not planned"
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k", "moe_k")
_STATES = ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size")
_GATES = ("gate", "w3", "v1", "input_linear", "wi_1", "swiglu")  # in names of weights of a gated feed-forward part


def counted_shape(values: Mapping[str, Any], where: str) -> DecoderShape | None:
    """Return the shape of the model that `transformers` builds of a `config.json`; None where that is not installed.

    Raises ConfigError, with a message that begins with `where`, for a model that cannot be built or cut into layers.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        return _counted(json.dumps(values, sort_keys=True))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:  # of many types, for values that a family does not expect
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{where}: its layers cannot be counted: {reason}") from error


@lru_cache(maxsize=64)
def _counted(content: str) -> DecoderShape:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(content, encoding="utf-8")
        try:
            config = read_config(folder)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}{os.sep}", "")) from None
    # Ranks that the command starts count what it has counted; of those of torchrun one speaks.
    speaks = os.environ.get("RANK", "0") == "0" and ("RANK" in os.environ) == ("TORCHELASTIC_RUN_ID" in os.environ)
    if speaks and (unread := unread_keys(config, json.loads(content))):
        _LOG.warning("config.json (%s): transformers does not read %s", config.model_type, ", ".join(unread))
    sizes = config.get_text_config()
    if (getattr(sizes, "num_hidden_layers", None) or 0) > _MOST_BLOCKS:
        raise ConfigError(f"num_hidden_layers = {sizes.num_hidden_layers}: at most {_MOST_BLOCKS:,} blocks are counted")
    for key, value in vars(sizes).items():
        if value and key.startswith(_UNPLANNED):
            raise ConfigError(f"{key} = {as_json(value)}: {_UNPLANNED_WORDS}")
    whole = cut(causal_model(config, torch.bfloat16))
    # Where some layers have other sizes, those of the others serve for operations.
    sizes.allow_global_per_layer_attribute_access = True
    first, *blocks, last = parameters_by_layer(whole)
    sparse = tuple(int(of_experts > 0) for _, of_experts in blocks)
    heads = _number(sizes, "num_attention_heads", 1)
    hidden, shared = int(sizes.hidden_size), _number(sizes, "num_key_value_heads", heads)
    width = _number(sizes, "head_dim", 0)
    if not _number(sizes, "kv_lora_rank", 0):
        require_heads("its sizes", heads, shared, hidden)
    tied = sum(map(sum, (first, *blocks, last))) - sum(parameter.numel() for parameter in whole.model.parameters())
    return DecoderShape(
        num_hidden_layers=len(whole.trunk),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=_number(sizes, "intermediate_size", 4 * hidden),
        vocab_size=int(sizes.vocab_size),
        head_dim=width or (None if hidden % heads == 0 else hidden // heads),
        tie_word_embeddings=bool(whole.tied()),
        num_experts=_experts(whole.trunk) if any(sparse) else 0,
        num_experts_per_tok=_first(sizes, _CHOSEN, 1),
        moe_layer_freq=1 if all(sparse) or not any(sparse) else sparse,
        shared_expert_gate=False,
        gated=any(gate in name for name, _ in whole.trunk.named_parameters() for gate in _GATES),
        reach=_reach(whole.trunk, sizes, width or hidden // heads),
        counted=CountedModel(sum(first), tuple(blocks), sum(last), tied, whole.spreadable),
        model_type=str(sizes.model_type),
    )


def unread_keys(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a `config.json` that its family in `transformers` lacks; those of a part as `part.key`."""
    kind, parts = type(config), [name for name in config.sub_configs if isinstance(values.get(name), dict)]
    known = {*COMMON_KEYS, *kind.attribute_map, *kind.sub_configs, *kind.__dataclass_fields__, *dir(kind)}
    with suppress(Exception):  # a family without defaults
        known |= vars(kind()).keys()
    unread = [key for key in unknown_keys(values, known) if key[:1] != "_" and not key.endswith("token_id")]
    return unread + [f"{part}.{key}" for part in parts for key in unread_keys(getattr(config, part), values[part])]


def parameters_by_layer(whole: Cut) -> list[tuple[int, int]]:
    """Return the parameters of each layer: without those of experts, and these."""
    layers: dict[str, dict[int, tuple[int, bool]]] = {name: {} for name in whole.layer_names}
    for name, parameter in whole.model.named_parameters(remove_duplicate=False):
        place = whole.global_name(name)
        inside = place.removeprefix(whole.path_dot)
        layer = place.partition(".")[0] if inside == place else f"{whole.path_dot}{inside.partition('.')[0]}"
        layers[layer][id(parameter)] = parameter.numel(), ".experts." in name or _is_stacked(name, parameter)
    return [
        (sum(size for size, of in layer.values() if not of), sum(size for size, of in layer.values() if of))
        for layer in layers.values()
    ]


def _is_stacked(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a weight is that of several experts."""
    return parameter.ndim == 3 and "conv" not in name and parameter.shape[-1] > 1


def _experts(trunk: nn.ModuleList) -> int:
    """Return the number of experts: of the stacked weights, or of the modules of that name."""
    stacked = [parameter.shape[0] for name, parameter in trunk.named_parameters() if _is_stacked(name, parameter)]
    listed = [
        len(part) for name, part in trunk.named_modules() if isinstance(part, nn.ModuleList) and "experts" in name
    ]
    return int(max(stacked or listed, default=1))


def _reach(trunk: nn.ModuleList, sizes: Any, width: int) -> tuple[int, ...]:
    """Return what the attention of each block sees, as `DecoderShape.reach`.

    Linear attention with a state of n columns costs as much as attention to n tokens.
    """
    window, chunk = _number(sizes, "sliding_window", 0), _number(sizes, "attention_chunk_size", 0)
    seen = {"sliding": window, "chunked": -chunk}
    kinds = getattr(sizes, "layer_types", None) or ()
    if len(kinds) != len(trunk):
        kinds = ("sliding_attention" if window else "full_attention",) * len(trunk)
    reach = []
    for layer, kind in zip(trunk, kinds, strict=True):
        attends = any("Attention" in type(part).__name__ for part in layer.modules())
        if str(kind).startswith("linear") or not attends:
            reach.append(_first(sizes, _STATES, width))
        else:
            reach.append(next((tokens for word, tokens in seen.items() if word in str(kind)), 0))
    return tuple(reach)


def _first(sizes: Any, keys: Sequence[str], default: int) -> int:
    """Return the first of these numbers that a configuration has."""
    return next((number for key in keys if (number := _number(sizes, key, 0))), default)


def _number(sizes: Any, key: str, default: int) -> int:
    """Return a whole number of a configuration; the default where it is absent, zero, or another one for each layer."""
    value = getattr(sizes, key, None)
    return value if type(value) is int and value else default
