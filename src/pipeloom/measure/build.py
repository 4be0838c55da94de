"""Construction of a layout's pipeline: its layers, loss and options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn

from pipeloom.config import Config, Layout
from pipeloom.config.problems import naming_keys
from pipeloom.config.sections import LoraSection
from pipeloom.limits import expanded
from pipeloom.models import MoeClasses, cross_entropy, hf, layers, tied, token_loss
from pipeloom.models.layers import VocabularyRanks, block_name
from pipeloom.models.lora import LoraOptions, with_adapters
from pipeloom.ops.layer import Layer
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.parallel.shared_memory_sum import SharedMemoryAllReduce
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.health.watchdog import Watchdog

PARAMETER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_pipeline(
    layout: Layout,
    device: torch.device,
    mesh: Mesh | PipelineMesh | None = None,
    dtype: torch.dtype | None = None,
    watchdog: Watchdog | None = None,
    drawn: bool = True,
) -> Pipeline:
    """Build this process's part of the layout's pipeline, with its stages on `device`.

    Args:
        mesh: the processes and their places; None: all processes, with the layout's sizes.
        dtype: dtype of parameters and computation; None: the configured one.
        watchdog: this worker's watchdog; None: the pipeline starts one.
        drawn: draw the decoder's first weights; False: all are loaded afterwards.
    """
    config = layout.config
    if mesh is None and layout.mesh.world > layout.mesh.pp:
        mesh = Mesh.of(layout.mesh)
    tensor = _tensor_parallel(mesh, config, device) if isinstance(mesh, Mesh) and mesh.tp.size > 1 else None
    kind = dtype or PARAMETER_DTYPES[config.train.dtype]
    options = RuntimeOptions(
        transport=config.schedule.transport,
        overlap_p2p=config.schedule.overlap_p2p,
        shapes=config.schedule.shapes,
        timeout=config.train.seconds,
        watchdog=watchdog,
        # Sorted batches have more rows the shorter they are.
        microbatch_sizes=None if config.data.documents == "sort" else layout.microbatch_sizes,
        slice_tokens=layout.slice_tokens,
        recompute=recomputed(config),
        main_gradients=kind.itemsize < 4,
        shard_gradients=config.optimizer.zero1,
        checksum=config.debug.checksum,
        fault=layout.fault,
        check_every=config.train.check_every,
        device=device,
    )
    classes, slices, spread = moe_classes(layout), layout.schedule.slices > 1, _vocabulary_ranks(layout, mesh)
    with naming_keys():
        return Pipeline(
            compiled(model_layers(config, kind, device, tensor, mesh, classes, drawn, slices, spread), config),
            layout.schedule,
            loss=training_loss(config, tensor),
            mesh=mesh,
            stages=layout.stage_layers,
            tied=ties(config),
            options=options,
        )


def model_layers(
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
    tensor: TensorParallel | None = None,
    mesh: Mesh | PipelineMesh | None = None,
    classes: MoeClasses = MoeClasses(),
    drawn: bool = True,
    slices: bool = False,
    spread: VocabularyRanks | None = None,
) -> list[Layer]:
    """Return the layers of a configuration's model, with its adapters.

    Args:
        slices: they can run slices of sequences.
        spread: the ranks over which the output layer is spread; None: it is one layer.
    """
    options, context = lora_options(config.lora), context_parallel_of(config, mesh)
    if config.model.source:
        model: list[Layer] = foreign(config.model.source, dtype, context, slices, spread)
    else:
        experts = expert_parallel_of(config, mesh)
        model = layers(
            config.model.shape(), config.train.seed, dtype, device, tensor, experts, classes, drawn, context, spread
        )
    return model if options is None else with_adapters(model, options, config.train.seed)


def _vocabulary_ranks(layout: Layout, mesh: Mesh | PipelineMesh | None) -> VocabularyRanks | None:
    """Return how the layout's output layer is spread over `mesh`; None: it is one layer."""
    if not layout.schedule.vocabulary:
        return None
    shape = layout.mesh
    return VocabularyRanks(Mesh.resolve(mesh).place.pp_tp, shape.pp * shape.tp, layout.config.train.label_smoothing)


def context_parallel_of(config: Config, mesh: Mesh | PipelineMesh | None) -> ContextParallel | None:
    """Return how the layout's sequences are spread over `mesh`; None: every rank has whole ones."""
    if not isinstance(mesh, Mesh) or mesh.cp.size == 1:
        return None
    return ContextParallel(mesh.cp, config.parallel.cp_exchange)


def compiled(model: list[Layer], config: Config) -> list[Layer]:
    """Return the layers with each block compiled on its own, where `train.compile` says so.

    Equal blocks share one compiled graph; it is compiled in the first forward of a process.
    """
    if config.train.compile == "none":
        return model
    # Our tables of positions are cached functions of a few numbers, which a compiler may as well trace.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    names = block_names(config)

    def build(layer: Layer) -> nn.Module:
        module = layer.build()
        module.compile(backend=config.train.compile_backend)
        return module

    return [replace(each, build=partial(build, each)) if each.name in names else each for each in model]


def expert_parallel_of(config: Config, mesh: Mesh | PipelineMesh | None) -> ExpertParallel | None:
    """Return how the layout's experts are spread over `mesh`; None: every rank has all of them."""
    if not isinstance(mesh, Mesh) or mesh.ep.size == 1:
        return None
    parallel = config.parallel
    inside, across = (mesh.inside, mesh.across) if parallel.ep_nodes > 1 else (None, None)
    return ExpertParallel(mesh.ep, parallel.ep_nodes, inside, across, parallel.ep_chunks, parallel.ep_blocks)


def moe_classes(layout: Layout) -> MoeClasses:
    """Return the classes of a layout's experts and routers."""
    defaults = MoeClasses()
    return MoeClasses(
        layout.classes.get("experts_class", defaults.experts), layout.classes.get("router_class", defaults.router)
    )


def lora_options(section: LoraSection) -> LoraOptions | None:
    """Return the options of a configuration's adapters; None: it has none."""
    return LoraOptions(**section.model_dump(exclude={"adapter"})) if section.r else None


def ties(config: Config) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of parameters that share one weight."""
    if config.model.source:
        return foreign(config.model.source, PARAMETER_DTYPES[config.train.dtype]).tied
    return tied(config.model.shape())


@cache
def foreign(
    source: str,
    dtype: torch.dtype,
    context: ContextParallel | None = None,
    slices: bool = False,
    spread: VocabularyRanks | None = None,
) -> hf.ModelLayers:
    """Return the layers of the model in a Hugging Face directory."""
    return hf.layers(expanded(source), dtype=dtype, context=context, slices=slices, spread=spread)


def _tensor_parallel(mesh: Mesh, config: Config, device: torch.device) -> TensorParallel:
    shares = device.type == "cpu" and config.schedule.transport in ("auto", "shared")
    sums = (
        SharedMemoryAllReduce.over(mesh.tp, mesh.everyone.size, (config.train.seconds or 300.0) + 60.0)
        if shares
        else None
    )
    return TensorParallel(mesh.tp, config.parallel.sp, sums)


def training_loss(config: Config, tensor: TensorParallel | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function: with label smoothing where gradients are enabled, the plain cross entropy in evaluation."""
    if config.model.source:
        return lambda logits, targets: cross_entropy(
            logits, targets, config.train.label_smoothing if torch.is_grad_enabled() else 0.0
        )
    smoothed = token_loss(config.model.shape(), config.train.label_smoothing, tensor)
    plain = token_loss(config.model.shape(), 0.0, tensor)
    return lambda logits, targets: (smoothed if torch.is_grad_enabled() else plain)(logits, targets)


def recomputed(config: Config) -> Literal["none"] | frozenset[str]:
    """Return the names of the blocks to recompute.

    Recomputing the embedding would save nothing, since it keeps only tokens; nor the output layer, whose backward follows its
    forward at once.
    """
    setting = config.train.recompute
    if isinstance(setting, str) and setting != "full":
        return "none"
    names = block_names(config)
    return frozenset(names if isinstance(setting, str) else (names[number] for number in setting))


def block_names(config: Config) -> list[str]:
    """Return the names of the model's blocks, first to last."""
    blocks = range(config.model.blocks)
    if config.model.source:
        trunk = foreign(config.model.source, PARAMETER_DTYPES[config.train.dtype])[1:]
        return [trunk[number].name for number in blocks]
    return [block_name(number) for number in blocks]
