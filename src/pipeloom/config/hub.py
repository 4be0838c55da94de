"""Hugging Face directories as keys of the configuration: a model's sizes as `[model]`, an adapter's as `[lora]`.

Reads `config.json` and `adapter_config.json`, and needs neither `transformers` nor `peft`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from pipeloom.config.problems import file_sentence
from pipeloom.errors import ConfigError, UsageError, did_you_mean, reason_of, shortened
from pipeloom.limits import MODEL_CONFIG_BYTES, MOST_LAYERS, MOST_WIDTH, expanded, read_json, require_counts
from pipeloom.shapes.decoder import context_problem
from pipeloom.shapes.hub import presets

# Key of [model] -> its names in the families' files. For a foreign model most of these keys serve only estimates: of the costs by
# which stages are balanced, of memory, and of utilisation.
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


# Families that our own decoder computes -> defaults of the keys that their files may leave out, where families differ.
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4},
}
# `model_type` of the families with which `pipeloom verify --hf-families` passes (tests/data/hf_families.toml).
_VERIFIED = """
    apertus biogpt bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 falcon
    falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid hunyuan_v1_dense hunyuan_v1_moe jamba lfm2 llama llama4_text mamba mamba2
    minimax_m2 ministral mistral mixtral mpt nemotron nemotron_h olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss
    smollm3 stablelm starcoder2 xglm
"""
VERIFIED_FAMILIES = frozenset(_VERIFIED.split())
_USUAL = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


class _Rope(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    rope_theta: float | None = None
    rope_type: str | None = None


class _ConfigFile(BaseModel):
    """Types and limits of what is read of a `config.json`, besides `_SPELLINGS`; the rest is for `transformers`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model_type: str | None = None
    text_config: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rms_norm_eps: float | None = None
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0


def _size(key: str) -> Any:
    """The type of a size of the model; where it is not needed, a list (a width for each layer) counts as absent."""
    least, most = int(key == "moe_intermediate_size"), MOST_LAYERS if key == "num_hidden_layers" else MOST_WIDTH
    number: Any = bool if key == "tie_word_embeddings" else Annotated[int, Field(ge=least, le=most)]
    skipped = () if key in _NEEDED else (list,)
    return Annotated[number | None, BeforeValidator(lambda value: None if isinstance(value, skipped) else value)]


_SIZES: dict[str, Any] = {name: (_size(key), None) for key, names in _SPELLINGS.items() for name in names}
_SCHEMA = create_model("ModelConfig", __base__=_ConfigFile, **_SIZES)


def preset_sizes(name: str) -> dict[str, Any]:
    """Keys of `[model]` for a preset. Raises ConfigError for a name that is none, or a model that our own decoder lacks."""
    known = presets()
    if name not in known:
        raise ConfigError(
            f'model.preset = "{name}" is not known{did_you_mean(name, known)}; presets: {", ".join(known)}'
        )
    decoder_keys = own_values(known[name])
    if decoder_keys is None:
        ours = [each for each, values in known.items() if values["model_type"] in _OWN]
        raise ConfigError(
            f'model.preset = "{name}": Pipeloom\'s own decoder cannot compute this {known[name]["model_type"]}; nearest: '
            f"{', '.join(ours)}, or model.source with a directory of it"
        )
    return decoder_keys


def is_directory(path: str) -> bool:
    """Return whether `path` is a Hugging Face directory."""
    return (expanded(path) / "config.json").is_file()


def is_verified(directory: str) -> bool:
    """Return whether the model in a directory is of a family that has been verified in pipelines."""
    values = _content(directory, "source")
    text = values.get("text_config") or {}
    return not VERIFIED_FAMILIES.isdisjoint({str(values.get("model_type")), str(text.get("model_type"))})


def source_context_problem(directory: str) -> str:
    """Return why the model in `directory` allows no context parallelism; "" where it does."""
    return context_problem(_content(directory, "source"))


def own_sizes(directory: str) -> dict[str, Any]:
    """Keys of `[model]` with which our own decoder computes the model in a directory. Raises ConfigError where it cannot."""
    values = _content(directory, "weights")
    try:
        decoder_keys = own_values(values)
    except KeyError as error:
        raise ConfigError(f'model.weights = "{directory}": its config.json has no {error.args[0]}') from None
    if decoder_keys is None:
        kind, why = values.get("model_type", "model"), _not_plain(values)
        raise ConfigError(
            f'model.weights = "{directory}": Pipeloom\'s own decoder cannot compute this {kind}{f" ({why})" if why else ""}; '
            "nearest: model.source, which trains the model of transformers"
        )
    return decoder_keys


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _not_plain(values: Mapping[str, Any]) -> str:
    """Return the features of a `config.json` that our own decoder lacks, as `key = value`; empty where there are none."""
    rope, kind = _rope(values), str(values.get("model_type"))
    turns = rope.get("rope_type", rope.get("type", "default"))
    window = values.get("sliding_window", 4096 if kind == "mistral" else None)  # files that leave it out mean this
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe") and not values.get("use_sliding_window", False):
        window = None
    choices = {
        "hidden_act": (values.get("hidden_act", "silu"), "silu"),
        "rope_type": (turns, "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)), 1.0),
        "mlp_bias": (values.get("mlp_bias", False), False),
        "sliding_window": (window or None, None),
    }
    return ", ".join(f"{key} = {json.dumps(value)}" for key, (value, plain) in choices.items() if value != plain)


def own_values(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keys of `[model]` with which our own decoder computes the model of a `config.json`; None if it cannot.

    Raises KeyError for a size that is missing, ConfigError for a value of another type.
    """
    _require(values, "config.json")
    kind = str(values.get("model_type"))
    if kind not in _OWN or _not_plain(values):
        return None
    missing = [key for key in _NEEDED if values.get(key) is None]
    if missing:
        raise KeyError(missing[0])
    optional = (
        "num_key_value_heads",
        "head_dim",
    )  # null has a meaning of its own: as many as queries; of the hidden size
    given = {key: value for key, value in values.items() if value is not None or key in optional}
    values = {**_USUAL, **_OWN[kind], **given}
    rope, heads = _rope(values), values["num_attention_heads"]
    decoder_keys = {
        **{key: values[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")},
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta") or values["rope_theta"]),
        "rms_norm_eps": float(values["rms_norm_eps"]),
        "attention_bias": bool(kind in ("llama", "qwen3", "qwen3_moe") and values.get("attention_bias", False)),
        "qkv_bias": bool(kind == "qwen2" or (kind == "qwen2_moe" and values.get("qkv_bias", True))),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        **{"num_experts": 0, "num_shared_experts": 0, "moe_layer_freq": 1},
    }
    if values.get("head_dim"):
        decoder_keys["head_dim"] = values["head_dim"]
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        width = values["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
        sparse = expert_blocks(values, values["num_hidden_layers"])
        shared, odd = 0, 0
        if kind == "qwen2_moe" and isinstance(width, int):
            shared, odd = divmod(values["shared_expert_intermediate_size"], width)
        if odd or not any(sparse) or (kind == "qwen2_moe" and not shared):
            return None
        decoder_keys |= {
            "num_experts": values[
                "num_experts" if "num_experts" in values else "num_local_experts"
            ],  # depends on the file's age
            "num_experts_per_tok": values["num_experts_per_tok"],
            "moe_intermediate_size": width,
            "moe_layer_freq": 1 if all(sparse) else [int(experts) for experts in sparse],
            "num_shared_experts": shared,
            "norm_topk_prob": kind == "mixtral" or bool(values.get("norm_topk_prob", False)),
        }
    return decoder_keys


def _content(source: str, key: str) -> dict[str, Any]:
    """The `config.json` of a directory. Raises ConfigError, about `model.key`, where it cannot be read."""
    path = expanded(source) / "config.json"
    try:
        content = read_json(path, MODEL_CONFIG_BYTES, "a model's configuration")
        if isinstance(content, dict):
            require_counts(content)
    except (OSError, UsageError) as error:
        reason = download(source) or f"{path} cannot be read: {reason_of(error)}{_nearest_folder(source)}"
        raise ConfigError(f'model.{key} = "{source}": {reason}') from None
    if not isinstance(content, dict):
        raise ConfigError(f'model.{key} = "{source}": {path} is not a JSON object')
    _require(content, f'model.{key} = "{source}": {path}')
    return content


def download(source: str) -> str:
    """Return how to get a model that `source` names as the Hugging Face Hub does (org/name); "" for any other name."""
    name = re.fullmatch(r"\w[\w.-]*/([\w.-]+)", source)
    if name is None or expanded(source).exists():
        return ""
    return f"there is no such directory, and nothing is downloaded; first: hf download {source} --local-dir {name[1]}"


def _nearest_folder(source: str) -> str:
    """Return the folders with a `config.json` whose names are like that of `source`, where there is none, as a question."""
    folder = expanded(source)
    names = [path.parent.name for path in folder.parent.glob("*/config.json")] if not folder.exists() else []
    near = difflib.get_close_matches(folder.name, names, n=3, cutoff=0.55)
    return f"; did you mean {' or '.join(repr(str(Path(source).parent / name)) for name in near)}?" if near else ""


def _require(values: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a value of another type, or a size above its limit."""
    try:
        _SCHEMA.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {file_sentence(error)}") from None


def sizes(source: str) -> dict[str, Any]:
    """Keys of `[model]` for the model in `source`. Raises ConfigError where its configuration cannot be read."""
    path, content = expanded(source) / "config.json", _content(source, "source")
    if content.get("is_encoder_decoder"):
        classes = content.get("architectures")
        name = str(classes[0] if isinstance(classes, list) and classes else content.get("model_type"))
        raise ConfigError(
            f'model.source = "{source}": {shortened(name)} has an encoder and a decoder; supported: causal language models, '
            "which are a decoder alone"
        )
    values = {**content, **(content.get("text_config") or {})}
    _require(values, f'model.source = "{source}": {path}')
    decoder_keys = {}
    for key, spellings in _SPELLINGS.items():
        value = next((values[name] for name in spellings if isinstance(values.get(name), (int, bool))), None)
        if value is not None:
            decoder_keys[key] = value
    for key in _NEEDED:
        if key not in decoder_keys:
            raise ConfigError(f'model.source = "{source}": {path} has no {" or ".join(_SPELLINGS[key])}')
    blocks = expert_blocks(values, decoder_keys["num_hidden_layers"])
    if decoder_keys.get("num_experts") and not any(blocks):
        decoder_keys["num_experts"] = 0
    elif decoder_keys.get("num_experts") and not all(blocks):
        decoder_keys["moe_layer_freq"] = [int(experts) for experts in blocks]
    decoder_keys.setdefault("num_attention_heads", 1)
    decoder_keys.setdefault("num_key_value_heads", decoder_keys["num_attention_heads"])
    decoder_keys.setdefault("intermediate_size", 4 * decoder_keys["hidden_size"])
    decoder_keys.setdefault("tie_word_embeddings", True)  # the default of transformers
    return decoder_keys


def expert_blocks(values: Mapping[str, Any], blocks: int) -> tuple[bool, ...]:
    """Return, for each of `blocks` blocks, whether it has experts; `values` are those of a `config.json` with experts.

    Qwen-MoE has `decoder_sparse_step` (every n-th block, beginning with the n-th) and `mlp_only_layers` (dense ones), DeepSeek
    `moe_layer_freq` (every n-th block, beginning with block 0; or a list) and `first_k_dense_replace`.
    """
    every, frequency = _number(values, "decoder_sparse_step", 1), values.get("moe_layer_freq")
    left_out, first = set(values.get("mlp_only_layers") or ()), _number(values, "first_k_dense_replace", 0)
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
        raise ConfigError(f"{where}: {path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {path} is not a JSON object")
    return content
