"""torchtitan: its command line and its older TOML as a `Job`, a `Job` as its command line, and what it refuses.

Names and defaults are those of torchtitan 0.3.0's configuration classes; before February 2026 it read the same keys from TOML.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeloom.errors import UsageError
from pipeloom.interop.launchers import Command, flags_of
from pipeloom.interop.shell import best_command
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

_SUBCOMMAND = "activation-checkpoint:"
_MODELS = {
    "llama3-8b": ("llama3", "llama3_8b"), "llama3-70b": ("llama3", "llama3_70b"), "llama3-405b": ("llama3", "llama3_405b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"), "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}  # fmt: skip
# Our word, the key that it has in any section, and its default.
_WORDS = """
    seq seq_len 2048 local local_batch_size 8 total global_batch_size -1 tp tensor_parallel_degree 1 cp context_parallel_degree 1
    pp pipeline_parallel_degree 1 ep expert_parallel_degree 1 etp expert_tensor_parallel_degree 1
    replicas data_parallel_replicate_degree 1 shards data_parallel_shard_degree -1 reshard fsdp_reshard_after_forward default
    micro pipeline_parallel_microbatch_size 1 name pipeline_parallel_schedule 1F1B csv pipeline_parallel_schedule_csv -
    parts module_fqns_per_model_part - per_stage pipeline_parallel_layers_per_stage 0
    first pipeline_parallel_first_stage_less_layers 1 last pipeline_parallel_last_stage_less_layers 1
    mode mode none host enable_cpu_offload False sequence enable_sequence_parallel True rate lr - batch batch_size 0
    model name - flavor flavor -
"""
_SECTIONS = ("training", "parallelism", "activation_checkpoint", "model", "experimental")
_HARMLESS_SECTIONS = """
    job profiler profiling metrics float8 mx quantize tokenizer dataloader optimizer lr_scheduler checkpoint compile comm
    validator validation debug override loss memory_estimation fault_tolerance
"""
_HARMLESS = """
    hf_assets_path dump_folder
    max_norm steps gc_freq gc_debug disable_cuda_graphs enable_fsdp_symm_mem spmd_backend context_parallel_load_balancer
    context_parallel_ptrr_mask_key context_parallel_rotate_method disable_loss_parallel preserve_rng_state
    determinism_check debug early_stop deterministic seed dataset dataset_path compile selective_ac_option
    per_op_sac_force_recompute_mm_shapes_by_fqns tokenizer_path hf_assets_path converters print_after_conversion
    disable_color_printing enable_async_tensor_parallel norm_type
"""


def read(text: str, shape: DecoderShape | None = None) -> Job:
    """Return the run of a command line, of a script with it, or of a TOML of before February 2026.

    Args:
        shape: of the model, where the text does not name one that is known.

    Raises UsageError for a text that is neither, or for a bad value.
    """
    flat = iter(_WORDS.split())
    keys = {key: (word, _value(default, "")) for word, key, default in zip(flat, flat, flat, strict=True)}
    words: dict[str, Any] = {word: "" if default == "-" else default for word, default in keys.values()}
    words |= {"devices": 0, "rounds": "", "module": "", "config": ""}
    unknown = list[str]()
    if any(line.strip() in ("[training]", "[parallelism]", "[model]") for line in text.splitlines()):
        unknown.append("this is a TOML of before February 2026: torchtitan reads --module, --config and flags now")
        pairs = _of_toml(text)
    else:
        command = best_command(text, "torchtitan", _known)
        unknown += [*command.unresolved, *(f"--{flag} is not known" for flag in command.strange)]
        pairs = list(_of_command(command))
    for key, value in pairs:
        _take(key, value, words, keys, unknown)
    shape = known_model(f"{words['model']}-{words['flavor']}", words["config"]) or shape
    if shape is None:
        name = words["config"] or words["flavor"] or "which the text does not name"
        unknown.append(f"the sizes of the model, {name}, are in torchtitan's code: give the model")
    words |= {"recompute": "full" if words["mode"] == "full" else "none", "shards": max(0, words["shards"])}
    words["local"] = words["batch"] or words["local"]
    if words["mode"] not in ("full", "none"):
        unknown.append(
            f"activation checkpointing {words['mode']!r:.40} keeps the outputs of chosen operations: read as none"
        )
    unknown += ["parameters on the host (enable_cpu_offload) are not read"] * bool(words["host"])
    return job_of("torchtitan", words, shape, unknown)


def _known(word: str) -> bool:
    section = word.removeprefix("--").partition(".")[0]
    flag = word.startswith("--") and section in (*_SECTIONS, *_HARMLESS_SECTIONS.split(), "module", "config")
    return flag or word.endswith("run_train.sh")


def _of_toml(text: str) -> list[tuple[str, Any]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"torchtitan: this is no TOML: {error}") from None
    sections = [name for name, table in tables.items() if isinstance(table, dict)]
    return [(f"{section}.{key}", value) for section in sections for key, value in tables[section].items()]


def _of_command(command: Command) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a command line; the number of processes is the key `devices`, variables are those of run_train.sh."""
    words = command.words[command.program :]
    devices = command.processes
    if any(word.endswith("run_train.sh") for word in command.words):
        devices = int(count) if (count := str(command.values.get("NGPU", 8))).isdigit() else 0
        for variable, key in (("MODULE", "module"), ("CONFIG", "config"), ("CONFIG_FILE", "job.config_file")):
            if value := command.values.get(variable):
                yield key, value
    yield "devices", devices
    modes = [word.partition(":")[2] for word in words if word.startswith(_SUBCOMMAND)]
    yield from (("activation_checkpoint.mode", mode) for mode in modes)
    for flag, given in flags_of(words, (_SUBCOMMAND,)):
        key = flag.replace("-", "_")
        if any("$" in word for word in given[:1]):
            continue
        if key.endswith("module_fqns_per_model_part"):
            yield key, [part.split(",") for part in given]
        else:
            yield key, _value(given[0] if given else "True", key)


def _value(text: str, key: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


def _take(key: str, value: Any, words: dict[str, Any], keys: Mapping[str, tuple[str, Any]], unknown: list[str]) -> None:
    """Take over a key's value; an unknown one of a section that matters is named."""
    section, _, name = key.rpartition(".")
    if key in ("devices", "module", "config", "optimizer.lr"):
        words[keys.get(name, (key, None))[0]] = value
        return
    if key == "job.config_file":
        unknown.append(f"what the file {value} says is not read: give the file itself as the job")
    if key.endswith("converters") and value:
        unknown.append(f"{key} = {value!s:.80}: converted layers are not priced")
    if name in _HARMLESS.split() or section.partition(".")[0] in _HARMLESS_SECTIONS.split():
        return
    if isinstance(keys.get(name.removeprefix("no_"), ("", None))[1], bool) and name.startswith("no_"):
        name, value = name.removeprefix("no_"), False
    word, default = keys.get(name, ("", None))
    if section not in _SECTIONS:
        unknown.append(not_known(key, section or name, _SECTIONS if section else keys))
    elif not word:
        unknown.append(not_known(key, name, keys))
    elif type(default) is int and (type(value) is not int or value < min(default, 1)):
        raise UsageError(f"torchtitan: {key} = {value!r:.60}: it must be a whole number of at least {min(default, 1)}")
    else:
        words[word] = value if value is not None else ""


def write(job: Job) -> str:
    """Return the command that starts this run, one flag to a line."""
    job = without_predictions(job)
    layout = job.layout
    module, config = _MODELS.get(_name(job), ("MODULE", "CONFIG"))
    sharded = layout.zero > 0 and layout.dp * layout.cp > 1
    per_node = math.gcd(layout.world, 8)
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
    words |= {} if job.sequence else {"parallelism.no-enable-sequence-parallel": ""}
    if layout.pp > 1:
        words["parallelism.pipeline-parallel-microbatch-size"] = layout.micro_batch
        words["parallelism.pipeline-parallel-schedule"], table = schedule_words(job)
        if table:
            words["parallelism.pipeline-parallel-schedule-csv"] = table
        if layout.stages:
            parts = names_of_stages(layout.stages, "tok_embeddings", ("norm", "lm_head"), "layers.")
            words["parallelism.module-fqns-per-model-part"] = " ".join(",".join(part) for part in parts)
    mode = "full" if layout.recompute == "full" else "none"
    start = f"torchrun --nnodes {layout.world // per_node} --nproc_per_node {per_node} -m torchtitan.train"
    flags = (f"--{key} {value}".rstrip() for key, value in words.items())
    return " \\\n".join((f"{start}", *flags, f"activation-checkpoint:{mode}")) + "\n"


def _name(job: Job) -> str:
    return next((name for name in _MODELS if job.shape is not None and known_model(name) == job.shape), "")
