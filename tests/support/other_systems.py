"""What other systems make of the words that are written for them, by their own code in `.interop/` (`make interop`)."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / ".interop"

# Flags of Megatron-LM's argument parser (megatron/training/arguments.py) that its TransformerConfig names otherwise: by the
# `argparse_meta` of the field, or by what `core_transformer_config_from_args` of that file does.
_FIELDS = {
    "norm-epsilon": "layernorm_epsilon", "fp8-format": "fp8", "num-experts": "num_moe_experts",
    "swiglu": "gated_linear_unit", "overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}  # fmt: skip
_OPPOSITES = {"disable-bias-linear": "add_bias_linear", "no-overlap-p2p-communication": "overlap_p2p_comm"}
# Of the training loop, not of the model: they are read by arguments.py alone.
_OF_TRAINING = """
    micro-batch-size global-batch-size seq-length vocab-size make-vocab-size-divisible-by group-query-attention
    untie-embeddings-and-output-weights position-embedding-type max-position-embeddings rotary-base nnodes nproc-per-node
    use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy grad-reduce-in-bf16 overlap-grad-reduce
    overlap-param-gather activation-offload-fraction
"""


@dataclass
class Made:
    """What a system makes of a job.

    Attributes:
        values: its own names -> values.
        layers: [pipeline rank][chunk] -> the numbers of the blocks that it builds there.
        order: of forwards on a rank that is given by its schedule, (micro-batch, chunk); empty: it is another class's.
    """

    values: dict[str, Any]
    layers: list[list[list[int]]]
    order: list[tuple[int, int]] = field(default_factory=list)


@lru_cache
def enter() -> None:
    """Put the folder on the path, behind what is installed."""
    sys.path.append(str(FOLDER))


def megatron(text: str, blocks: int = 0) -> Made:
    """Return what megatron-core makes of a command; raises what it raises."""
    enter()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config, training = _megatron_config(text)
    tp, pp, cp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size
    v, world = config.virtual_pipeline_model_parallel_size, training["nnodes"] * training["nproc-per-node"]
    _initialize(world, tp, pp, cp, config.expert_model_parallel_size, config.expert_tensor_parallel_size)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(v)

    def held(rank: int, chunk: int) -> list[int]:
        stage = chunk if v else None
        if config.pipeline_model_parallel_layout is not None:
            return list(config.pipeline_model_parallel_layout.get_layer_id_list(vp_stage=stage, pp_rank=rank))
        first = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
        return list(range(first, first + get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)))

    layers = [[held(rank, chunk) for chunk in range(v or 1)] for rank in range(pp)]
    dp = world // (tp * pp * cp)
    m = training["global-batch-size"] // (training["micro-batch-size"] * dp)
    order = get_schedule_table(m, v, config.microbatch_group_size_per_vp_stage) if v else []
    values = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    return Made(values | training | {"dp": dp, "m": m}, layers, order)


def _megatron_config(text: str) -> tuple[Any, dict[str, Any]]:
    """Return (the configuration of a command's transformer, the flags that its training loop reads)."""
    import torch
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    transformer_config.is_te_min_version = lambda *args, **options: True  # of a package that is not here
    flags = dict[str, list[str]]()
    for word in shlex.split(text.replace("\\\n", " ")):
        if word.startswith("--"):
            flags[name := word[2:]] = []
        elif flags and not word.endswith(".py"):
            flags[name].append(word)
    latent = "multi-latent-attention" in flags
    kind = transformer_config.MLATransformerConfig if latent else transformer_config.TransformerConfig
    known = {spec.name for spec in fields(kind)}
    values: dict[str, Any] = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    training = dict[str, Any]()
    for name, given in flags.items():
        target = _FIELDS.get(name, _OPPOSITES.get(name, name.replace("-", "_")))
        if name in _OF_TRAINING.split():
            training[name] = _number(given[0]) if given else True
        elif target not in known:
            raise AssertionError(f"--{name} is no field of {kind.__name__}")
        elif not given:
            values[target] = name not in _OPPOSITES
        elif name == "moe-layer-freq" and given[0].startswith("["):
            values[target] = [int(each) for each in given[0].strip("[]").split(",")]
        else:
            values[target] = given if "modules" in name else _number(given[0])
    if values.get("gated_linear_unit"):
        values["activation_func"] = torch.nn.functional.silu
    values["apply_rope_fusion"] = values["bias_activation_fusion"] = False  # kernels of a package that is not here
    # As arguments.py sets them: one chunk sends and waits, chunks overlap their messages unless they are told not to.
    virtual = values.get("virtual_pipeline_model_parallel_size", 1)
    if stages := values.get("pipeline_model_parallel_layout"):
        count = PipelineParallelLayerLayout.get_num_stages_from_str(stages)
        virtual = count // values["pipeline_model_parallel_size"]
    values["overlap_p2p_comm"] = virtual > 1 and values.get("overlap_p2p_comm", True)
    values["batch_p2p_comm"] = not values["overlap_p2p_comm"]
    return kind(**values), training


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def _initialize(world: int, tp: int, pp: int, cp: int, ep: int, etp: int | None) -> None:
    """Make all process groups of a world in this process, with torch's fake backend."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.current_device = lambda: 0
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )  # fmt: skip


def torchtitan(text: str, blocks: int) -> Made:
    """Return what torchtitan makes of a command for a model of so many blocks; raises what it raises."""
    enter()
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import pipeline_parallel as pipelining
    from torchtitan.distributed.parallel_dims import ParallelDims

    words = shlex.split(text.replace("\\\n", " "))
    start = words.index("torchtitan.train") + 1
    nodes, per_node = (int(words[words.index(flag) + 1]) for flag in ("--nnodes", "--nproc_per_node"))
    given = dict(zip(words[start:], words[start + 1 :], strict=False))
    arguments = words[start:]
    module, config = given["--module"], given["--config"]
    for word, name in ((module, "registry_of_tests"), (config, "config")):
        arguments[arguments.index(word)] = name
    sys.modules.setdefault("registry_of_tests", _registry())
    made = ConfigManager().parse_args(arguments)
    parallelism, training = made.parallelism, made.training
    dims = ParallelDims.from_config(parallelism, nodes * per_node)
    if (dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp) % dims.ep:
        raise AssertionError("ep")  # the mesh of experts, parallel_dims.py: efsdp = dp_shard * cp * tp / ep
    values = asdict(parallelism) | asdict(training) | {"module": module, "config": config, "dp_shard": dims.dp_shard}
    values["checkpointing"] = type(made.activation_checkpoint).__qualname__
    if parallelism.pipeline_parallel_degree == 1:
        return Made(values, [[list(range(blocks))]])
    model = SimpleNamespace(layers=range(blocks))
    count, blocks, first, last = pipelining._get_pipeline_metadata(dims, parallelism, model)
    parts = parallelism.module_fqns_per_model_part
    if parts is None:
        parts = pipelining._generate_llm_fqn_per_model_part(count, blocks, first, last)
    held = [
        pipelining._get_pp_rank_to_stage_indices_mapping(
            rank, dims.pp, parallelism.pipeline_parallel_schedule, len(parts)
        )
        for rank in range(dims.pp)
    ]
    batch, size = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        raise ValueError(f"Batch size {batch} must be divisible by microbatch_size {size}")
    torch_schedule(parallelism.pipeline_parallel_schedule, dims.pp, held[0], len(parts), batch // size)
    return Made(values, [[_blocks(parts[stage]) for stage in stages] for stages in held])


def _blocks(names: list[str]) -> list[int]:
    return [int(name.rpartition(".")[2]) for name in names if name.rpartition(".")[2].isdigit()]


@lru_cache
def _registry() -> ModuleType:
    """Return a module with the part of torchtitan's `Trainer.Config` that a job of ours fills: theirs imports triton."""
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC

    parts: list[tuple[str, Any, Any]] = [
        ("parallelism", ParallelismConfig, field(default_factory=ParallelismConfig)),
        ("training", TrainingConfig, field(default_factory=TrainingConfig)),
        ("activation_checkpoint", ActivationCheckpointingConfig, field(default_factory=SelectiveAC.Config)),
        ("hf_assets_path", str, field(default="")),
    ]
    module = ModuleType("registry_of_tests")
    module.config = kind = make_dataclass("Config", parts, kw_only=True)  # type: ignore[attr-defined]
    kind.__module__, module.__file__ = module.__name__, __file__
    return module


def torch_schedule(name: str, ranks: int, held: Any, count: int, m: int) -> Any:
    """Return torch's schedule of rank 0, with stand-ins for its stages; raises what torch raises."""
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, stage_index=stage, num_stages=count, has_backward=True, device="cpu",
            is_first=stage == 0, is_last=stage == count - 1, submod=None,
        )
        for stage in held
    ]  # fmt: skip
    kind: Any = schedules.get_schedule_class(name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    made = kind(stages[0] if single else stages, m, loss_fn=lambda output, target: 0)
    return made._get_pipeline_order() if single else made.pipeline_order


def automodel(text: str, blocks: int) -> Made:
    """Return what NeMo Automodel makes of a recipe for a model of so many blocks; raises what it raises."""
    enter()
    from nemo_automodel.components.distributed.pipelining import functional
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.distributed.pipelining import schedules

    tables = yaml.safe_load(text)
    made = parse_distributed_section(tables["distributed"])
    values = vars(made["strategy_config"]) | tables.get("step_scheduler", {}) | made
    pipeline, pp = made["pipeline_config"], made["pp_size"]
    spread = made["dp_size"] * made["cp_size"] * made["tp_size"]
    if spread % made["ep_size"]:
        raise AssertionError("ep_size")  # nemo_automodel/components/distributed/mesh_utils.py
    if pipeline is None:
        return Made(values, [[list(range(blocks))]])
    values |= vars(pipeline)
    kind: Any = schedules.get_schedule_class(pipeline.pp_schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    count, _ = functional.calculate_virtual_stages(
        blocks, pipeline.layers_per_stage, pp, single, pipeline.round_virtual_stages_to_pp_multiple
    )
    parts = pipeline.module_fqns_per_model_part
    if parts is None:
        parts = functional.generate_hf_model_fqn_per_model_part(count, blocks)
    style = "v" if kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV) else "loop"
    held = [functional.stage_ids_this_rank(rank, pp, len(parts), style) for rank in range(pp)]
    m, rest = divmod(tables["step_scheduler"]["local_batch_size"], pipeline.pp_microbatch_size)
    if rest:
        raise ValueError("the batch is no multiple of the micro-batch")
    torch_schedule(pipeline.pp_schedule, pp, held[0], len(parts), m)
    return Made(values, [[_blocks(parts[stage]) for stage in stages] for stages in held])


def torch_order(text: str, ranks: int) -> list[list[str]]:
    """Return the cells of each rank of a CSV file as torch's runtime loads it."""
    from torch.distributed.pipelining import schedules

    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "schedule.csv").write_text(text)
        rows = [[cell.strip() for cell in line.split(",")] for line in path.read_text().splitlines()]
    assert len(rows) == ranks
    return [[str(schedules._Action.from_str(cell)) for cell in row if cell] for row in rows]
