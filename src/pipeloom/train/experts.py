"""Experts in training: how a layout spreads them."""

from __future__ import annotations

from pipeloom.config import Config
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.parallel.trip import ExpertParallel, two_levels


def spread_of(config: Config, mesh: Mesh | PipelineMesh | None) -> ExpertParallel | None:
    """How the layout's experts are spread over `mesh`; None: every rank has all. Collective over the expert-parallel ranks."""
    if not isinstance(mesh, Mesh) or mesh.ep.size == 1:
        return None
    parallel = config.parallel
    return two_levels(
        ExpertParallel(mesh.ep, parallel.ep_nodes, chunks=parallel.ep_chunks, blocks=parallel.ep_blocks)
    )
