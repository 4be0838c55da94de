"""The pipeline of a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pipeloom.config import Config, Layout
from pipeloom.models import layers, names, tied, token_loss
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.parallel.shared_sum import SharedSums
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.train.experts import spread_of
from pipeloom.train.failures import death_notice

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_pipeline(
    layout: Layout, device: torch.device, mesh: Mesh | PipelineMesh | None = None, dtype: torch.dtype | None = None
) -> Pipeline:
    """This process's part of the layout's pipelines, its own stages built on `device`.

    Args:
        mesh: the processes; None: all, as the layout spreads them.
        dtype: of parameters and computation; None: as configured.
    """
    config = layout.config
    if mesh is None and layout.mesh.world > layout.mesh.pp:
        mesh = Mesh.of(layout.mesh)
    tensor = _tensor_parallel(mesh, config, device) if isinstance(mesh, Mesh) and mesh.tp.size > 1 else None
    kind = dtype or DTYPES[config.train.dtype]
    options = RuntimeOptions(
        transport=config.schedule.transport,
        overlap_p2p=config.schedule.overlap_p2p,
        timeout=config.train.timeout,
        notice=death_notice,
        microbatch_sizes=layout.microbatch_sizes,
        recompute=_recomputed(config),
        head_deferral=config.schedule.head_deferral,
        main_gradients=kind.itemsize < 4,
        shard_gradients=config.optimizer.zero1,
        fault=layout.fault,
        device=device,
        trace=True,
    )
    return Pipeline(
        layers(config.model, config.train.seed, kind, device, tensor, spread_of(config, mesh)),
        layout.schedule,
        loss=_loss(config, tensor),
        mesh=mesh,
        stages=layout.stage_layers,
        tied=tied(config.model),
        options=options,
    )


def _tensor_parallel(mesh: Mesh, config: Config, device: torch.device) -> TensorParallel:
    shares = device.type == "cpu" and config.schedule.transport in ("auto", "shared")
    sums = SharedSums.over(mesh.tp, mesh.everyone.size, config.train.timeout) if shares else None
    return TensorParallel(mesh.tp, config.parallel.sp, sums)


def _loss(config: Config, tensor: TensorParallel | None) -> Callable[[Tensor, Tensor], Tensor]:
    """What training minimises; an evaluation is told the cross entropy itself, without smoothing."""
    smoothed = token_loss(config.model, config.train.label_smoothing, tensor)
    plain = token_loss(config.model, 0.0, tensor)
    return lambda logits, targets: (smoothed if torch.is_grad_enabled() else plain)(logits, targets)


def _recomputed(config: Config) -> Literal["none"] | frozenset[str]:
    """The blocks to recompute, by name. The embedding keeps tokens only, and the output layer's loss comes at once."""
    chosen = config.train.recompute
    if chosen == "none":
        return "none"
    blocks = range(config.model.num_hidden_layers) if chosen == "full" else chosen
    return frozenset(names.block(number) for number in blocks)
