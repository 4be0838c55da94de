"""NeMo Automodel: its YAML as a `Job`, a `Job` as its YAML, and what it refuses.

Names and defaults are those of nemo-automodel 0.7.0's `recipes/_dist_utils.py` and `components/distributed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.interop.stages import names_of_stages, stages_of_names
from pipeloom.interop.torchtitan import SCHEDULES as _TORCH
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout

# torch's name, in any spelling without signs -> ours
_SCHEDULES = {name.lower(): ours for ours, name in _TORCH.items()}
_SINGLE = ("1f1b", "gpipe")
_USED = """
    strategy tp_size pp_size cp_size ep_size dp_size dp_replicate_size activation_checkpointing pipeline moe
    sequence_parallel reshard_after_forward
"""
_HARMLESS = """
    tp_plan patch_is_packed_sequence mp_policy autocast_dtype activation_checkpointing_scope defer_fsdp_grad_sync
    enable_async_tensor_parallel enable_compile _target_ _recursive_ _convert_
"""
_PIPELINE = """
    pp_schedule pp_schedule_csv pp_microbatch_size pp_batch_size layers_per_stage round_virtual_stages_to_pp_multiple
    module_fqns_per_model_part
"""
_PIPELINE_HARMLESS = """
    patch_inner_model patch_causal_lm_model patch_stage_backward_maybe_with_nosync dtype scale_grads_in_schedule loss_fn
    pp_seq_len pp_recv_buffer_pool pp_recv_buffer_pool_slack
"""


def read(text: str, blocks: int | None = None, devices: int | None = None) -> Job:
    """Return the run of a recipe.

    Args:
        blocks: of the model, where the text leaves the division of layers to Automodel.
        devices: of the run, which the text does not say.

    Raises UsageError for a text that is no YAML of a recipe, or for a bad value.
    """
    tables = _parsed(text)
    parallel = tables.get("distributed")
    if not isinstance(parallel, Mapping):
        raise UsageError("automodel: there is no table distributed")
    unknown = _unknown("distributed", parallel, _USED, _HARMLESS)
    pipeline = parallel.get("pipeline") or {}
    unknown += _unknown("distributed.pipeline", pipeline, _PIPELINE, _PIPELINE_HARMLESS)
    tp, pp, cp, ep = (_size(parallel, f"{axis}_size", 1) for axis in ("tp", "pp", "cp", "ep"))
    dp = _size(parallel, "dp_size", 0)
    if not dp:
        if devices is None:
            unknown.append("the number of devices is not in the text: one replica is assumed")
        dp = max(1, (devices or 0) // (tp * pp * cp))
    schedule, table = _schedule(pipeline, pp)
    stages, v, more = _stages(pipeline, schedule, pp, blocks)
    batch = tables.get("step_scheduler") or {}
    local = _size(batch, "local_batch_size", _size(pipeline, "pp_batch_size", 1))
    micro_batch = _size(pipeline, "pp_microbatch_size", 1) if pp > 1 else local
    total = _size(batch, "global_batch_size", local * dp)
    if local % micro_batch:
        nearest = max(1, local // micro_batch) * micro_batch
        raise UsageError(
            f"automodel: local_batch_size {local} is no multiple of the micro-batch {micro_batch}; nearest: {nearest}"
        )
    strategy = str(parallel.get("strategy", "fsdp2")).lower()
    checkpointing = str(parallel.get("activation_checkpointing", False)).lower()
    layout = PlannedLayout(
        dp,
        tp,
        cp,
        pp,
        ep,
        v,
        local // micro_batch if pp > 1 else max(1, total // (micro_batch * dp)),
        micro_batch,
        _size(tables.get("packed_sequence") or {}, "packed_sequence_size", 4096) or 4096,
        zero=0 if strategy == "ddp" or dp == 1 else 2 if parallel.get("reshard_after_forward") is False else 3,
        recompute="full" if checkpointing in ("true", "full", "on", "yes", "enabled") else "none",
        schedule=table or schedule,
        cut="even",
        stages=stages,
    )
    if checkpointing == "selective":
        unknown.append("selective activation checkpointing keeps the outputs of chosen operations: priced as none")
    return Job(None, layout, layout.world, unknown=(*unknown, *more))


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError('automodel: reading YAML needs PyYAML: pip install -e ".[hf]"') from None
    try:
        tables = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"automodel: no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tables, Mapping):
        raise UsageError("automodel: the text is no table of sections")
    return tables


def _unknown(section: str, values: Mapping[str, Any], used: str, harmless: str) -> list[str]:
    if not isinstance(values, Mapping):
        raise UsageError(f"automodel: {section} is no table")
    known = [*used.split(), *harmless.split()]
    return [f"{section}.{key} is not known{did_you_mean(str(key), known)}" for key in values if key not in known]


def _size(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    if value is None or value == "none":
        return default
    if type(value) is not int or value < 0:
        raise UsageError(f"automodel: {key} = {value!r:.60}: it must be a whole number")
    return value


def _schedule(pipeline: Mapping[str, Any], pp: int) -> tuple[str, str]:
    """Return the family, and the file of a table ("" for none)."""
    name = str(pipeline.get("pp_schedule") or "1f1b")
    family = _SCHEDULES.get(name.lower().replace("_", "").replace("-", ""))
    if pp == 1:
        return "1f1b", ""
    if family is None:
        raise UsageError(f"automodel: pp_schedule {name!r:.60} is not known; torch knows {', '.join(_TORCH.values())}")
    return family, str(pipeline.get("pp_schedule_csv") or "")


def _stages(
    pipeline: Mapping[str, Any], schedule: str, pp: int, blocks: int | None
) -> tuple[tuple[int, ...], int, list[str]]:
    """Return the layers of each stage, the chunks of a rank, and what is missing to tell."""
    if pp == 1:
        return (), 1, []
    if parts := pipeline.get("module_fqns_per_model_part"):
        if len(parts) % pp:
            raise UsageError(f"automodel: {len(parts)} model parts are no multiple of {pp} ranks")
        return stages_of_names(parts, "automodel: module_fqns_per_model_part"), len(parts) // pp, []
    chunks = 1 if schedule in _SINGLE else 2
    if blocks is None:
        return (), chunks, ["the number of blocks is not in the text: layers are divided evenly"]
    count = pp * chunks
    if per_stage := _size(pipeline, "layers_per_stage", 0):
        count = _rounded(math.ceil(blocks / per_stage), pp, pipeline.get("round_virtual_stages_to_pp_multiple"))
    share, more = divmod(blocks, count)
    sizes = [share + (at < more) + (at == 0) + (at == count - 1) for at in range(count)]
    return tuple(sizes), count // pp, []


def _rounded(count: int, pp: int, way: Any) -> int:
    rest = count % pp
    if not rest:
        return count
    if way not in ("up", "down"):
        raise UsageError(f"automodel: {count} stages are no multiple of {pp} ranks (calculate_virtual_stages)")
    return count + pp - rest if way == "up" else count - rest


def write(job: Job) -> str:
    """Return the sections of a recipe that lay out this run.

    Raises UsageError for what Automodel refuses (`refusals`).
    """
    if reasons := refusals(job):
        raise UsageError(f"automodel: {'; '.join(reasons)}")
    layout = job.layout
    lines = [
        "step_scheduler:",
        f"  global_batch_size: {layout.sequences}",
        f"  local_batch_size: {layout.micro_batch * (layout.m if layout.pp > 1 else 1)}",
        "packed_sequence:",
        f"  packed_sequence_size: {layout.seq}",
        "distributed:",
        f"  strategy: {'fsdp2' if layout.zero >= 2 or layout.pp * layout.tp * layout.cp * layout.ep > 1 else 'ddp'}",
        f"  dp_size: {layout.dp}",
        f"  tp_size: {layout.tp}",
        f"  cp_size: {layout.cp}",
        f"  pp_size: {layout.pp}",
        f"  ep_size: {layout.ep}",
        f"  sequence_parallel: {str(layout.tp > 1).lower()}",
        f"  activation_checkpointing: {str(layout.recompute == 'full').lower()}",
        f"  reshard_after_forward: {str(layout.zero == 3).lower()}",
    ]
    if layout.pp > 1:
        word = _TORCH.get(layout.schedule) or ("Interleaved1F1B" if layout.v > 1 else "1F1B")
        lines += ["  pipeline:", f"    pp_schedule: {word}", f"    pp_microbatch_size: {layout.micro_batch}"]
        if layout.schedule not in _TORCH:
            lines.append(f"    pp_schedule_csv: {layout.schedule}")
        if layout.stages:
            lines.append("    module_fqns_per_model_part:")
            lines += [f"    - [{', '.join(part)}]" for part in _names(layout.stages)]
    return "\n".join(lines) + "\n"


def _names(stages: Sequence[int]) -> list[list[str]]:
    """Return the modules of each stage; every one has the table of positions."""
    parts = names_of_stages(stages, "model.embed_tokens", ("model.norm", "lm_head"), "model.layers.")
    return [[*part, "model.rotary_emb"] for part in parts]


def losses(job: Job) -> list[str]:
    """Return a sentence for each part of the run that Automodel's words cannot hold."""
    layout, lost = job.layout, []
    if layout.zero == 1:
        lost.append("zero=1: Automodel shards parameters too: written as zero=2")
    if layout.slices > 1:
        lost.append(f"slices={layout.slices}: Automodel does not cut sequences into slices of a schedule")
    if layout.vocabulary != "last":
        lost.append("vocabulary=pp: Automodel has the output layer on the last stage")
    if layout.recompute not in ("none", "full"):
        lost.append(f"recompute={layout.recompute}: Automodel recomputes whole blocks or chosen operations")
    elif job.recompute_layers or job.recompute_span > 1:
        lost.append("recompute_layers, recompute_span: Automodel recomputes every block by itself")
    if job.offload:
        lost.append("offload: Automodel does not copy activations to the host")
    if job.grads != "fp32":
        lost.append(f"grads={job.grads}: Automodel reduces gradients as its mp_policy says")
    return lost


def refusals(job: Job) -> list[str]:
    """Return a sentence for each thing that Automodel refuses, with the file that does."""
    layout, reasons = job.layout, []
    word = _TORCH.get(layout.schedule, "")
    if layout.pp > 1 and not word and not layout.schedule.endswith(".csv"):
        reasons.append(f"it has no schedule {layout.schedule!r:.60} (torch's get_schedule_class); nearest: interleaved")
    if layout.pp > 1 and layout.schedule in _SINGLE and layout.v != 1:
        reasons.append(f"{word} has one stage a rank, not {layout.v} (functional.py); nearest: v=1")
    if layout.pp > 1 and word and layout.schedule not in _SINGLE and layout.v < 2:
        reasons.append(f"{word} needs two stages a rank (functional.py); nearest: v=2")
    if layout.pp > 1 and layout.m < layout.pp:
        reasons.append(f"m={layout.m} is less than the {layout.pp} ranks (train_ft.py); nearest: m={layout.pp}")
    if layout.ep > 1 and (layout.dp * layout.cp) % layout.ep:
        reasons.append(f"ep={layout.ep} does not divide dp x cp (mesh_utils.py)")
    return reasons
