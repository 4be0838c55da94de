"""Megatron-LM: its flags as a `Job`, a `Job` as its flags, and what it refuses.

Names and defaults are those of Megatron-LM's `arguments.py` and megatron-core 0.16.1's `TransformerConfig`.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, NoReturn

from pipeloom.errors import UsageError
from pipeloom.interop.shell import Command, commands_of
from pipeloom.limits import MOST_LAYERS
from pipeloom.plan.export import layout_string
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout
from pipeloom.shapes.cut import parse_stages
from pipeloom.shapes.decoder import DecoderShape

# Flags by the type of their value: `switch` has none, `list` several.
_FLAGS = {
    int: """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
        expert-tensor-parallel-size micro-batch-size global-batch-size seq-length num-layers hidden-size ffn-hidden-size
        num-attention-heads num-query-groups kv-channels vocab-size padded-vocab-size make-vocab-size-divisible-by num-experts
        moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-num-groups moe-router-group-topk
        q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mtp-num-layers max-position-embeddings
        num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers
        decoder-last-pipeline-num-layers microbatch-group-size-per-virtual-pipeline-stage recompute-num-layers
        nproc-per-node nproc_per_node nnodes world-size""",
    float: """rotary-base norm-epsilon moe-aux-loss-coeff moe-z-loss-coeff mtp-loss-scaling-factor moe-expert-capacity-factor
        activation-offload-fraction attention-dropout hidden-dropout""",
    str: """pipeline-model-parallel-layout recompute-granularity recompute-method fp8-format fp8-recipe normalization
        position-embedding-type moe-layer-freq moe-router-score-function moe-token-dispatcher-type
        data-parallel-sharding-strategy""",
    bool: """group-query-attention swiglu disable-bias-linear add-qkv-bias qk-layernorm untie-embeddings-and-output-weights
        moe-shared-expert-gate moe-router-pre-softmax multi-latent-attention sequence-parallel use-distributed-optimizer
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split no-overlap-p2p-communication
        overlap-p2p-communication-warmup-flush overlap-grad-reduce overlap-param-gather overlap-moe-expert-parallel-comm
        delay-wgrad-compute fine-grained-activation-offloading grad-reduce-in-bf16 bf16 fp16 moe-enable-deepep
        use-megatron-fsdp use-custom-fsdp recompute-activations moe-grouped-gemm""",
    list: "recompute-modules offload-modules cp-comm-type",
}
# Flags that change neither sizes nor time nor memory by more than their own small tensors.
_HARMLESS = """
    *-ckpt* *-data-path *-straggler* accumulate-allreduce-grads-in-fp32 adam-* apply-layernorm-1p async-save
    attention-backend attention-softmax-in-fp32 auto-detect-ckpt-format beta-fast beta-slow bf16 ckpt-* clip-grad
    cross-entropy-* data-* dataloader-type ddp-* dist-ckpt-* distributed-* enable-experimental end-weight-decay eval-*
    exit-* high-priority-* init-method-std initial-* load load-* log-* log_dir lr lr-* manual-gc* master-addr
    master-port master_addr master_port merge-file min-lr mock-data moe-per-layer-logging moe-permute-fusion
    moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias moe-router-fusion
    moe-router-load-balancing-type moe-router-topk-scaling-factor mscale* nccl-* no-bias-* no-check-for-nan*
    no-create-attention-mask-in-dataloader no-load-* no-masked-softmax-fusion no-mmap-bin-files no-position-embedding
    no-rope-fusion no-save-* node-rank node_rank num-workers override-opt_param-scheduler profile* rdzv-* rdzv_*
    redirects rerun-* reset-* rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor save save-*
    seed split start-weight-decay tee tensorboard-* timing-* tokenizer-* tp-comm-overlap train-iters train-samples
    transformer-impl use-checkpoint-* use-flash-attn use-mcore-models use-pytorch-profiler
    use-rotary-position-embeddings use-tp-pp-dp-mapping vocab-file wandb-* weight-decay* weight-decay-incr-style
"""
_PARTS = {  # part of a block -> the module that Megatron recomputes
    "norms": "layernorm", "attention": "core_attn", "activation": "moe_act", "mlp": "mlp", "experts": "moe",
    "shared": "shared_experts", "latent_up": "mla_up_proj",
}  # fmt: skip
_SWITCHES = {
    "overlap_warmup": "overlap-p2p-communication-warmup-flush",
    "overlap_grads": "overlap-grad-reduce",
    "overlap_params": "overlap-param-gather",
    "overlap_experts": "overlap-moe-expert-parallel-comm",
    "delay_wgrad": "delay-wgrad-compute",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"megatron: {message}")


def _parser() -> _Parser:
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for kind, names in _FLAGS.items():
        for name in names.split():
            if kind is bool:
                parser.add_argument(f"--{name}", action="store_true")
            elif kind is list:
                parser.add_argument(f"--{name}", nargs="+")
            else:
                parser.add_argument(f"--{name}", type=kind)
    return parser


def accepts(text: str) -> bool:
    """Return whether a text looks like a launch script or the flags of Megatron-LM."""
    return "--tensor-model-parallel-size" in text or "--pipeline-model-parallel-size" in text or "--num-layers " in text


def read(text: str) -> Job:
    """Return the run that a line of flags, or a launch script, starts.

    Raises UsageError where it starts none, or for a bad value.
    """
    commands = commands_of(text)
    if not commands:
        raise UsageError(
            "megatron: there is no command in this text; give the flags of pretrain_gpt.py, or the script that starts it"
        )
    command = max(commands, key=lambda each: sum(word.startswith("--") for word in each.words))
    known, rest = _parser().parse_known_args(_flags_only(command))
    values = {name.replace("_", "-"): value for name, value in vars(known).items()}
    return _job(values, (*_unknown(rest), *command.unresolved))


def _flags_only(command: Command) -> list[str]:
    """Return the words from the first flag on; what was not resolved is left out with its flag."""
    words = list(command.words)
    start = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    kept: list[str] = []
    for word in words[start:]:
        if "$" in word and command.unresolved:
            if kept and kept[-1].startswith("--"):
                kept.pop()
        else:
            kept.append(word)
    return kept


def _unknown(rest: Sequence[str]) -> list[str]:
    """Return a sentence for each flag that is neither used nor harmless."""
    flags = [word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")]
    return [
        f"--{flag} is not known" for flag in flags if not any(fnmatch(flag, pattern) for pattern in _HARMLESS.split())
    ]


def _job(values: Mapping[str, Any], unknown: tuple[str, ...]) -> Job:
    get = values.get
    shape, more = _shape(values)
    tp, pp, cp = (int(get(f"{axis}-parallel-size", 1)) for axis in ("tensor-model", "pipeline-model", "context"))
    devices = get("world-size")
    if devices is None and (per_node := get("nproc-per-node")) is not None:
        devices = per_node * get("nnodes", 1)
    unknown = (*unknown, *more)
    if devices is None:
        unknown = (*unknown, "the number of devices is not in the text: one replica is assumed")
        devices = tp * pp * cp
    if devices % (tp * pp * cp):
        raise UsageError(
            f"megatron: {devices} devices are no multiple of tp x pp x cp = {tp * pp * cp}; nearest: {tp * pp * cp}"
        )
    dp, micro_batch = devices // (tp * pp * cp), get("micro-batch-size", 1)
    sequences = get("global-batch-size", micro_batch * dp)
    if sequences % (micro_batch * dp):
        raise UsageError(
            f"megatron: --global-batch-size {sequences} is no multiple of micro-batch size x dp = {micro_batch * dp}; "
            f"nearest: {max(1, sequences // (micro_batch * dp)) * micro_batch * dp}"
        )
    ep = get("expert-model-parallel-size", 1)
    options = [name for name, flag in _SWITCHES.items() if get(flag)]
    stages, v = _stages(values, shape, pp)
    if v > 1 and not get("no-overlap-p2p-communication"):
        options.append("overlap_p2p")
    schedule = "1f1b" if v == 1 else "interleaved-overlap" if "overlap_experts" in options else "interleaved"
    layout = PlannedLayout(
        dp, tp, cp, pp, ep, v, sequences // (micro_batch * dp), micro_batch, get("seq-length", 4096), _zero(values),
        schedule=schedule,
        capacity=max(0.0, get("moe-expert-capacity-factor", 0.0)),
        etp=get("expert-tensor-parallel-size", tp) if ep > 1 or "expert-tensor-parallel-size" in values else 0,
        cut="even",
        stages=stages,
    )  # fmt: skip
    job = Job(shape, layout, devices, unknown=unknown, options=tuple(sorted(options)))
    job = _recomputing(job, values)
    group = get("microbatch-group-size-per-virtual-pipeline-stage", 0)
    return replace(
        job,
        group=0 if group == pp else group,
        offload=tuple(get("offload-modules", ())) if get("fine-grained-activation-offloading") else (),
        offload_share=get("activation-offload-fraction", 1.0),
        fp8=get("fp8-recipe", "delayed") if get("fp8-format") else "",
        grads="bf16" if get("grad-reduce-in-bf16") else "fp32",
        context="+".join(get("cp-comm-type", ())) if cp > 1 else "",
        dispatcher="deepep" if get("moe-enable-deepep") else get("moe-token-dispatcher-type", ""),
    )


def _zero(values: Mapping[str, Any]) -> int:
    if values.get("use-megatron-fsdp") or values.get("use-custom-fsdp"):
        return {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(
            values.get("data-parallel-sharding-strategy", ""), 0
        )
    return int(bool(values.get("use-distributed-optimizer")))


def _recomputing(job: Job, values: Mapping[str, Any]) -> Job:
    granularity, method = values.get("recompute-granularity"), values.get("recompute-method")
    if values.get("recompute-activations"):
        granularity = granularity or "selective"
    count = values.get("recompute-num-layers", 1)
    if granularity == "full":
        job = replace(job, layout=replace(job.layout, recompute="full"))
        return replace(job, recompute_layers=count) if method == "block" else replace(job, recompute_span=count)
    if granularity == "selective":
        parts = {module: part for part, module in _PARTS.items()}
        modules = values.get("recompute-modules", ["core_attn"])
        if wrong := [module for module in modules if module not in parts]:
            raise UsageError(f"megatron: --recompute-modules has {wrong[0]!r:.60}; it knows {', '.join(parts)}")
        order = [part for part in _PARTS if _PARTS[part] in modules]
        return replace(job, layout=replace(job.layout, recompute="+".join(order)))
    return job


def _stages(values: Mapping[str, Any], shape: DecoderShape | None, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage, embedding and output layer among them, and the chunks of a rank."""
    layers = values.get("num-layers", 0)
    if text := values.get("pipeline-model-parallel-layout"):
        count = _expanded(text).count("|") + 1
        if count % pp:
            raise UsageError(f"megatron: the layout {text!r:.200} has {count} stages, no multiple of {pp} ranks")
        depths = values.get("mtp-num-layers", 0)
        counts = parse_stages(_expanded(text), layers, count, depths)
        return tuple(counts), count // pp
    v = values.get("num-virtual-stages-per-pipeline-rank", 1)
    first, last = (values.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if per_stage := values.get("num-layers-per-virtual-pipeline-stage"):
        v = max(1, layers // (pp * per_stage))
    blocks = _of_ranks(layers, pp, first, last, values)
    if any(each % v for each in blocks):
        raise UsageError(f"megatron: {v} chunks do not divide the {blocks[0]} layers of a rank")
    if first is None and last is None and not values.get("account-for-embedding-in-pipeline-split"):
        even = not values.get("account-for-loss-in-pipeline-split")
        if even:
            return (), v
    stages = [blocks[rank] // v for _ in range(v) for rank in range(pp)]
    return (stages[0] + 1, *stages[1:-1], stages[-1] + 1) if len(stages) > 1 else (stages[0] + 2,), v


def _of_ranks(layers: int, pp: int, first: int | None, last: int | None, values: Mapping[str, Any]) -> list[int]:
    """Return rank -> its blocks."""
    counted = layers + sum(bool(values.get(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss"))
    ends = [each for each in (first, last) if each is not None]
    between = pp - len(ends)
    rest = counted - sum(ends)
    if between and rest % between:
        raise UsageError(f"megatron: the {rest} layers between do not divide by {between} ranks")
    share = rest // between if between else 0
    blocks = [share] * pp
    if first is not None:
        blocks[0] = first
    if last is not None:
        blocks[-1] = last
    blocks[0] -= bool(values.get("account-for-embedding-in-pipeline-split"))
    blocks[-1] -= bool(values.get("account-for-loss-in-pipeline-split"))
    return blocks


def _expanded(text: str) -> str:
    """Return a layout with its repetitions written out: `x*n` for a letter or a group; commas mean nothing."""
    text = text.replace(",", "").replace(" ", "")
    for _ in range(20):
        shorter = re.sub(r"\(([^()]*)\)(?:\*(\d{1,4}))?", lambda found: found[1] * int(found[2] or 1), text)
        if shorter == text:
            break
        text = shorter
    return re.sub(r"([EtmL|])\*(\d{1,4})", lambda found: found[1] * int(found[2]), text)


def _layer_freq(text: str | None) -> int | tuple[int, ...]:
    """Return `--moe-layer-freq`: a number, or a list as `([0]*3+[1]*58)`."""
    if text is None or text.strip().isdigit():
        return int(text or 1)
    try:
        return tuple(_list(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        raise UsageError(
            f"megatron: --moe-layer-freq {text!r:.100} is neither a number nor a list such as ([0]*3+[1]*58)"
        ) from None


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [int(each.value == 1) for each in node.elts if isinstance(each, ast.Constant)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list(node.left) + _list(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        count = node.right.value
        return _list(node.left) * (min(count, MOST_LAYERS) if isinstance(count, int) else 1)
    raise ValueError


def _shape(values: Mapping[str, Any]) -> tuple[DecoderShape | None, list[str]]:
    """Return the model, and a sentence for each size that the flags do not give, or that we do not have."""
    get, unknown = values.get, list[str]()
    layers, hidden, heads = (int(get(key, 0)) for key in ("num-layers", "hidden-size", "num-attention-heads"))
    if not (layers and hidden and heads):
        return None, [
            "the flags do not describe the model: --num-layers, --hidden-size and --num-attention-heads are needed"
        ]
    vocabulary = get("padded-vocab-size") or get("vocab-size")
    assumed = ("vocab_size",) if vocabulary is None else ()
    if vocabulary is None:
        vocabulary = 128_256
        unknown.append("--vocab-size is not given (the tokenizer has it): 128,256 is assumed")
    gated, biases, latent = bool(get("swiglu")), not get("disable-bias-linear"), bool(get("multi-latent-attention"))
    if get("normalization", "LayerNorm") != "RMSNorm":
        unknown.append("LayerNorm is priced as RMSNorm, without its bias")
    width = get("ffn-hidden-size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    experts = get("num-experts", 0)
    shape = DecoderShape(
        layers, hidden, heads,
        get("num-query-groups", 1) if get("group-query-attention") else heads,
        width, vocabulary,
        head_dim=get("kv-channels"),
        attention_bias=biases,
        qkv_bias=bool(get("add-qkv-bias")) or biases,
        qk_norm=bool(get("qk-layernorm")) and not latent,
        tie_word_embeddings=not get("untie-embeddings-and-output-weights"),
        rope_theta=get("rotary-base", 10000.0),
        rms_norm_eps=get("norm-epsilon", 1e-5),
        num_experts=experts,
        num_experts_per_tok=get("moe-router-topk", 2),
        moe_layer_freq=_layer_freq(get("moe-layer-freq")) if experts else 1,
        norm_topk_prob=not get("moe-router-pre-softmax"),
        moe_intermediate_size=get("moe-ffn-hidden-size", 0) if experts else 0,
        router=get("moe-router-score-function", "softmax") if experts else "softmax",
        aux_loss_coef=get("moe-aux-loss-coeff", 0.0),
        z_loss_coef=get("moe-z-loss-coeff", 0.0),
        num_nextn_predict_layers=get("mtp-num-layers", 0),
        mtp_loss_coef=get("mtp-loss-scaling-factor", 0.1),
        gated=gated,
        mlp_bias=biases,
        n_positions=0 if get("position-embedding-type") in ("rope", "yarn", "none") else get("max-position-embeddings", 0),
        shared_expert_intermediate_size=get("moe-shared-expert-intermediate-size", 0),
        shared_expert_gate=bool(get("moe-shared-expert-gate")),
        q_lora_rank=get("q-lora-rank", 0) if latent else 0,
        kv_lora_rank=get("kv-lora-rank", 32) if latent else 0,
        qk_nope_head_dim=get("qk-head-dim", 128) if latent else 0,
        qk_rope_head_dim=get("qk-pos-emb-head-dim", 64) if latent else 0,
        v_head_dim=get("v-head-dim", 128) if latent else 0,
        n_group=get("moe-router-num-groups", 1),
        topk_group=get("moe-router-group-topk", 1),
        model_type="megatron",
        name="the model of the flags",
        assumed=assumed,
    )  # fmt: skip
    return shape, unknown


def write(job: Job) -> str:
    """Return the flags that start this run, one to a line. Raises UsageError for what Megatron-LM refuses (`refusals`)."""
    if reasons := refusals(job):
        raise UsageError(f"megatron: {'; '.join(reasons)}")
    layout = job.layout
    flags: dict[str, object] = {} if job.shape is None else _model_flags(job.shape)
    flags |= {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.sequences,
        "seq-length": layout.seq,
        "sequence-parallel": layout.tp > 1,
        "bf16": True,
    }
    if layout.etp and (layout.ep > 1 or (job.shape is not None and job.shape.num_experts)):
        flags["expert-tensor-parallel-size"] = layout.etp
    flags |= {
        1: {"use-distributed-optimizer": True},
        **{
            level: {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": name}
            for level, name in ((2, "optim_grads"), (3, "optim_grads_params"))
        },
    }.get(layout.zero, {})
    if layout.stages:
        ahead = 0 if job.shape is None else job.shape.num_nextn_predict_layers
        flags["pipeline-model-parallel-layout"] = f'"{layout_string(layout.stages, ahead)}"'
    elif layout.v > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = layout.v
    if job.group:
        flags["microbatch-group-size-per-virtual-pipeline-stage"] = job.group
    flags |= _recompute_flags(job)
    if job.offload:
        flags |= {"fine-grained-activation-offloading": True, "offload-modules": " ".join(job.offload)}
    if job.fp8:
        flags |= {"fp8-format": "hybrid", "fp8-recipe": job.fp8}
    flags["grad-reduce-in-bf16"] = job.grads == "bf16"
    if job.context:
        flags["cp-comm-type"] = job.context.replace("+", " ")
    flags |= {flag: name in job.options for name, flag in _SWITCHES.items()}
    flags["no-overlap-p2p-communication"] = layout.v > 1 and "overlap_p2p" not in job.options
    if job.dispatcher or "overlap_experts" in job.options:
        flags |= {"moe-token-dispatcher-type": {"deepep": "flex", "": "alltoall"}.get(job.dispatcher, job.dispatcher)}
        flags["moe-enable-deepep"] = job.dispatcher == "deepep"
    if layout.capacity:
        flags["moe-expert-capacity-factor"] = layout.capacity
    words = [
        f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in flags.items() if value is not False
    ]
    return " \\\n".join(words) + "\n"


def _model_flags(shape: DecoderShape) -> dict[str, object]:
    """Return the flags of a model."""
    flags: dict[str, object] = {
        "num-layers": shape.num_hidden_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.intermediate_size,
        "num-attention-heads": shape.num_attention_heads,
        "group-query-attention": shape.num_key_value_heads != shape.num_attention_heads,
        "num-query-groups": shape.num_key_value_heads != shape.num_attention_heads and shape.num_key_value_heads,
        "kv-channels": shape.head_dim or False,
        "vocab-size": shape.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "swiglu": shape.gated,
        "disable-bias-linear": not shape.attention_bias,
        "add-qkv-bias": shape.qkv_bias and not shape.attention_bias,
        "qk-layernorm": shape.qk_norm or bool(shape.kv_lora_rank),
        "untie-embeddings-and-output-weights": not shape.tie_word_embeddings,
        "normalization": "RMSNorm",
        "norm-epsilon": shape.rms_norm_eps,
        "position-embedding-type": "learned_absolute" if shape.n_positions else "rope",
        "max-position-embeddings": shape.n_positions or False,
        "rotary-base": not shape.n_positions and shape.rope_theta,
    }
    if shape.num_experts:
        freq = shape.moe_layer_freq
        flags |= {
            "num-experts": shape.num_experts,
            "moe-router-topk": shape.num_experts_per_tok,
            "moe-layer-freq": freq if isinstance(freq, int) else f"'{list(freq)}'".replace(" ", ""),
            "moe-ffn-hidden-size": shape.expert_width,
            "moe-shared-expert-intermediate-size": shape.shared_width or False,
            "moe-shared-expert-gate": bool(shape.shared_width) and shape.shared_expert_gate,
            "moe-router-pre-softmax": not shape.norm_topk_prob,
            "moe-router-score-function": shape.router,
            "moe-aux-loss-coeff": shape.aux_loss_coef,
            "moe-z-loss-coeff": shape.z_loss_coef,
            "moe-router-num-groups": shape.n_group > 1 and shape.n_group,
            "moe-router-group-topk": shape.n_group > 1 and shape.topk_group,
            "moe-grouped-gemm": True,
        }
    if shape.kv_lora_rank:
        flags |= {
            "multi-latent-attention": True,
            "q-lora-rank": shape.q_lora_rank or False,
            "kv-lora-rank": shape.kv_lora_rank,
            "qk-head-dim": shape.qk_nope_head_dim,
            "qk-pos-emb-head-dim": shape.qk_rope_head_dim,
            "v-head-dim": shape.v_head_dim,
        }
    if shape.num_nextn_predict_layers:
        flags |= {"mtp-num-layers": shape.num_nextn_predict_layers, "mtp-loss-scaling-factor": shape.mtp_loss_coef}
    return flags


def _recompute_flags(job: Job) -> dict[str, object]:
    recompute = job.layout.recompute
    if recompute == "none":
        return {}
    if recompute == "full":
        method = "block" if job.recompute_layers else "uniform"
        count = job.recompute_layers or job.recompute_span
        return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": count}
    modules = " ".join(_PARTS[part] for part in recompute.split("+"))
    return {"recompute-granularity": "selective", "recompute-modules": modules}


def losses(job: Job) -> list[str]:
    """Return a sentence for each part of the run that Megatron-LM's words cannot hold."""
    layout, lost = job.layout, []
    if layout.slices > 1:
        lost.append(f"slices={layout.slices}: Megatron-LM does not cut sequences into slices of a schedule")
    if layout.vocabulary != "last":
        lost.append("vocabulary=pp: Megatron-LM has the output layer on the last stage")
    if job.shape is not None and job.shape.dropout:
        lost.append("dropout of the residual stream is written as neither of its two rates")
    return lost


_ATTENTION = {"p2p", "all_gather", "a2a", "a2a+p2p"}


def refusals(job: Job) -> list[str]:
    """Return a sentence for each thing that Megatron-LM refuses, with the file that does."""
    layout, shape, reasons = job.layout, job.shape, []
    if layout.schedule not in ("1f1b", "interleaved", "interleaved-overlap"):
        reasons.append(f"it has no schedule {layout.schedule!r} (pipeline_parallel/schedules.py); nearest: interleaved")
    if layout.v > 1:
        if layout.pp == 1:
            reasons.append(f"v={layout.v} needs more than one pipeline rank (parallel_state.py); nearest: v=1")
        group = job.group or layout.pp
        if not layout.pp <= group <= max(layout.m, layout.pp):
            reasons.append(
                f"a group of {group} is outside [{layout.pp}, {layout.m}] (schedules.py); nearest: {layout.pp}"
            )
        elif 0 < layout.m % group < layout.pp:
            nearest = max(group, layout.m - layout.m % group)
            reasons.append(
                f"m={layout.m} leaves {layout.m % group} micro-batches over groups of {group}, fewer than the {layout.pp} ranks "
                f"(schedules.py); nearest: m={nearest}"
            )
    if shape is not None:
        if shape.num_attention_heads % layout.tp:
            reasons.append(
                f"tp={layout.tp} does not divide the {shape.num_attention_heads} heads (transformer_config.py)"
            )
        if layout.ep > 1 and not shape.num_experts:
            reasons.append(f"ep={layout.ep} needs experts (transformer_config.py); nearest: ep=1")
        elif layout.ep > 1 and shape.num_experts % layout.ep:
            reasons.append(f"ep={layout.ep} does not divide the {shape.num_experts} experts (transformer_config.py)")
        if not layout.stages and shape.num_hidden_layers % (layout.pp * layout.v):
            reasons.append(
                f"{layout.pp * layout.v} stages do not divide the {shape.num_hidden_layers} blocks evenly; give the layers of each"
            )
    experts = (layout.etp or layout.tp) * layout.ep * layout.pp
    if layout.world % experts:
        reasons.append(
            f"etp x ep x pp = {experts} does not divide the {layout.world} devices (parallel_state.py); nearest: etp=1"
        )
    if job.options and "overlap_experts" in job.options:
        if layout.recompute == "full":
            reasons.append("the overlap of experts' exchange does not recompute whole blocks (transformer_config.py)")
        if layout.pp > 1 and layout.v == 1:
            reasons.append(
                "the overlap of experts' exchange over pipeline ranks needs chunks (transformer_config.py); nearest: v=2"
            )
        if job.dispatcher == "allgather":
            reasons.append(
                "the overlap of experts' exchange needs the dispatcher alltoall or flex (transformer_config.py)"
            )
    elif "delay_wgrad" in job.options:
        reasons.append("delay_wgrad needs the overlap of experts' exchange (transformer_config.py)")
    if "attn_proj" in job.offload and "core_attn" not in job.offload:
        reasons.append("offloading attn_proj needs core_attn too (transformer_config.py)")
    return reasons
