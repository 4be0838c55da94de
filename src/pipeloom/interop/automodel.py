"""NeMo Automodel: its YAML as a `Job`, a `Job` as its YAML, and what it refuses.

Names and defaults are those of nemo-automodel 0.7.0's recipes and distributed components.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.interop.torch_runtime import (
    job_of,
    known_model,
    names_of_stages,
    not_known,
    schedule_words,
    without_predictions,
)
from pipeloom.plan.job import Job
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import presets

_STRATEGIES = ("fsdp2", "megatron_fsdp", "ddp")
# Table -> the keys that are used, and behind | those that change nothing here.
_KNOWN = {
    "": """
        distributed step_scheduler model packed_sequence dataset slurm autopipeline parallelizer | recipe seed dist_env rng
        checkpoint loss_fn dataloader autocast ci
        validation_dataset validation_dataloader optimizer lr_scheduler wandb mlflow comet logger tokenizer processor compile
        benchmark moe_metrics clip_grad_norm mfu prewarm
    """,
    "distributed": """
        strategy tp_size pp_size cp_size ep_size dp_size dp_replicate_size activation_checkpointing pipeline
        reshard_after_forward sequence_parallel | tp_plan patch_is_packed_sequence mp_policy autocast_dtype
        activation_checkpointing_scope
        defer_fsdp_grad_sync moe enable_async_tensor_parallel enable_compile enable_fsdp2_prefetch
        fsdp2_backward_prefetch_depth fsdp2_forward_prefetch_depth multimodal _target_ _recursive_ _convert_
    """,
    "distributed.pipeline": """
        pp_schedule pp_schedule_csv pp_microbatch_size pp_batch_size layers_per_stage round_virtual_stages_to_pp_multiple
        module_fqns_per_model_part | patch_inner_model patch_causal_lm_model patch_stage_backward_maybe_with_nosync dtype
        scale_grads_in_schedule loss_fn pp_seq_len pp_recv_buffer_pool pp_recv_buffer_pool_slack _target_
    """,
    "step_scheduler": """
        global_batch_size local_batch_size | ckpt_every_steps save_checkpoint_every_epoch validate_on_checkpoint val_every_steps
        log_remote_every_steps loss_average_window_steps gc_every_steps num_epochs max_steps preemption_signal _target_
    """,
}


def read(text: str, shape: DecoderShape | None = None) -> Job:
    """Return the run of a recipe, on as many devices as its sizes multiply to.

    Args:
        shape: of the model, where the text does not name one that is known.

    Raises UsageError for a text that is no YAML of a recipe, or for a bad value.
    """
    tables = _parsed(text)
    parallel = _table(tables, "distributed")
    pipeline = _table(parallel, "pipeline") or _table(tables, "autopipeline")
    older = _table(tables, "parallelizer")
    model, batch = _table(tables, "model"), _table(tables, "step_scheduler")
    unknown = [
        not_known(f"{name}.{key}".lstrip("."), str(key), known.replace("|", "").split())
        for (name, known), table in zip(_KNOWN.items(), (tables, parallel, pipeline, batch), strict=True)
        for key in table
        if key not in known.split()
    ]
    key = "pretrained_model_name_or_path"
    name = model.get(key) or _table(model, "config").get(key, "")
    shape = known_model(str(name)) or shape
    if name and shape is None:
        unknown.append(f"the sizes of {name!s:.80} are not known here: give --model")
    replicas, dp = _size(parallel, "dp_replicate_size", 1), _size(parallel, "dp_size", 0)
    local = _size(batch, "local_batch_size", _size(pipeline, "pp_batch_size", 1))
    checkpointing = str(parallel.get("activation_checkpointing", older.get("activation_checkpointing", False))).lower()
    reshard = parallel.get("reshard_after_forward", older.get("reshard_after_forward"))
    if checkpointing == "selective":
        unknown.append("selective activation checkpointing keeps the outputs of chosen operations: it is read as none")
    strategy = str(parallel.get("strategy", "fsdp2")).lower()
    if strategy not in _STRATEGIES:
        raise UsageError(f"automodel: there is no strategy {strategy!r:.60}{did_you_mean(strategy, _STRATEGIES)}")
    ddp = strategy == "ddp"
    data, slurm = _table(tables, "dataset"), _table(tables, "slurm")
    seq = _size(_table(tables, "packed_sequence"), "packed_sequence_size", 0)
    seq = seq or _size(data, "seq_length", _size(data, "seq_len", 0))
    unknown += ["the tokens of a sequence are not in the text: 4,096 are assumed"] * (not seq)
    words = {
        **{f"{axis}p": _size(parallel, f"{axis}p_size", 1) for axis in "tcpe"},
        "etp": 1, "first": 0, "last": 0,
        "devices": _size(slurm, "nodes", 0) * _size(slurm, "ntasks_per_node", 0),
        "replicas": max(1, dp) if ddp else replicas,
        "shards": 1 if ddp else max(1, dp // replicas) if dp else 0,
        "seq": seq or 4096,
        "local": local,
        "total": _size(batch, "global_batch_size", 0),
        "micro": _size(pipeline, "pp_microbatch_size", 1),
        "name": pipeline.get("pp_schedule") or "1f1b",
        "csv": str(pipeline.get("pp_schedule_csv") or ""),
        "parts": pipeline.get("module_fqns_per_model_part"),
        "per_stage": _size(pipeline, "layers_per_stage", 0),
        "rounds": str(pipeline.get("round_virtual_stages_to_pp_multiple") or ""),
        "reshard": {"true": "always", "false": "never"}.get(str(reshard).lower(), ""),
        "recompute": "full" if checkpointing in ("true", "full", "on", "yes", "enabled") else "none",
        "sequence": strategy == "fsdp2" and bool(parallel.get("sequence_parallel", older.get("sequence_parallel"))),
        "rate": _table(tables, "optimizer").get("lr"),
    }  # fmt: skip
    return job_of("automodel", words, shape, unknown)


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError('automodel: reading YAML needs PyYAML: pip install -e ".[hf]"') from None
    try:
        tables = yaml.safe_load(re.sub(r"\$\{(?:oc\.env:)?[\w.]+,\s*([^}]*)\}", r"\1", text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"automodel: this is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tables, Mapping) or not isinstance(tables.get("distributed"), Mapping):
        raise UsageError("automodel: there is no table `distributed`")
    return tables


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key)
    return table if isinstance(table, Mapping) else {}


def _size(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    if value in (None, "none", 0):
        return default
    if type(value) is not int or not 0 < value < 10**9:
        raise UsageError(f"automodel: {key} = {value!r:.60}: it must be a whole number of at least 1")
    return value


def write(job: Job) -> str:
    """Return the sections of a recipe that lay out this run."""
    job = without_predictions(job)
    layout = job.layout
    parallel: dict[str, Any] = {
        "strategy": "fsdp2" if layout.zero or layout.world > layout.dp else "ddp",
        **{f"{axis}_size": getattr(layout, axis) for axis in ("dp", "tp", "cp", "pp", "ep")},
        "activation_checkpointing": layout.recompute == "full",
    }
    if parallel["strategy"] == "fsdp2":
        parallel |= {"sequence_parallel": job.sequence and layout.tp > 1, "reshard_after_forward": layout.zero == 3}
    if layout.pp > 1:
        word, table = schedule_words(job)
        pipeline: dict[str, Any] = {"pp_schedule": word, "pp_microbatch_size": layout.micro_batch}
        pipeline |= {"pp_schedule_csv": table} if table else {}
        if layout.stages:
            parts = names_of_stages(layout.stages, "model.embed_tokens", ("model.norm", "lm_head"), "model.layers.")
            pipeline["module_fqns_per_model_part"] = [[*part, "model.rotary_emb"] for part in parts]
        parallel["pipeline"] = pipeline
    local = layout.micro_batch * (layout.m if layout.pp > 1 else 1)
    tables: dict[str, dict[str, Any]] = {
        "step_scheduler": {"global_batch_size": layout.sequences, "local_batch_size": local},
        "packed_sequence": {"packed_sequence_size": layout.seq},
        "distributed": parallel,
    }
    source = next((each["source"] for key, each in presets().items() if known_model(key) == job.shape), "")
    if "huggingface.co/" in source:
        tables["model"] = {"pretrained_model_name_or_path": source.partition("huggingface.co/")[2]}
    return "\n".join(_yaml(tables)) + "\n"


def _yaml(values: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_yaml(value, f"{indent}  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{key}:", *(f"{indent}- [{', '.join(part)}]" for part in value)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines
