"""Hugging Face directories: the one reader of `config.json` and of `adapter_config.json`.

Needs neither `transformers` nor `peft`. It checks the types of what it reads by hand, since the library, which has no pydantic,
reads these files too.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError, UsageError, did_you_mean, echo, reason_of, shortened
from pipeloom.foreign import as_json, number_in, refuse_unknown, typed, unknown_keys
from pipeloom.limits import MODEL_CONFIG_BYTES, MOST_LAYERS, MOST_WIDTH, expanded, read_json, require_counts
from pipeloom.shapes.decoder import DecoderShape

# Size -> its names in the files of the families of the table.
SPELLINGS = {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "first_k_dense_replace": ("first_k_dense_replace", "dense_layers"),
    "qk_nope_head_dim": ("qk_nope_head_dim", "qk_head_dim"),
    "qk_rope_head_dim": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
}
_NEEDED = {"num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 1}  # the least values that are no mistake


@dataclass(frozen=True)
class HubFamily:
    """Knowledge of the files of a family.

    Attributes:
        defaults: values of keys that a file may give otherwise.
        fixed: values that hold whatever the file says.
        ours: our own decoder computes it.
        keys: those that it has besides the common ones.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    keys: str = ""


_SIZES = """
    num_hidden_layers hidden_size vocab_size num_attention_heads num_key_value_heads intermediate_size head_dim
    tie_word_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
"""
_MIXTURE = "num_experts_per_tok num_experts num_local_experts moe_intermediate_size norm_topk_prob"
_SPARSE = f"{_MIXTURE} decoder_sparse_step mlp_only_layers"
_LATENT = f"""
    {_MIXTURE} n_routed_experts n_shared_experts first_k_dense_replace moe_layer_freq n_group topk_group q_lora_rank kv_lora_rank
    qk_nope_head_dim qk_rope_head_dim v_head_dim num_nextn_predict_layers
"""
# Keys that change neither sizes nor operations, with any value; nor do ids of tokens, and what libraries note behind "_".
_WITHOUT_EFFECT = """
    architectures attention_dropout auto_map aux_loss_alpha do_sample dtype embd_pdrop ep_size finetuning_task hidden_act id2label
    initializer_range is_decoder keys_to_ignore_at_inference label2id max_length max_position_embeddings max_window_layers
    model_type output_attentions output_hidden_states output_router_logits partial_rotary_factor pretraining_tp problem_type
    qk_head_dim quantization_config return_dict rope_interleave routed_scaling_factor router_aux_loss_coef router_jitter_noise
    scoring_func seq_aux sliding_window source task_specific_params temperature tokenizer_class top_k top_p topk_method
    torch_dtype torchscript transformers_version unsloth_fixed unsloth_version use_cache
"""
COMMON_KEYS = frozenset(f"{_SIZES} {_WITHOUT_EFFECT}".split())
_PLAIN = {"attention_bias": False, "qkv_bias": False, "qk_norm": False}
_DENSE = {**_PLAIN, "num_experts": 0}
_DEEPSEEK = HubFamily({"shared_expert_gate": False}, _PLAIN, keys=_LATENT)
# Families whose sizes and operations follow from keys that are all known; the models of others are counted.
HUB_FAMILIES = {
    # A file of ours, in the words of `DecoderShape`, and in Megatron's for latent attention.
    "": HubFamily(ours=True, keys="attention dense_layers qk_head_dim qk_pos_emb_head_dim"),
    "llama": HubFamily(fixed={"qkv_bias": False, "qk_norm": False, "num_experts": 0}, ours=True, keys="attention_bias"),
    "mistral": HubFamily({"num_key_value_heads": 8, "sliding_window": 4096}, _DENSE, True),
    "qwen2": HubFamily({"num_key_value_heads": 32}, {**_DENSE, "qkv_bias": True}, True),
    "qwen3": HubFamily(
        {"num_key_value_heads": 32, "head_dim": 128},
        {"qkv_bias": False, "qk_norm": True, "num_experts": 0},
        True,
        "attention_bias",
    ),
    "mixtral": HubFamily(
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        {**_PLAIN, "norm_topk_prob": True, "moe_intermediate_size": None},
        True,
        _MIXTURE,
    ),
    "qwen2_moe": HubFamily(
        {"num_key_value_heads": 16, "qkv_bias": True, "norm_topk_prob": False},
        {"attention_bias": False, "qk_norm": False},
        True,
        f"{_SPARSE} shared_expert_intermediate_size qkv_bias",
    ),
    "qwen3_moe": HubFamily(
        {"num_key_value_heads": 4, "norm_topk_prob": False},
        {"qkv_bias": False, "qk_norm": True},
        True,
        f"{_SPARSE} attention_bias",
    ),
    "deepseek_v2": replace(_DEEPSEEK, defaults={"shared_expert_gate": False, "norm_topk_prob": False}),
    "deepseek_v3": replace(_DEEPSEEK, fixed={**_PLAIN, "router": "sigmoid"}),
    "gpt2": HubFamily(
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {"gated": False}, keys="n_positions"
    ),
}
# `model_type` of the families of tests/data/hf_families.toml, which pass tests/dist/models/test_hf.py.
_VERIFIED = """
    apertus biogpt bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 falcon
    falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid hunyuan_v1_dense hunyuan_v1_moe jamba lfm2 llama llama4_text mamba mamba2
    minimax_m2 ministral mistral mixtral mpt nemotron nemotron_h olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss
    smollm3 stablelm starcoder2 xglm
"""
VERIFIED_FAMILIES = frozenset(_VERIFIED.split())
_NUMBERS = "rope_theta rms_norm_eps dropout capacity_factor aux_loss_coef z_loss_coef mtp_loss_coef"
_SWITCHES = "tie_word_embeddings attention_bias qkv_bias qk_norm mlp_bias norm_topk_prob shared_expert_gate gated pad_to_capacity"
_OF_SHAPES = {each.name for each in fields(DecoderShape)} - {"reach", "counted", "name"}
_SPARSE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
_NULL = ("num_key_value_heads", "head_dim", "sliding_window")  # null says: as many as queries; of the hidden size; none


class _Values:
    """The values of a `config.json`, with what its family leaves out; errors begin with `where`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.kind = typed(where, values, "model_type", str, "text") or ""
        if self.kind not in HUB_FAMILIES:
            raise UnknownModelError(where, f"model_type = {as_json(self.kind)}")
        self.family = HUB_FAMILIES[self.kind]
        known = {*COMMON_KEYS, *self.family.keys.split(), *(() if self.kind else _OF_SHAPES)}
        kinds = values.get("layer_types")
        if isinstance(kinds, list) and kinds == ["full_attention"] * len(kinds):
            known.add("layer_types")
        for key in unknown_keys(values, {*known, *(k for k in values if k[:1] == "_" or k.endswith("token_id"))}):
            raise UnknownModelError(where, f"{shortened(key, 60)} = {as_json(values[key])}")
        given = {key: value for key, value in values.items() if value is not None or key in _NULL}
        self.given = {**self.family.defaults, **given, **self.family.fixed}

    def size(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return a size, or the default where it is absent."""
        names = SPELLINGS.get(key, (key,))
        spelled = next((name for name in names if self.given.get(name) is not None), None)
        if spelled is None:
            if default is None:
                raise MissingSizeError(f"{self.where} has no {' or '.join(names)}")
            return default
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST_WIDTH
        return int(number_in(f"{self.where}: {spelled}", self.given[spelled], least, most, whole=True))

    def rope(self) -> Mapping[str, Any]:
        for key in ("rope_parameters", "rope_scaling"):
            if table := typed(self.where, self.given, key, dict, "a table"):
                return dict(table)
        return {}


class ForeignError(ConfigError):
    """A model that our own decoder does not compute."""


class UnknownModelError(ConfigError):
    """A family or a key of a `config.json` that the table lacks; `what`: with its value."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what} is not known")
        self.what = what


class MissingSizeError(ConfigError):
    """A size that a `config.json` leaves to the default of its family, which the table lacks."""


Counter = Callable[[Mapping[str, Any], str], DecoderShape | None]
_counters: list[Counter] = []


def count_with(counter: Counter) -> None:
    """Let `counter` answer for models that the table lacks, with a function of a `config.json` and of what errors begin with.

    It returns None where it cannot count because a package is missing.
    """
    _counters[:] = [counter]


def presets() -> dict[str, dict[str, Any]]:
    """Name -> `config.json`, with its source under "source", of the models that are known by name."""
    return dict(json.loads(resources.files("pipeloom.shapes").joinpath("models.json").read_text(encoding="utf-8")))


def shape_of(values: Mapping[str, Any], name: str, where: str = "") -> DecoderShape:
    """Return the shape of the model in a `config.json`: of the table where all keys are known, else counted.

    Raises ConfigError, with a message that begins with `where`, or with the name.
    """
    try:
        return from_config(values, name, where)
    except (UnknownModelError, MissingSizeError) as error:
        if not values.get("model_type"):
            raise ConfigError(f"{error}; without model_type a file has the keys of [model]") from None
        shape = next((counter(values, where or name) for counter in _counters), None)
        if shape is None:
            missing = "transformers, which counts other models, is not installed"
            raise ConfigError(f'{error}, and {missing}: pip install -e ".[train,hf]"') from None
        return replace(shape, name=name)


def from_config(values: Mapping[str, Any], name: str = "model", where: str = "") -> DecoderShape:
    """Return the shape in a `config.json` of a family of the table.

    Args:
        name: of the model.
        where: what errors begin with; default: the name.

    Raises:
        UnknownModelError: the table lacks its family or a key.
        MissingSizeError: the file lacks a size.
        ConfigError: a key has a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or name}: a model's configuration is an object, and this is {echo(values)}")
    read = _Values(values, where or name)
    given, family = read.given, read.family
    layers, hidden, vocabulary = (read.size(key, least=least) for key, least in _NEEDED.items())
    heads = read.size("num_attention_heads", least=1)
    shared = read.size("num_key_value_heads", heads, 1)
    if read.kind and not given.get("kv_lora_rank"):  # with latent attention every head has its own
        require_heads(read.where, heads, shared, hidden)
    gated = family.fixed.get("gated", True)
    width = read.size("intermediate_size", None if gated else 4 * hidden, 1)
    experts, sparse = read.size("num_experts", 0), _expert_blocks(read, layers)
    options: dict[str, Any] = {}
    for keys, kind, words in ((_NUMBERS, (int, float), "a number"), (_SWITCHES, bool, "true or false")):
        values_of_kind = {key: typed(read.where, given, key, kind, words) for key in keys.split()}
        options |= {key: value for key, value in values_of_kind.items() if value is not None}
    if (theta := typed(read.where, read.rope(), "rope_theta", (int, float), "a number")) is not None:
        options["rope_theta"] = theta
    sizes: dict[str, Any] = {}
    if experts and any(sparse):
        inner = read.size("moe_intermediate_size", width if read.kind in ("", "mixtral") else None, 1)
        common = read.size("shared_expert_intermediate_size", 0)
        copies, odd = divmod(common, inner)
        sizes = {
            "num_experts": experts,
            "num_experts_per_tok": read.size("num_experts_per_tok", None if read.kind else 2, 1),
            "moe_intermediate_size": inner,
            "num_shared_experts": copies if common and not odd else read.size("num_shared_experts", 0),
            "shared_expert_intermediate_size": common if odd else 0,
            "moe_layer_freq": 1 if all(sparse) else tuple(map(int, sparse)),
            "n_group": (groups := read.size("n_group", 1, 1)),
            "topk_group": read.size("topk_group", groups, 1),
        }
        options.setdefault("shared_expert_gate", True)
        if read.kind:  # transformers' one loss of routers
            loss = typed(read.where, given, "router_aux_loss_coef", (int, float), "a number")
            options |= {"aux_loss_coef": 0.001 if loss is None else loss, "z_loss_coef": 0.0}
    if rank := read.size("kv_lora_rank", 0):
        sizes |= {"kv_lora_rank": rank, "q_lora_rank": read.size("q_lora_rank", 0)}
        sizes |= {key: read.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    if router := typed(read.where, given, "router", str, "text"):
        sizes["router"] = router
    if window := read.size("sliding_window", 0) if read.kind in ("mistral", "mixtral") else 0:
        sizes["reach"] = (window,) * layers
    return DecoderShape(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=width,
        vocab_size=vocabulary,
        head_dim=read.size("head_dim", 0) or (None if hidden % heads == 0 else hidden // heads),
        num_nextn_predict_layers=read.size("num_nextn_predict_layers", 0),
        n_positions=0 if gated else read.size("n_positions", 0),
        model_type=read.kind,
        name=name,
        **sizes,
        **options,
    )


def require_heads(where: str, heads: int, shared: int, hidden: int) -> None:
    """Raise ConfigError, with a message that begins with `where`, for heads that do not fit each other or the hidden size."""
    if heads % shared or heads > hidden:
        sizes = f"num_key_value_heads = {shared} and hidden_size = {hidden}"
        raise ConfigError(f"{where}: num_attention_heads = {heads}, which do not share {sizes}")


def _expert_blocks(read: _Values, blocks: int) -> tuple[bool, ...]:
    """Return, for each of `blocks` blocks, whether it has experts, in a file that has some.

    Qwen-MoE has `decoder_sparse_step` (every n-th block, beginning with the n-th) and `mlp_only_layers` (dense ones), DeepSeek
    `moe_layer_freq` (every n-th block, beginning with block 0; or a list) and `first_k_dense_replace`.
    """
    first, step = read.size("first_k_dense_replace", 0), read.size("decoder_sparse_step", 1)
    frequency = read.given.get("moe_layer_freq")
    listed = frequency if isinstance(frequency, list | tuple) and frequency else [1]
    every = frequency if type(frequency) is int and frequency > 0 else 1
    dense = typed(read.where, read.given, "mlp_only_layers", list, "a list of whole numbers") or []
    if not all(type(block) is int for block in dense):
        raise ConfigError(f"{read.where}: mlp_only_layers = {as_json(dense)}: it must be a list of whole numbers")
    return tuple(
        block >= first
        and block not in dense
        and step > 0
        and (block + 1) % step == 0
        and block % every == 0
        and bool(listed[block % len(listed)])
        for block in range(blocks)
    )


def load(model: str) -> DecoderShape:
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
    name = path.parent.name if path.name == "config.json" else ""
    return shape_of(read_json(path, MODEL_CONFIG_BYTES, "a model's configuration"), name or path.stem)


def is_directory(path: str) -> bool:
    """Return whether `path` is a Hugging Face directory."""
    return (expanded(path) / "config.json").is_file()


def content_of(source: str, where: str) -> dict[str, Any]:
    """The `config.json` of a directory. Raises ConfigError, with a message that begins with `where`, where it cannot be read."""
    path = expanded(source) / "config.json"
    return _object(path, where, "a model's configuration", download(source), _nearest_folder(source))


def _object(path: Path, where: str, what: str, instead: str = "", near: str = "") -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError where there is none, with the sentence `instead` if that is given."""
    try:
        content = read_json(path, MODEL_CONFIG_BYTES, what)
        require_counts(content if isinstance(content, dict) else {})
    except (OSError, UsageError) as error:
        raise ConfigError(f"{where}: {instead or f'{path} cannot be read: {reason_of(error)}{near}'}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {path} is not a JSON object")
    return content


def is_verified(values: Mapping[str, Any]) -> bool:
    """Return whether the model of a `config.json` is of a family that has been verified in pipelines."""
    text = values.get("text_config") or {}
    return not VERIFIED_FAMILIES.isdisjoint({str(values.get("model_type")), str(text.get("model_type"))})


def foreign_shape(source: str, where: str) -> DecoderShape:
    """Return the shape of the model in a directory, as `transformers` trains it: without blocks that predict further ahead.

    Raises ConfigError, with a message that begins with `where`, for files that cannot be read, and models that cannot be counted.
    """
    path = expanded(source) / "config.json"
    shape = shape_of(content_of(source, where), path.parent.name, f"{where}: {path}")
    return replace(shape, num_nextn_predict_layers=0)


def _not_plain(values: Mapping[str, Any]) -> str:
    """Return the features of a `config.json` that our own decoder lacks, as `key = value`; empty where there are none."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    choices = {
        "hidden_act": (values.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)), 1.0),
    }
    return ", ".join(f"{key} = {json.dumps(value)}" for key, (value, plain) in choices.items() if value != plain)


def own_shape(values: Mapping[str, Any], where: str = "config.json") -> DecoderShape:
    """Return the shape with which our own decoder computes the model of a `config.json`.

    Raises:
        ForeignError: it cannot.
        ConfigError: with a message that begins with `where`; a size is missing.
    """
    kind, why = typed(where, values, "model_type", str, "text") or "", ""
    if HUB_FAMILIES.get(kind, HubFamily()).ours:
        try:
            shape, why = from_config(values, where=where), _not_plain(values)
        except UnknownModelError as error:
            if not kind:
                raise
            why = _not_plain(values) or error.what
        else:
            lacks = (kind == "qwen2_moe" and not shape.num_shared_experts) or (
                not shape.num_experts and kind in _SPARSE_FAMILIES
            )
            why = why or ", ".join(shape.foreign)
            if not why and not lacks:
                return shape
    raise ForeignError(f"Pipeloom's own decoder cannot compute this {kind or 'model'}{f' ({why})' if why else ''}")


_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "tie_word_embeddings", "num_experts", "moe_layer_freq"),
)
_OF_OUR_DECODER = ("rope_theta", "rms_norm_eps", "attention_bias", "qkv_bias", "qk_norm", "num_shared_experts")
_OF_OUR_EXPERTS = ("norm_topk_prob", "aux_loss_coef", "z_loss_coef")


def model_keys(shape: DecoderShape, *, ours: bool) -> dict[str, Any]:
    """Return the trainer's keys for a shape; `ours`: of our own decoder, for which more of them matter."""
    keys = [*_KEYS, *(_OF_OUR_DECODER if ours else ()), *(["head_dim"] if shape.head_dim else [])]
    if shape.num_experts:
        keys += ["num_experts_per_tok", "moe_intermediate_size", *(_OF_OUR_EXPERTS if ours else ())]
    if not shape.model_type:
        keys += ["router", "num_nextn_predict_layers"]
    values = {key: getattr(shape, key) for key in keys}
    if isinstance(shape.moe_layer_freq, tuple):
        values["moe_layer_freq"] = list(shape.moe_layer_freq)
    return values


def own_values(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the trainer's keys with which our own decoder computes the model of a `config.json`; None where it cannot."""
    try:
        return model_keys(own_shape(values), ours=True)
    except ForeignError:
        return None


def download(source: str) -> str:
    """Return how to get a model that `source` names as the Hugging Face Hub does (org/name); "" for any other name."""
    name = re.fullmatch(r"\w[\w.-]*/([\w.-]+)", source)
    if name is None or expanded(source).exists():
        return ""
    return f"there is no such directory, and nothing is downloaded; first:\nhf download {source} --local-dir {name[1]}"


def _nearest_folder(source: str) -> str:
    """Return the folders with a `config.json` whose names are like that of `source`, where there is none, as a question."""
    folder = expanded(source)
    names = [path.parent.name for path in folder.parent.glob("*/config.json")] if not folder.exists() else []
    near = difflib.get_close_matches(folder.name, names, n=3, cutoff=0.55)
    return f"; did you mean {' or '.join(repr(str(Path(source).parent / name)) for name in near)}?" if near else ""


ADAPTER_CONFIG = "adapter_config.json"
_MOST_RANK = 65_536  # wider than the weights of published models, so that a damaged file asks for no terabytes
# Keys of peft that say nothing about what the adapter in the file computes, whatever their values.
_HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config"),  # of `init_lora_weights`
)
_USED = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "init_lora_weights")
# Values of `init_lora_weights` that leave the model's own weights as they are
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def adapter_keys(adapter: str, where: str) -> dict[str, Any]:
    """Return the trainer's keys that describe the adapter in the directory `adapter`.

    Raises ConfigError, with a message that begins with `where`, where its configuration cannot be read, or asks for more than
    low-rank products on linear layers.
    """
    values = read_adapter_config(expanded(adapter), where)
    where = f"{where}: {ADAPTER_CONFIG}"
    for key, only in (("peft_type", "LORA"), ("bias", "none")):
        if values.get(key, "none") != only:
            raise ConfigError(f"{where}: {key} = {as_json(values.get(key))}: it must be {only!r}")
    refuse_unknown(where, values, _USED, _HARMLESS)
    if values.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        raise ConfigError(
            f"{where}: init_lora_weights = {as_json(values['init_lora_weights'])}: such an adapter belongs to weights that peft "
            "changed when it began; save it with peft's path_initial_model_for_weight_conversion"
        )
    modules = values.get("target_modules")
    if not modules or not isinstance(modules, str | list) or not all(isinstance(name, str) for name in modules):
        raise ConfigError(f"{where}: target_modules = {as_json(modules)}: it must be text or texts, and not empty")
    rank = number_in(f"{where}: r", values.get("r"), 1, _MOST_RANK, whole=True)
    alpha = number_in(f"{where}: lora_alpha", values.get("lora_alpha"))
    scaled = typed(where, values, "use_rslora", bool, "true or false")
    return {
        "r": rank,
        "lora_alpha": alpha * (math.sqrt(rank) if scaled else 1.0),
        "lora_dropout": typed(where, values, "lora_dropout", (int, float), "a number") or 0.0,
        "target_modules": modules if isinstance(modules, str) else sorted(modules),
    }


def read_adapter_config(folder: Path, where: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json` in `folder`. Raises ConfigError with a message that begins with `where`."""
    return _object(folder / ADAPTER_CONFIG, where, "an adapter's configuration")
