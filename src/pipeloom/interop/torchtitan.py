"""torchtitan: its command line and its older TOML as a `Job`, a `Job` as its command line, and what it refuses.

Names and defaults are those of torchtitan 0.3.0's `config/configs.py`; before February 2026 it read the same keys from TOML.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.interop.shell import commands_of
from pipeloom.interop.stages import names_of_stages, stages_of_names
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "looped-bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_SINGLE = ("1f1b", "gpipe")
_BACK_AND_FORTH = ("zbv", "dualpipev")
# Keys that say what a run costs; those of sections that are not named here are harmless.
_DEFAULTS: dict[str, Any] = {
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "training.enable_cpu_offload": False,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_sequence_parallel": True,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.module_fqns_per_model_part": None,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "activation_checkpoint.mode": "none",
}
_SECTIONS = ("training", "parallelism", "activation_checkpoint")
_HARMLESS = """
    max_norm steps gc_freq gc_debug disable_cuda_graphs enable_fsdp_symm_mem spmd_backend context_parallel_load_balancer
    context_parallel_ptrr_mask_key context_parallel_rotate_method disable_loss_parallel preserve_rng_state
    determinism_check debug early_stop deterministic seed
"""


def read(text: str, blocks: int | None = None, devices: int | None = None) -> Job:
    """Return the run of a command line, of a script with it, or of a TOML of before February 2026.

    Args:
        blocks: of the model, where the text leaves the division of layers to torchtitan.
        devices: of the run; default: those that the text says.

    Raises UsageError for a text that is neither, or for a bad value.
    """
    is_toml = any(line.strip() in [f"[{section}]" for section in _SECTIONS] for line in text.splitlines())
    values, unknown = _from_toml(text) if is_toml else _from_words(text)
    return _job({**_DEFAULTS, **values}, unknown, blocks, devices or values.get("devices"))


def _from_toml(text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"torchtitan: no TOML: {error}") from None
    values: dict[str, Any] = {}
    unknown = ["a TOML of before February 2026: torchtitan reads a module and flags now"]
    for section in _SECTIONS:
        for key, value in tables.get(section, {}).items():
            _take(f"{section}.{key}", value, values, unknown)
    return values, unknown


def _from_words(text: str) -> tuple[dict[str, Any], list[str]]:
    commands = commands_of(text)
    if not commands:
        raise UsageError("torchtitan: there is no command in this text; give the line that starts torchtitan.train")
    command = max(commands, key=lambda each: sum(word.startswith("--") for word in each.words))
    values: dict[str, Any] = {}
    unknown, words, devices = list(command.unresolved), list(command.words), 1
    while words:
        word = words.pop(0)
        if word.startswith("activation-checkpoint:"):
            _take("activation_checkpoint.mode", word.partition(":")[2].replace("-", "_"), values, unknown)
        if not word.startswith("--"):
            continue
        flag, equals, value = word.removeprefix("--").partition("=")
        given = [value] if equals else []
        while not equals and words and not words[0].startswith(("--", "activation-checkpoint:")):
            given.append(words.pop(0))
        key = flag.replace("-", "_")
        if key in ("nproc_per_node", "nnodes") and given and given[0].isdigit():
            devices *= int(given[0])
            values["devices"] = devices
        elif key.partition(".")[0] in _SECTIONS:
            _take(key, _value(key, given), values, unknown)
    return values, unknown


def _value(key: str, given: Sequence[str]) -> Any:
    if key == "parallelism.module_fqns_per_model_part":
        return [part.split(",") for part in given]
    if not given:
        return True
    text = given[0]
    if isinstance(_DEFAULTS.get(key), bool):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _take(key: str, value: Any, values: dict[str, Any], unknown: list[str]) -> None:
    """Take over a key's value; an unknown one is named."""
    section, _, name = key.partition(".")
    positive = f"{section}.{name.removeprefix('no_')}"
    if key not in _DEFAULTS and isinstance(_DEFAULTS.get(positive), bool):
        key, value = positive, False
    default = _DEFAULTS.get(key)
    if key not in _DEFAULTS:
        if name not in _HARMLESS.split():
            near = did_you_mean(name, [each.partition(".")[2] for each in _DEFAULTS])
            unknown.append(f"{key} is not known{near}")
    elif type(default) is int and type(value) is not int:
        raise UsageError(f"torchtitan: {key} = {value!r:.60}: it must be a whole number")
    else:
        values[key] = value


def _job(values: Mapping[str, Any], unknown: Sequence[str], blocks: int | None, devices: int | None) -> Job:
    def of(key: str) -> Any:
        return values[f"parallelism.{key}"]

    tp, cp, pp = (of(f"{axis}_parallel_degree") for axis in ("tensor", "context", "pipeline"))
    replicas, shards = of("data_parallel_replicate_degree"), of("data_parallel_shard_degree")
    notes = list(unknown)
    if shards == -1:
        if devices is None:
            notes.append("the number of devices is not in the text: one shard is assumed")
        shards = max(1, (devices or 0) // (replicas * tp * cp * pp))
    dp, table = replicas * shards, of("pipeline_parallel_schedule_csv")
    name = of("pipeline_parallel_schedule")
    schedule = {word: ours for ours, word in SCHEDULES.items()}.get(name)
    if schedule is None:
        raise UsageError(
            f"torchtitan: pipeline_parallel_schedule {name!r:.60} is not known; it knows {', '.join(SCHEDULES.values())}"
        )
    stages, v, more = _stages(values, schedule, pp, blocks)
    local = values["training.local_batch_size"]
    micro_batch = of("pipeline_parallel_microbatch_size") if pp > 1 else local
    if local % micro_batch:
        nearest = max(1, local // micro_batch) * micro_batch
        raise UsageError(
            f"torchtitan: local_batch_size {local} is no multiple of the micro-batch {micro_batch}; nearest: {nearest}"
        )
    total = values["training.global_batch_size"]
    m = total // (micro_batch * dp) if total > 0 and pp == 1 else local // micro_batch
    reshard = of("fsdp_reshard_after_forward")
    mode, ep = values["activation_checkpoint.mode"], of("expert_parallel_degree")
    layout = PlannedLayout(
        dp,
        tp,
        cp,
        pp,
        ep,
        v,
        max(1, m),
        micro_batch,
        values["training.seq_len"],
        zero=0 if shards == 1 else 2 if reshard == "never" or (reshard == "default" and pp > 1) else 3,
        recompute="full" if mode == "full" else "none",
        schedule=table or (schedule if pp > 1 else "1f1b"),
        etp=of("expert_tensor_parallel_degree") if ep > 1 else 0,
        cut="even",
        stages=stages,
    )
    if mode not in ("none", "full"):
        notes.append(f"activation checkpointing {mode!r} keeps the outputs of chosen operations: priced as none")
    if replicas > 1 and shards > 1:
        notes.append(f"{replicas} replicas of {shards} shards are priced as {dp} shards")
    if values["training.enable_cpu_offload"]:
        notes.append("the offload of parameters to the host is not priced")
    return Job(None, layout, dp * tp * cp * pp, unknown=(*notes, *more))


def _stages(
    values: Mapping[str, Any], schedule: str, pp: int, blocks: int | None
) -> tuple[tuple[int, ...], int, list[str]]:
    """Return the layers of each stage, the chunks of a rank, and what is missing to tell."""
    if pp == 1:
        return (), 1, []
    if parts := values["parallelism.module_fqns_per_model_part"]:
        if len(parts) % pp:
            raise UsageError(f"torchtitan: {len(parts)} model parts are no multiple of {pp} ranks")
        return stages_of_names(parts, "torchtitan: module_fqns_per_model_part"), len(parts) // pp, []
    chunks = 1 if schedule in _SINGLE else 2
    if blocks is None:
        return (), chunks, ["the number of blocks is not in the text: layers are divided evenly"]
    first, last = (values[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    count = pp * chunks
    if per_stage := values["parallelism.pipeline_parallel_layers_per_stage"]:
        count = math.ceil((blocks + first + last) / per_stage)
        if count % pp:
            raise UsageError(f"torchtitan: {count} stages of {per_stage} layers are no multiple of {pp} ranks")
    return tuple(_divided(blocks, count, first, last)), count // pp, []


def _divided(blocks: int, stages: int, first: int, last: int) -> list[int]:
    """Return the layers of each stage as torchtitan divides them; embedding and output layer weigh `first` and `last` blocks."""
    share, more = divmod(blocks + first + last, stages)
    if max(first, last) > share:
        raise UsageError(f"torchtitan: {stages} stages have fewer layers than the embedding or output layer counts")
    sizes = [share + (at < more) for at in range(stages)]
    sizes[0] += 1 - first
    sizes[-1] += 1 - last
    return sizes


def write(job: Job, module: str = "MODULE", config: str = "CONFIG") -> str:
    """Return the command line that starts this run, one flag to a line.

    Raises UsageError for what torchtitan refuses (`refusals`).
    """
    if reasons := refusals(job):
        raise UsageError(f"torchtitan: {'; '.join(reasons)}")
    layout = job.layout
    sharded = layout.zero >= 2
    words: dict[str, object] = {
        "module": module,
        "config": config,
        "training.seq-len": layout.seq,
        "training.local-batch-size": layout.micro_batch * (layout.m if layout.pp > 1 else 1),
        "training.global-batch-size": layout.sequences,
        "parallelism.data-parallel-replicate-degree": 1 if sharded else layout.dp,
        "parallelism.data-parallel-shard-degree": layout.dp if sharded else 1,
        "parallelism.fsdp-reshard-after-forward": "always" if layout.zero == 3 else "never",
        "parallelism.tensor-parallel-degree": layout.tp,
        "parallelism.context-parallel-degree": layout.cp,
        "parallelism.expert-parallel-degree": layout.ep,
        "parallelism.pipeline-parallel-degree": layout.pp,
    }
    if layout.pp > 1:
        words["parallelism.pipeline-parallel-microbatch-size"] = layout.micro_batch
        if layout.schedule in SCHEDULES:
            words["parallelism.pipeline-parallel-schedule"] = SCHEDULES[layout.schedule]
        else:  # a table: stages are placed as the schedule that is named beside it places them
            words["parallelism.pipeline-parallel-schedule"] = "Interleaved1F1B" if layout.v > 1 else "1F1B"
            words["parallelism.pipeline-parallel-schedule-csv"] = layout.schedule
        if layout.stages:
            parts = names_of_stages(layout.stages, "tok_embeddings", ("norm", "lm_head"))
            words["parallelism.module-fqns-per-model-part"] = " ".join(",".join(part) for part in parts)
    mode = "full" if layout.recompute == "full" else "none"
    lines = [*(f"--{key} {value}" for key, value in words.items()), f"activation-checkpoint:{mode}"]
    return " \\\n".join(lines) + "\n"


def losses(job: Job) -> list[str]:
    """Return a sentence for each part of the run that torchtitan's words cannot hold."""
    layout, lost = job.layout, []
    if layout.zero == 1:
        lost.append("zero=1: torchtitan shards parameters too, or nothing: written as replicas (zero=0)")
    if layout.slices > 1:
        lost.append(f"slices={layout.slices}: torchtitan does not cut sequences into slices of a schedule")
    if layout.vocabulary != "last":
        lost.append("vocabulary=pp: torchtitan has the output layer on the last stage")
    if layout.recompute not in ("none", "full"):
        lost.append(f"recompute={layout.recompute}: torchtitan recomputes whole blocks or chosen operations")
    elif job.recompute_layers or job.recompute_span > 1:
        lost.append("recompute_layers, recompute_span: torchtitan recomputes every block by itself")
    if layout.v > 2 and not layout.stages:
        lost.append(f"v={layout.v}: without the layers of each stage torchtitan has two chunks")
    if job.offload:
        lost.append("offload: torchtitan does not copy activations to the host")
    if job.fp8:
        lost.append(f"fp8={job.fp8}: torchtitan names it in the model's configuration")
    if job.grads != "fp32":
        lost.append(f"grads={job.grads}: torchtitan reduces gradients in fp32")
    return lost


def refusals(job: Job) -> list[str]:
    """Return a sentence for each thing that torchtitan refuses, with the file that does."""
    layout, reasons = job.layout, []
    word = SCHEDULES.get(layout.schedule, "")
    if layout.pp > 1 and not word and not layout.schedule.endswith(".csv"):
        reasons.append(f"it has no schedule {layout.schedule!r:.60} (torch's get_schedule_class); nearest: interleaved")
    if layout.pp > 1 and layout.schedule in _SINGLE and layout.v != 1:
        reasons.append(f"{word} has one stage a rank, not {layout.v} (pipeline_parallel.py); nearest: v=1")
    if layout.pp > 1 and word and layout.schedule not in _SINGLE and layout.v < 2:
        reasons.append(f"{word} needs two stages a rank (pipeline_parallel.py); nearest: v=2")
    if layout.schedule in _BACK_AND_FORTH and layout.v > 2:
        reasons.append(f"{word} has two stages a rank, not {layout.v} (torch's schedules.py); nearest: v=2")
    if layout.ep > 1 and (layout.dp * layout.cp * layout.tp) % layout.ep:
        reasons.append(f"ep={layout.ep} does not divide dp x cp x tp (parallel_dims.py)")
    if layout.zero >= 2 and layout.dp == 1:
        reasons.append(f"zero={layout.zero} needs replicas to shard over (parallel_dims.py); nearest: zero=0")
    return reasons
