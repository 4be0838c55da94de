"""Megatron-LM: its flags as a `Job`, a `Job` as its flags, and what it refuses.

Names and defaults are those of Megatron-LM's argument parser and megatron-core 0.16.1's TransformerConfig.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from pipeloom.errors import UsageError, did_you_mean, divisors, nearest
from pipeloom.interop.launchers import Command, flags_of
from pipeloom.interop.shell import best_command
from pipeloom.interop.torch_runtime import not_known
from pipeloom.limits import MOST_LAYERS
from pipeloom.plan.export import layout_string
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout, even_stages
from pipeloom.shapes.cut import expand, parse_stages
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import OFFLOADED

# Flag -> our name; those of a group are written for models that have the group's first size.
_DENSE = """
    num-layers:num_hidden_layers hidden-size:hidden_size num-attention-heads:num_attention_heads vocab-size:vocab_size
    ffn-hidden-size:intermediate_size kv-channels:head_dim swiglu:gated add-qkv-bias:qkv_bias norm-epsilon:rms_norm_eps
    rotary-base:rope_theta hidden-dropout:dropout
"""
_EXPERTS = """
    num-experts:num_experts moe-router-topk:num_experts_per_tok moe-ffn-hidden-size:moe_intermediate_size
    moe-router-score-function:router moe-aux-loss-coeff:aux_loss_coef moe-z-loss-coeff:z_loss_coef
    moe-router-num-groups:n_group moe-router-group-topk:topk_group moe-shared-expert-gate:shared_expert_gate
    moe-pad-expert-input-to-capacity:pad_to_capacity
"""
_LATENT = """
    kv-lora-rank:kv_lora_rank q-lora-rank:q_lora_rank qk-head-dim:qk_nope_head_dim qk-pos-emb-head-dim:qk_rope_head_dim
    v-head-dim:v_head_dim
"""
_AHEAD = "mtp-num-layers:num_nextn_predict_layers mtp-loss-scaling-factor:mtp_loss_coef"
_PARALLEL = """
    tensor-model-parallel-size:tp pipeline-model-parallel-size:pp context-parallel-size:cp expert-model-parallel-size:ep
    micro-batch-size:micro_batch seq-length:seq
"""
*_GROUPS, _AXES = (
    [pair.split(":") for pair in text.split()] for text in (_DENSE, _EXPERTS, _LATENT, _AHEAD, _PARALLEL)
)
_DEFAULTS: dict[str, Any] = {
    "norm-epsilon": 1e-5, "hidden-dropout": 0.1, "moe-aux-loss-coeff": 0.0, "moe-z-loss-coeff": 0.0, "kv-lora-rank": 32,
    "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "swiglu": False, "moe-shared-expert-gate": False,
    "moe-pad-expert-input-to-capacity": False,
}  # fmt: skip
# Flags by the type of their value: `bool` has none, `list` several.
_KINDS: dict[str, type] = {flag: int for group in (*_GROUPS, _AXES) for flag, _ in group} | {
    name: kind
    for kind, names in {
        int: """expert-tensor-parallel-size global-batch-size padded-vocab-size make-vocab-size-divisible-by num-query-groups
            moe-shared-expert-intermediate-size max-position-embeddings num-layers-per-virtual-pipeline-stage
            num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
            microbatch-group-size-per-virtual-pipeline-stage recompute-num-layers zero-stage world-size""",
        float: """rotary-base norm-epsilon moe-aux-loss-coeff moe-z-loss-coeff mtp-loss-scaling-factor hidden-dropout
            moe-expert-capacity-factor activation-offload-fraction attention-dropout lr""",
        str: """pipeline-model-parallel-layout recompute-granularity recompute-method fp8-format fp8-recipe normalization
            position-embedding-type moe-layer-freq moe-router-score-function moe-token-dispatcher-type tokenizer-type
            data-parallel-sharding-strategy""",
        bool: """bf16 fp16 group-query-attention swiglu disable-bias-linear add-qkv-bias qk-layernorm moe-shared-expert-gate
            moe-pad-expert-input-to-capacity
            untie-embeddings-and-output-weights moe-router-pre-softmax multi-latent-attention use-distributed-optimizer
            account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split no-overlap-p2p-communication
            overlap-p2p-communication-warmup-flush overlap-grad-reduce overlap-param-gather
            overlap-moe-expert-parallel-comm delay-wgrad-compute tp-comm-overlap fine-grained-activation-offloading
            grad-reduce-in-bf16 moe-enable-deepep sequence-parallel use-megatron-fsdp use-custom-fsdp recompute-activations
            use-rotary-position-embeddings checkpoint-activations use-checkpoint-args merge-file""",
        list: "recompute-modules offload-modules cp-comm-type rampup-batch-size",
    }.items()
    for name in names.split()
}
_OLDER = {
    "activations-checkpoint-method": "recompute-method", "activations-checkpoint-num-layers": "recompute-num-layers",
    "checkpoint-num-layers": "recompute-num-layers",
}  # fmt: skip
_SIZES = {flag for flag, _ in _AXES} | {"num-layers", "hidden-size", "num-attention-heads", "global-batch-size"}
# Flags of what a model computes, or of what a step costs, that are neither written nor predicted.
_LOST = """
    apply-layernorm-1p fp8-param-gather moe-router-enable-expert-bias moe-router-force-load-balancing
    moe-router-topk-scaling-factor mscale* no-bias-* no-gradient-accumulation-fusion no-rope-fusion openai-gelu rope-scal*
    rotary-scal* rotary-seq-len-interpolation-factor spec use-precision-aware-optimizer use-rope-scaling use-tp-pp-dp-mapping
"""
_FUSED = "fused attention, which keeps no scores,"
# Flag -> the values that it is read with, and what is read in place of others.
_READ_AS = {
    "fp16": ("", "bf16"), "fp8-format": ("hybrid", "hybrid"), "optimizer": ("adam", "the state of adam"),
    "position-embedding-type": ("rope learned_absolute", "rope"), "rotary-percent": ("1 1.0", "1.0"),
    "attention-backend": ("auto flash fused", _FUSED), "moe-router-load-balancing-type": ("aux_loss", "aux_loss"),
    "moe-flex-dispatcher-backend": ("deepep", "deepep"), "transformer-impl": ("transformer_engine", _FUSED),
}  # fmt: skip
# Flags of data, logs, checkpoints, the optimizer's rates and kernels: neither sizes, nor what the model computes, nor time and
# memory by more than their own small tensors.
_HARMLESS = """
    *-ckpt* *-data-args-path *-data-path *-random-seed *-straggler* accumulate-allreduce-grads-in-fp32 adam-*
    async-save attention-softmax-in-fp32 bert-* beta-* bias-*
    calculate-per-token-loss clip-grad cross-entropy-* data-* dataloader-type ddp-* decoupled-*
    deepspeed-activation-checkpointing dist-* distributed-* empty-unused-memory-level enable-experimental end-weight-decay
    eod-* eval-* exit-* finetune fp8-amax-* fp8-interval fp8-margin
    gradient-accumulation-fusion high-priority-* init-* initial-* load load-* log-* logging-level lr-* manual-gc*
    min-lr mock-data moe-grouped-gemm moe-per-layer-logging moe-permute-fusion moe-router-bias-update-rate
    moe-router-dtype moe-router-fusion nccl-* no-async-* no-check-for-nan*
    no-create-attention-mask-in-dataloader no-initialization no-load-*
    no-masked-softmax-fusion no-mmap-bin-files no-persist-layer-norm no-position-embedding no-save-*
    num-dataset-builder-threads num-workers override-opt* per-split-data-args-path profile* rerun-* reset-*
    save save-* seed sft
    split start-weight-decay te-rng-tracker tensorboard-* test-mode tiktoken-* timing-* tokenizer-* tp-comm-overlap-*
    train-iters train-samples use-checkpoint-opt* use-flash-attn use-mcore-models
    use-pytorch-profiler vocab-file wandb-* weight-decay*
"""
PART_MODULES = {
    "norms": "layernorm", "attention": "core_attn", "activation": "moe_act", "mlp": "mlp", "experts": "moe",
    "shared": "shared_experts", "latent_up": "mla_up_proj",
}  # fmt: skip
"""Part of a block -> the module that Megatron recomputes."""
_SWITCHES = {
    "blocking_p2p": "no-overlap-p2p-communication",
    "overlap_warmup": "overlap-p2p-communication-warmup-flush", "overlap_grads": "overlap-grad-reduce",
    "overlap_params": "overlap-param-gather", "overlap_experts": "overlap-moe-expert-parallel-comm",
    "delay_wgrad": "delay-wgrad-compute", "overlap_tensor": "tp-comm-overlap",
}  # fmt: skip
_SHARDED = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def read(text: str, shape: DecoderShape | None = None) -> Job:
    """Return the run that a line of flags, or a launch script, starts.

    Args:
        shape: of the model, where the flags do not describe one.

    Raises UsageError where it starts none, or for a bad value.
    """
    table = re.search(r"^MODEL_ARGS:.*", text, re.MULTILINE | re.DOTALL)
    values, unknown = _values(_of_table(table[0]) if table else best_command(text, "megatron", _known))
    described = _shape(values, unknown)
    return _job(values, described or shape, unknown)


def _known(word: str) -> bool:
    name = word[2:].partition("=")[0].replace("_", "-")
    return word.startswith("--") and (name in _KINDS or name in _OLDER)


def _of_table(text: str) -> Command:
    """Return the flags of a table `MODEL_ARGS` of YAML, as the tests of Megatron-LM have them."""
    words = list[str]()
    for flag, value in re.findall(r"^[ ]+(--[\w-]+):[ ]*(.*?)[ ]*(?:[ ]#.*)?$", text, re.MULTILINE):
        value = re.sub(r"\\+", "", value.strip("\"'"))
        if value.lower() not in ("true", "false"):
            words += [flag, *(value.strip("[]").replace(",", " ").split() if _KINDS.get(flag[2:]) is list else [value])]
        elif value.lower() == "true":
            words.append(flag)
    return Command(tuple(words), ())


def _values(command: Command) -> tuple[dict[str, Any], list[str]]:
    """Return flag -> value, and sentences on what is not known; a value that only a run would tell is None."""
    values: dict[str, Any] = {"processes": command.processes}
    unknown = [*command.unresolved, *(f"--{flag} is not known" for flag in command.strange)]
    for flag, given in flags_of(command.words[command.program :]):
        name = flag.replace("_", "-")
        name = _OLDER.get(name, name)
        kind = _KINDS.get(name)
        value = " ".join(given[:1])
        held, instead = _READ_AS.get(name, (value, ""))
        if name in _READ_AS and value not in held.split():
            unknown.append(f"{f'--{flag} {value:.60}'.strip()}: {instead} is read")
        elif _matches(name, _LOST):
            unknown.append(f"{f'--{flag} {value:.60}'.strip()}: it is neither written nor predicted")
        elif kind is None and name not in _READ_AS and not _matches(name, _HARMLESS):
            unknown.append(not_known(f"--{flag}", name, _KINDS))
        if kind is None:
            continue
        if kind is bool:
            values[name] = True
        elif not given:
            raise UsageError(f"megatron: --{flag} has no value")
        elif any("$" in word for word in (given if kind is list else given[:1])):
            values[name] = None
            unknown.append(f"--{flag} {' '.join(given):.60}: its value is not in the text")
        else:
            values[name] = given if kind is list else _converted(flag, kind, given[0])
    return values, unknown


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())


def _converted(flag: str, kind: type, text: str) -> Any:
    least = 1 if flag.replace("_", "-") in _SIZES else -1
    try:
        value = kind(text)
        if kind is str or least <= value < 10**9:
            return value
    except (ValueError, OverflowError):
        pass
    what = f"a whole number of at least {least}" if kind is int else "a number"
    raise UsageError(f"megatron: --{flag} {text:.60}: it must be {what}")


def _shape(values: Mapping[str, Any], unknown: list[str]) -> DecoderShape | None:
    """Return the model, and add a sentence for each size that the flags do not give, or that we do not have."""
    if not all(values.get(key) for key in ("num-layers", "hidden-size", "num-attention-heads")):
        unknown.append("the model is not in the flags: they lack --num-layers, --hidden-size or --num-attention-heads")
        return None
    get = values.get
    sizes: dict[str, Any] = {}
    needs = ("num-layers", "num-experts", "multi-latent-attention", "mtp-num-layers")
    for group, need in zip(_GROUPS, needs, strict=True):
        if get(need):
            given = {field: get(flag, _DEFAULTS.get(flag)) for flag, field in group}
            sizes |= {field: value for field, value in given.items() if value is not None}
    heads, hidden, latent = sizes["num_attention_heads"], sizes["hidden_size"], bool(get("multi-latent-attention"))
    if padded := get("padded-vocab-size"):
        sizes["vocab_size"] = padded
    else:
        tokenizer = get("tokenizer-type") or ("GPT2BPETokenizer" if get("merge-file") else "")
        if "vocab_size" not in sizes:
            sizes["vocab_size"] = _VOCABULARIES.get(tokenizer, 128_256)
            unknown.append(f"--vocab-size is not given (the tokenizer has it): {sizes['vocab_size']:,} is assumed")
        multiple = (get("make-vocab-size-divisible-by") or 128) * (get("tensor-model-parallel-size") or 1)
        sizes["vocab_size"] = -(-sizes["vocab_size"] // multiple) * multiple
    width = int(4 * hidden * 2 / 3 / 64) * 64 if sizes.get("gated") else 4 * hidden
    biases = not get("disable-bias-linear")
    if sizes.get("num_experts"):
        inner = sizes.setdefault("moe_intermediate_size", sizes.get("intermediate_size", width))
        copies, rest = divmod(get("moe-shared-expert-intermediate-size") or 0, inner or 1)
        sizes |= {"num_shared_experts": 0 if rest else copies}
        sizes |= {"shared_expert_intermediate_size": rest and copies * inner + rest}
        sizes["shared_expert_gate"] = sizes["shared_expert_gate"] or not copies + rest
        freq = get("moe-layer-freq")
        sizes |= {
            "moe_layer_freq": 1 if freq is None else _layer_freq(freq),
            "norm_topk_prob": not get("moe-router-pre-softmax"),
        }
    if latent and "q_lora_rank" not in sizes:
        sizes["q_lora_rank"] = 0
    learned = get("position-embedding-type") in (None, "learned_absolute") and not get("use-rotary-position-embeddings")
    options: dict[str, Any] = {
        "intermediate_size": width,
        "num_key_value_heads": (get("num-query-groups") or 1) if get("group-query-attention") else heads,
        "attention_bias": biases,
        "mlp_bias": biases,
        "qk_norm": bool(get("qk-layernorm")) and not latent,
        "tie_word_embeddings": not get("untie-embeddings-and-output-weights"),
        "n_positions": (learned and get("max-position-embeddings")) or 0,
    }
    return DecoderShape(**(options | sizes), model_type="megatron", name="the model of the flags")


def _layer_freq(text: str) -> int | tuple[int, ...]:
    """Return the value of `--moe-layer-freq`: a number, or a pattern such as `([0]*3+[1]*58)`, as it says."""
    if text.isdigit() and int(text):
        return int(text)
    try:
        pattern = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = []
    if not pattern:
        raise UsageError(f"megatron: --moe-layer-freq {text!r:.60} is no number, and no list of 0 and 1")
    return tuple(pattern)


def _pattern(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        values = [item.value for item in node.elts if isinstance(item, ast.Constant) and item.value in (0, 1)]
        if len(values) == len(node.elts):
            return [int(bool(value)) for value in values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_pattern(node.left) + _pattern(node.right))[:MOST_LAYERS]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        return _pattern(node.left) * min(int(str(node.right.value)), MOST_LAYERS)
    raise ValueError


def _job(values: Mapping[str, Any], shape: DecoderShape | None, unknown: list[str]) -> Job:
    get = values.get
    axes: dict[str, Any] = {field: get(flag) or 1 for flag, field in _AXES}
    if not get("seq-length"):
        axes["seq"] = get("max-position-embeddings") or 4096
        unknown.append(f"--seq-length is not in the text: {axes['seq']:,} tokens are assumed")
    tp, pp, cp, ep = (axes[name] for name in ("tp", "pp", "cp", "ep"))
    devices = get("world-size") or get("processes")
    if not devices:
        unknown.append("the number of devices is not in the text: one replica is assumed")
        devices = math.lcm(tp * cp, (get("expert-tensor-parallel-size") or tp) * ep) * pp
    copy = tp * pp * cp
    if rest := devices % copy:
        near = nearest(devices, {copy, devices - rest, devices - rest + copy} - {0})
        raise UsageError(f"megatron: {devices} devices are no multiple of tp x pp x cp = {copy} (arguments.py); {near}")
    dp, micro = devices // copy, axes["micro_batch"]
    total = get("global-batch-size") or micro * dp
    if total % (micro * dp):
        near = max(1, total // (micro * dp)) * micro * dp
        raise UsageError(
            f"megatron: --global-batch-size {total} is no multiple of micro-batch x dp = {micro * dp} "
            f"(num_microbatches_calculator.py); nearest: {near}"
        )
    gated = get("swiglu") and get("normalization") != "RMSNorm"
    unknown += ["LayerNorm beside --swiglu is read as RMSNorm, without its bias"] * bool(gated)
    unknown += ["--use-checkpoint-args: sizes of the checkpoint would replace these"] * bool(get("use-checkpoint-args"))
    unknown += ["neither --bf16 nor --fp16 is given: 16 bits are read"] * (not get("bf16") and not get("fp16"))
    unknown += ["--rampup-batch-size: steps behind the ramp are read"] * bool(get("rampup-batch-size"))
    options = [name for name, flag in _SWITCHES.items() if get(flag)]
    stages, v = _stages(values, get("num-layers") or (shape.num_hidden_layers if shape else 0), pp)
    offload = (get("offload-modules") or ()) if get("fine-grained-activation-offloading") else ()
    _require_known("offload-modules", offload, OFFLOADED)
    recompute, layers, span = _recomputing(values)
    dispatcher = get("moe-token-dispatcher-type") or ""
    layout = PlannedLayout(
        dp, v=v,
        m=total // (micro * dp),
        zero=_zero(values),
        recompute=recompute,
        schedule="1f1b" if v == 1 else "interleaved-overlap" if "overlap_experts" in options else "interleaved",
        capacity=max(0.0, get("moe-expert-capacity-factor") or 0.0),
        etp=get("expert-tensor-parallel-size") or 0,
        grads="bf16" if get("grad-reduce-in-bf16") else "fp32",
        offload="+".join(offload) or "none",
        group=get("microbatch-group-size-per-virtual-pipeline-stage") or 0,
        stages=stages,
        recompute_layers=layers,
        **axes,
    )  # fmt: skip
    return Job(
        shape, layout, span,
        offload_share=get("activation-offload-fraction") or 1.0,
        fp8=(get("fp8-recipe") or "delayed") if get("fp8-format") else "",
        options=tuple(sorted(options)),
        context="+".join(get("cp-comm-type") or ()) if cp > 1 else "",
        dispatcher="deepep" if dispatcher == "flex" or get("moe-enable-deepep") else dispatcher,
        sequence=bool(get("sequence-parallel")),
        attention_dropout=get("attention-dropout", 0.1) or 0.0,
        rate=max(0.0, get("lr") or 0.0),
        unknown=tuple(unknown),
    )  # fmt: skip


def _zero(values: Mapping[str, Any]) -> int:
    if values.get("use-megatron-fsdp") or values.get("use-custom-fsdp"):
        return _SHARDED.get(values.get("data-parallel-sharding-strategy") or "", 0)
    return values.get("zero-stage") or int(bool(values.get("use-distributed-optimizer")))


def _recomputing(values: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return what is recomputed, of how many blocks of a stage, and how many blocks together."""
    granularity = "selective" if values.get("recompute-activations") else values.get("recompute-granularity")
    count = values.get("recompute-num-layers") or 1
    if granularity == "full" or (
        not granularity and (values.get("checkpoint-activations") or values.get("recompute-method"))
    ):
        return ("full", count, 1) if values.get("recompute-method") == "block" else ("full", 0, count)
    if granularity != "selective":
        return "none", 0, 1
    modules = values.get("recompute-modules") or ["core_attn"]
    _require_known("recompute-modules", modules, PART_MODULES.values())
    return "+".join(part for part, module in PART_MODULES.items() if module in modules) or "none", 0, 1


def _require_known(flag: str, given: Sequence[str], known: Iterable[str]) -> None:
    if wrong := [module for module in given if module not in known]:
        raise UsageError(f"megatron: --{flag} {wrong[0]!r:.60} is not known{did_you_mean(wrong[0], known)}")


def _stages(values: Mapping[str, Any], layers: int, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage, embedding and output layer among them (none: even), and the chunks of a rank."""
    get, ahead = values.get, values.get("mtp-num-layers") or 0
    if text := get("pipeline-model-parallel-layout"):
        count = len(expand(text).removesuffix("|").split("|"))
        if count % pp:
            whole = max(1, count // pp) * pp
            raise UsageError(
                f"megatron: the layout {text!r:.200} has {count} stages, no multiple of {pp} ranks; nearest: {whole}"
            )
        try:
            return tuple(parse_stages(text, layers, count, ahead)), count // pp
        except UsageError as error:
            raise UsageError(
                f"megatron: the layout {text!r:.200}: {error} (pipeline_parallel_layer_layout.py)"
            ) from None
    ends = [get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    extra = [int(bool(get(f"account-for-{what}-in-pipeline-split"))) for what in ("embedding", "loss")]
    middle, rest = pp - sum(end is not None for end in ends), layers - sum(end or 0 for end in ends) + sum(extra)
    if rest % max(1, middle) or rest < 0 or (not middle and rest):
        raise UsageError(
            f"megatron: {rest} layers are no multiple of the {middle} pipeline ranks that divide them (transformer_config.py); "
            f"{nearest(middle, divisors(max(1, rest)))}, or a --pipeline-model-parallel-layout"
        )
    ranks = [rest // max(1, middle)] * pp
    ranks[0], ranks[-1] = (ranks[at] if end is None else end for at, end in zip((0, -1), ends, strict=True))
    v = get("num-virtual-stages-per-pipeline-rank") or 1
    if per_stage := get("num-layers-per-virtual-pipeline-stage"):
        v = max(1, ranks[0] // per_stage) if ranks[0] % per_stage == 0 else 0
    if v < 1 or any(count % v for count in ranks):
        near = nearest(v or ranks[0] // (per_stage or 1), divisors(math.gcd(*ranks)))
        raise UsageError(
            f"megatron: the chunks do not divide the {ranks[0]} layers of a rank (arguments.py); {near} chunks"
        )
    sizes = [ranks[at % pp] // v for at in range(pp * v)]
    sizes[0] += 1 - extra[0]
    sizes[-1] += 1 - extra[1] + ahead
    return (() if pp == 1 or not layers else tuple(sizes)), v


def write(job: Job) -> str:
    """Return the command that starts this run, one flag to a line."""
    layout, shape = job.layout, job.shape
    flags: dict[str, object] = {} if shape is None else _model_flags(shape, layout.seq)
    flags |= {flag: getattr(layout, field) for flag, field in _AXES}
    flags |= {"global-batch-size": layout.sequences, "sequence-parallel": job.sequence and layout.tp > 1, "bf16": True}
    flags["attention-dropout"] = job.attention_dropout
    if layout.etp:
        flags["expert-tensor-parallel-size"] = layout.etp
    if layout.zero == 1:
        flags["use-distributed-optimizer"] = True
    elif layout.zero:
        strategy = {level: name for name, level in _SHARDED.items()}[layout.zero]
        flags |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy}
    ahead = 0 if shape is None else shape.num_nextn_predict_layers
    blocks = sum(layout.stages) - 2 - ahead
    count = len(layout.stages) or 1
    if layout.stages and (blocks % count or layout.stages != even_stages(blocks, count, ahead)):
        flags["pipeline-model-parallel-layout"] = f"'{layout_string(layout.stages, ahead)}'"
    elif layout.v > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = layout.v
    flags |= {"microbatch-group-size-per-virtual-pipeline-stage": layout.group or False} | _recompute_flags(job)
    if layout.offload != "none":
        flags |= {"fine-grained-activation-offloading": True, "offload-modules": layout.offload.replace("+", " ")}
        flags |= {"activation-offload-fraction": job.offload_share if job.offload_share < 1 else False}
    flags |= {"fp8-format": "hybrid", "fp8-recipe": job.fp8} if job.fp8 else {}
    flags |= {"grad-reduce-in-bf16": layout.grads == "bf16", "cp-comm-type": job.context.replace("+", " ") or False}
    flags |= {flag: name in job.options for name, flag in _SWITCHES.items()}
    if job.dispatcher:
        flags["moe-token-dispatcher-type"] = "flex" if job.dispatcher == "deepep" else job.dispatcher
        flags["moe-enable-deepep"] = job.dispatcher == "deepep"
    flags["moe-expert-capacity-factor"] = layout.capacity or False
    per_node = math.gcd(layout.world, 8)
    start = f"torchrun --nnodes {layout.world // per_node} --nproc-per-node {per_node} pretrain_gpt.py"
    words = (
        f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in flags.items() if value is not False
    )
    return " \\\n".join((start, *words)) + "\n"


def _model_flags(shape: DecoderShape, seq: int) -> dict[str, object]:
    """Return the flags of a model; sizes of 0 are those that it does not have."""
    flags: dict[str, object] = {}
    for group in _GROUPS:
        if getattr(shape, group[0][1]):
            values = {flag: getattr(shape, field) for flag, field in group}
            flags |= {flag: value for flag, value in values.items() if value or isinstance(value, float)}
    grouped = shape.num_key_value_heads != shape.num_attention_heads
    flags |= {
        "make-vocab-size-divisible-by": 1,
        "group-query-attention": grouped,
        "num-query-groups": grouped and shape.num_key_value_heads,
        "disable-bias-linear": not shape.attention_bias,
        "qk-layernorm": shape.qk_norm or bool(shape.kv_lora_rank),
        "multi-latent-attention": bool(shape.kv_lora_rank),
        "untie-embeddings-and-output-weights": not shape.tie_word_embeddings,
        "normalization": "RMSNorm" if shape.gated else "LayerNorm",
        "position-embedding-type": "learned_absolute" if shape.n_positions else "rope",
        "max-position-embeddings": shape.n_positions or seq,
    }
    if shape.num_experts:
        freq = shape.moe_layer_freq
        flags |= {
            "moe-layer-freq": freq if isinstance(freq, int) else f"'{list(freq)}'".replace(" ", ""),
            "moe-ffn-hidden-size": shape.expert_width,
            "moe-shared-expert-intermediate-size": shape.shared_width or False,
            "moe-shared-expert-gate": shape.shared_expert_gate and bool(shape.shared_width),
            "moe-router-pre-softmax": not shape.norm_topk_prob,
            "moe-grouped-gemm": True,
        }
        if shape.n_group == 1:
            del flags["moe-router-num-groups"], flags["moe-router-group-topk"]
    return flags


def _recompute_flags(job: Job) -> dict[str, object]:
    recompute, layers = job.layout.recompute, job.layout.recompute_layers
    if recompute == "none":
        return {}
    if recompute == "full":
        method, count = ("block", layers) if layers else ("uniform", job.recompute_span)
        return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": count}
    modules = " ".join(PART_MODULES[part] for part in recompute.split("+"))
    return {"recompute-granularity": "selective", "recompute-modules": modules}


def refusals(job: Job) -> list[str]:
    """Return a sentence for each thing that Megatron-LM refuses, with the file that does."""
    rows = [*_refused_schedules(job), *_refused_overlaps(job), *_refused_models(job)]
    return [f"{words} ({check}); nearest: {near}" for holds, words, check, near in rows if holds]


_Row = tuple[bool, str, str, str]
_FAMILIES = ("1f1b", "interleaved", "interleaved-overlap")
_SCHEDULES, _CONFIG, _ARGUMENTS = "pipeline_parallel/schedules.py", "transformer_config.py", "arguments.py"


def _refused_schedules(job: Job) -> list[_Row]:
    layout = job.layout
    p, m, group = layout.pp, layout.m, layout.group or layout.pp
    looped, rest = layout.v > 1, m % group
    family = layout.schedule if p > 1 else "1f1b"
    etp, spread = layout.etp or layout.tp, layout.world // p
    experts = etp * layout.ep * p
    near = f"ep={math.gcd(spread // math.gcd(spread, etp), layout.ep)}" if spread % layout.ep else "etp=1"
    return [
        (family not in _FAMILIES, f"there is no schedule {family!r:.60}", _SCHEDULES, "interleaved"),
        (family == "1f1b" and looped, f"1f1b has one chunk, not {layout.v}", _SCHEDULES, "schedule=interleaved"),
        (family.startswith("interleaved") and not looped and p > 1, f"{family} needs chunks", _SCHEDULES, "v=2"),
        (looped and p == 1, f"v={layout.v} needs more than one pipeline rank", "parallel_state.py", "v=1"),
        (looped and p == 2 and "blocking_p2p" in job.options, "chunks on two ranks need overlapped messages", _ARGUMENTS, "pp=4"),
        (looped and not p <= group <= max(m, p), f"a group of {group} is outside {p} to {m}", _SCHEDULES, f"group={p}"),
        (looped and m < p, f"m={m} is less than the {p} ranks", _SCHEDULES, f"m={p}"),
        (looped and m >= p and 0 < rest < p, f"m={m} leaves {rest} micro-batches over groups of {group}, fewer than the ranks",
         _SCHEDULES, f"m={max(group, m - rest)}"),
        (layout.world % experts > 0, f"etp x ep x pp = {experts} does not divide {layout.world} devices", "parallel_state.py",
         near),
    ]  # fmt: skip


def _refused_overlaps(job: Job) -> list[_Row]:
    layout, options = job.layout, job.options
    experts, params = "overlap_experts" in options, "overlap_params" in options
    what = "the overlap of experts' exchange"
    return [
        (experts and layout.recompute == "full", f"{what} does not recompute whole blocks", _CONFIG, "recompute=none"),
        (experts and layout.pp > 1 and layout.v == 1, f"{what} over pipeline ranks needs chunks", _CONFIG, "v=2"),
        (experts and layout.ep == 1, f"{what} needs experts on several ranks", _CONFIG, "ep=2"),
        (experts and job.dispatcher in ("", "allgather"), f"{what} needs another dispatcher", _CONFIG, "alltoall"),
        (layout.schedule == "interleaved-overlap" and not experts, f"a schedule of pairs is {what}", _SCHEDULES, "interleaved"),
        (experts and layout.schedule == "interleaved", f"{what} pairs its chunks", _SCHEDULES, "interleaved-overlap"),
        ("overlap_warmup" in options and (layout.v == 1 or "blocking_p2p" in options),
         "messages of the warm-up overlap where those of chunks do", "model_parallel_config.py", "no overlap_warmup"),
        ("delay_wgrad" in options and not experts, f"delay_wgrad needs {what}", _CONFIG, "overlap_experts"),
        (params and "overlap_grads" not in options, "the overlap of parameters needs that of sums", _ARGUMENTS, "overlap_grads"),
        ("overlap_tensor" in options and layout.tp == 1, "the overlap of tp's exchanges needs some", _ARGUMENTS, "tp=2"),
        ("overlap_tensor" in options and not job.sequence, "the overlap of tp's exchanges needs sequence parallelism",
         _ARGUMENTS, "--sequence-parallel"),
        (params and not layout.zero, "the overlap of parameters needs the distributed optimizer", _ARGUMENTS, "zero=1"),
        (layout.offload.split("+").count("attn_proj") > layout.offload.split("+").count("core_attn"),
         "attn_proj goes to the host with core_attn alone", _CONFIG, "offload=attn_proj+core_attn"),
        (job.fp8 == "delayed" and not {"norms", "activation"}.isdisjoint(layout.recompute.split("+")),
         "delayed scaling does not recompute norms or activations", _CONFIG, "recompute=attention"),
    ]  # fmt: skip


def _refused_models(job: Job) -> list[_Row]:
    layout, shape = job.layout, job.shape
    if shape is None:
        return []
    heads, groups, parts = shape.num_attention_heads, shape.num_key_value_heads, layout.recompute.split("+")
    foreign = shape.counted is not None or any(shape.reach) or shape.router not in ("softmax", "sigmoid")
    uneven = layout.pp > 1 and not layout.stages and shape.num_hidden_layers % (layout.pp * layout.v) > 0
    return [
        (heads % layout.tp > 0, f"tp={layout.tp} does not divide the {heads} heads", _CONFIG, f"tp={math.gcd(heads, layout.tp)}"),
        (groups % layout.tp > 0 and layout.tp % groups > 0, f"tp={layout.tp} and the {groups} key and value heads", _CONFIG,
         f"tp={math.gcd(groups, layout.tp)}"),
        (shape.num_experts > 0 and not job.sequence, f"experts over tp={layout.tp} need sequence parallelism", "moe_layer.py",
         "--sequence-parallel"),
        (layout.ep > 1 and not shape.num_experts, f"ep={layout.ep} needs experts", _CONFIG, "ep=1"),
        (shape.num_experts % layout.ep > 0, f"ep={layout.ep} does not divide the {shape.num_experts} experts", _CONFIG,
         f"ep={math.gcd(shape.num_experts, layout.ep)}"),
        (uneven, f"{layout.pp * layout.v} stages, {shape.num_hidden_layers} blocks", _ARGUMENTS, "explicit stages"),
        ("activation" in parts and not shape.num_experts, "moe_act is a part of experts", _CONFIG, "recompute=mlp"),
        ("latent_up" in parts and not shape.kv_lora_rank, "latent_up needs latent attention", _CONFIG, "recompute=attention"),
        (foreign, "the model has parts that its flags do not describe", _CONFIG, "a preset"),
        (layout.seq % (2 * layout.cp) > 0 and layout.cp > 1, f"{layout.seq} tokens, cp={layout.cp}", _ARGUMENTS, "cp=1"),
        (layout.seq % layout.tp > 0 and job.sequence, f"{layout.seq} tokens, tp={layout.tp}", _ARGUMENTS, "tp=1"),
    ]  # fmt: skip
