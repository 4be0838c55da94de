"""The pipeline of a layout."""

from __future__ import annotations

import torch

from pipeloom.config import Layout
from pipeloom.models import cross_entropy, layers, tied
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.train.failures import death_notice

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_pipeline(
    layout: Layout, device: torch.device, mesh: PipelineMesh | None = None, dtype: torch.dtype | None = None
) -> Pipeline:
    """This process's part of the layout's pipeline, its own stages built on `device`.

    Args:
        mesh: the processes; None: all.
        dtype: of parameters and computation; None: as configured.
    """
    config = layout.config
    options = RuntimeOptions(
        transport=config.schedule.transport,
        overlap_p2p=config.schedule.overlap_p2p,
        timeout=config.train.timeout,
        notice=death_notice,
        microbatch_sizes=layout.microbatch_sizes,
        fault=layout.fault,
        device=device,
        trace=True,
    )
    return Pipeline(
        layers(config.model, config.train.seed, dtype or DTYPES[config.train.dtype], device),
        layout.schedule,
        loss=cross_entropy,
        mesh=mesh,
        stages=layout.stage_layers,
        tied=tied(config.model),
        options=options,
    )
